"""What a run takes of a data set: a fraction of its images, some of its classes, all of them as one."""

from pathlib import Path

import numpy as np
import pytest
from scenes import MINUTE, write_dataset
from test_training import run, train

from detector import checkpoint_file
from detector.config.settings import Settings, load_settings
from detector.data.choosing import ITEM, as_one_class, class_numbers, fraction_of, of_classes
from detector.data.description import load_description
from detector.data.reading import build_index
from detector.errors import ConfigError
from detector.run.build import indices


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=20)


@pytest.fixture(scope="module")
def index(data):
    return build_index(load_description(data), "train")


def contents(index):
    """What an index says of each of its images, by the image's name."""
    return {
        index.path(i).name: (index.size(i), index.boxes_xyxy(i).tolist(), index.labels(i).tolist())
        for i in range(len(index))
    }


def test_a_fraction_grows_and_keeps_the_order(index):
    before = set()
    for fraction in (0.001, 0.1, 0.2, 0.5, 0.55, 1):
        chosen = list(contents(fraction_of(index, fraction, seed=3)))
        assert len(chosen) == max(1, round(20 * fraction))
        assert chosen == sorted(chosen)
        assert before <= set(chosen)
        before = set(chosen)
    assert contents(fraction_of(index, 0.5, 3)) == contents(fraction_of(index, 0.5, 3))
    assert contents(fraction_of(index, 0.5, 3)) != contents(fraction_of(index, 0.5, 4))


@pytest.mark.parametrize(
    ("classes", "numbers"), [([0], {0}), (["disc"], {1}), (["1"], {1}), (["disc", 0], {0, 1}), ([1, "disc"], {1})]
)
def test_classes_are_names_or_numbers(classes, numbers):
    assert class_numbers(classes, ["square", "disc"]) == numbers


def test_a_name_of_digits_is_a_name_first():
    assert class_numbers(["1"], ["7", "8", "1"]) == {2}
    assert class_numbers([1], ["7", "8", "1"]) == {1}


@pytest.mark.parametrize("one", [2, -1, "circle", "2", "Disc", ""])
def test_what_is_no_class_is_refused_with_those_that_are(one):
    with pytest.raises(ConfigError, match=r"is no class of \['square', 'disc'\]; .* 0 to 1"):
        class_numbers([one], ["square", "disc"])


def test_boxes_of_other_classes_are_gone_and_their_images_are_background(index):
    chosen = of_classes(index, ["disc"], single=False)
    assert chosen.names == index.names
    assert len(chosen) == len(index)
    for i in range(len(index)):
        mine = index.labels(i) == 1
        assert np.array_equal(chosen.boxes_xyxy(i), index.boxes_xyxy(i)[mine])
        assert (chosen.labels(i) == 1).all()
    assert any(len(index.labels(i)) and not len(chosen.labels(i)) for i in range(len(index)))


def test_all_classes_as_one(index):
    one = of_classes(index, None, single=True)
    assert one.names == (ITEM,)
    assert not one.classes.any()
    assert np.array_equal(one.boxes_xywh, index.boxes_xywh)
    assert len(of_classes(index, [1], single=True).classes) == (index.classes == 1).sum()


def test_a_box_of_two_classes_is_one_of_one_class(tmp_path):
    data = write_dataset(tmp_path)
    rows = ["0 0.5 0.5 0.2 0.2", "1 0.5 0.5 0.2 0.2", "1 0.3 0.5 0.2 0.2"]
    for name in ("004", "005"):  # the same box in another image is another
        (tmp_path / f"labels/train/{name}.txt").write_text("\n".join(rows))
    both = build_index(load_description(data), "train")
    one = as_one_class(both)
    for i in (4, 5):
        assert both.boxes_xyxy(i).shape == (3, 4)
        assert one.boxes_xyxy(i).tolist() == both.boxes_xyxy(i)[[0, 2]].tolist()


def test_a_run_takes_the_fraction_of_its_training_images_alone(data):
    said = []
    settings = load_settings(Settings, None, [f"data={data}", "fraction=0.25", "classes=disc", "seed=2"])
    training, validation = indices(settings, said.append)
    assert (len(training), len(validation)) == (5, 4)
    assert said == ["fraction  0.25: 5 of 20 training images"]
    assert set(training.classes) | set(validation.classes) == {1}
    nothing = load_settings(Settings, None, [f"data={data}", "fraction=0.01", "classes=disc", "seed=1"])
    with pytest.raises(ConfigError, match=r"none of the 1 training images shows one"):
        indices(nothing, said.append)


@pytest.mark.parametrize(
    ("word", "value"), [("classes=disc", ["disc"]), ("classes=1", [1]), ("classes='0,1'", ["0", "1"]),
                        ("classes=[0, disc]", [0, "disc"])]
)  # fmt: skip
def test_one_class_is_as_good_as_a_list_of_one(word, value):
    assert load_settings(Settings, None, ["data=d", word]).classes == value


@pytest.mark.parametrize("word", ["fraction=0", "fraction=1.5", "classes=[]", "sampling=2", "sampling=often",
                                  "cls_pw=-1", "single_cls=2"])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(word):
    with pytest.raises(ConfigError, match=word.split("=")[0]):
        load_settings(Settings, None, ["data=d", word])


# --- runs


COMMON = [f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "workers=0", "plots=false", "amp=fp32"]


def table(capsys, *words):
    """The rows of `detector val`, by their first word, and all that it said."""
    assert run("val", *words, "workers=0", "plots=false", "device=cpu", "conf=0.0001") == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line for line in lines if line.startswith(("all", "square", "disc", ITEM))}, lines


@pytest.mark.slow
def test_a_run_of_one_class_is_of_item_and_is_judged_as_such(tmp_path, data, capsys):
    folder = train(tmp_path, [f"data={data}", *COMMON], "run", "epochs=1", "single_cls=true")
    saved = checkpoint_file.read(folder / "weights" / "best.pt")
    assert saved["names"] == [ITEM]
    assert saved["settings"]["single_cls"] is True
    capsys.readouterr()
    rows, _ = table(capsys, folder)
    assert set(rows) <= {"all", ITEM}
    boxes = sum(len(file.read_text().splitlines()) for file in Path(data.parent, "labels/val").iterdir())
    assert rows["all"].split()[1:3] == ["4", str(boxes)]
    assert run("train", f"resume={folder}", "epochs=2") == 0
    assert run("train", f"resume={folder}", "epochs=3", "single_cls=false") == 2
    assert "single_cls=False: cannot change" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_some_classes_keeps_the_list_and_is_judged_on_them(tmp_path, data, capsys):
    folder = train(tmp_path, [f"data={data}", *COMMON], "run", "epochs=1", "classes=[disc]")
    assert "classes   boxes of disc alone" in capsys.readouterr().out
    assert checkpoint_file.read(folder / "weights" / "best.pt")["names"] == ["square", "disc"]
    rows, lines = table(capsys, folder)
    assert "classes   disc alone" in lines
    whole, _ = table(capsys, folder, "classes=[0, 1]")
    assert rows["disc"] == whole["disc"]  # it is what it is in an evaluation of all
    assert rows["all"] != whole["all"]
    assert rows["square"].split()[1:3] == ["0", "0"] if "square" in rows else True


@pytest.mark.slow
@pytest.mark.parametrize("other", ["fraction=0.3", "fraction=1", "classes=[square]", "sampling=balanced"])
def test_a_run_goes_on_with_what_it_took(tmp_path, data, other, capsys):
    folder = train(tmp_path, [f"data={data}", *COMMON], "run", "epochs=1", "fraction=0.5", "classes=[disc]")
    assert run("train", f"resume={folder}", "epochs=2", other) == 2
    assert f"{other.split('=')[0]}=" in (error := capsys.readouterr().err)
    assert "cannot change in the middle of a run" in error
    assert run("train", f"resume={folder}", "epochs=2", "fraction=0.5", "classes=[disc]") == 0
    assert checkpoint_file.read(folder / "weights" / "last.pt")["images"] == 10
