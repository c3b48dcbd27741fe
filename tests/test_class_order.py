"""The same classes in another order: numbers differ, names decide."""

import shutil

import pytest
import yaml
from scenes import MINUTE, write_dataset
from test_training import run

from detector import checkpoint_file, load
from detector.data.description import load_description
from detector.data.reading import build_index
from detector.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=8, val=6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("trained")
    settings = [
        f"data={data}",
        f"model={MINUTE}",
        "imgsz=64",
        "epochs=2",
        "batch=4",
        "nbs=4",
        "workers=0",
        "device=cpu",
    ]
    assert run("train", *settings, "plots=false", f"project={folder}", "name=run") == 0
    return folder / "run" / "weights" / "best.pt"


def renumbered(data, folder, names):
    """A copy of a data set whose classes are numbered as in `names`."""
    copy = shutil.copytree(data.parent, folder)
    description = yaml.safe_load(data.read_text(encoding="utf-8"))
    for labels in copy.glob("labels/*/*.txt"):
        rows = [line.split(maxsplit=1) for line in labels.read_text(encoding="utf-8").splitlines()]
        numbers = [names.index(description["names"][int(number)]) for number, _ in rows]
        lines = [f"{number} {rest}\n" for number, (_, rest) in zip(numbers, rows, strict=True)]
        labels.write_text("".join(lines), encoding="utf-8")
    (copy / "data.yaml").write_text(yaml.safe_dump({**description, "names": names}), encoding="utf-8")
    return copy / "data.yaml"


def table(capsys, *words):
    assert run("val", *words, "workers=0", "plots=false", "device=cpu", "conf=0") == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith(("all", "square", "disc"))], lines


def test_val_measures_the_same_whatever_the_order(tmp_path, data, trained, capsys):
    turned = renumbered(data, tmp_path / "turned", ["disc", "square"])
    before, _ = table(capsys, trained)
    after, lines = table(capsys, trained, f"data={turned}")
    assert before == after
    assert f"classes   in the order of best.pt; {turned} has them in another" in lines


def test_other_names_are_refused_unless_they_are_said_to_be_the_same(tmp_path, data, trained, capsys):
    other = renumbered(data, tmp_path / "other", ["square", "disc"])
    text = other.read_text(encoding="utf-8").replace("disc", "circle")
    other.write_text(text, encoding="utf-8")
    assert run("val", trained, f"data={other}") == 2
    error = capsys.readouterr().err
    assert "only here circle; only there disc" in error
    assert "names='[...]'" in error
    assert table(capsys, trained, f"data={other}", "names=[square, disc]")[0] == table(capsys, trained)[0]


def test_training_from_weights_puts_the_classes_in_the_data_sets_order(tmp_path, data, trained, capsys):
    """At rates next to nothing the network that goes on is the one that it started from."""
    turned = renumbered(data, tmp_path / "turned", ["disc", "square"])
    settings = ["imgsz=64", "epochs=1", "workers=0", "device=cpu", "plots=false", "lr0=1e-12", "weight_decay=0"]
    words = [f"data={turned}", f"model={MINUTE}", f"weights={trained}", f"project={tmp_path}", "name=on", "bn=frozen"]
    assert run("train", *words, *settings, "optimizer=SGD", "warmup_bias_lr=0") == 0
    assert "its classes in the data set's order" in capsys.readouterr().out
    images = sorted((data.parent / "images" / "val").iterdir())
    old, new = load(trained, device="cpu"), load(tmp_path / "on", device="cpu")
    for a, b in zip(old.predict(images, conf=0.01), new.predict(images, conf=0.01), strict=True):
        assert [old.names[c] for c in a.classes] == [new.names[c] for c in b.classes]
    assert checkpoint_file.read(tmp_path / "on" / "weights" / "best.pt")["names"] == ["disc", "square"]


def test_names_must_be_as_many_as_the_classes(data):
    with pytest.raises(ConfigError, match=r"names=\['a'\]: .* has 2 classes"):
        load_description(data).named(["a"])
    index = build_index(load_description(data), "val")
    assert index.with_classes_of(("square", "circle")) is None
    assert (index.with_classes_of(("disc", "square")).classes == 1 - index.classes).all()
