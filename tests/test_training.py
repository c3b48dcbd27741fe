"""Runs from the command line and from Python, on a data set of seconds."""

import csv
import os
import shutil

import cv2
import numpy as np
import pytest
import ranks
import torch
import yaml
from scenes import MINUTE, write_dataset

import detector
from detector.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def common(data):
    return [
        f"data={data}",
        f"model={MINUTE}",
        "imgsz=64",
        "batch=2",
        "nbs=4",
        "workers=0",
        "device=cpu",
        "plots=false",
        "patience=0",
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, common):
    """A finished run of an epoch, to be read only."""
    return train(tmp_path_factory.mktemp("trained"), common, "mine", "epochs=1")


def run(*arguments):
    """`detector` in this process: its exit status."""
    return main([str(argument) for argument in arguments])


def train(folder, common, name, *overrides):
    assert run("train", *common, f"project={folder}", f"name={name}", *overrides) == 0
    return folder / name


def weights(folder, which="last"):
    saved = torch.load(folder / "weights" / f"{which}.pt", weights_only=True)
    return {f"{part}.{key}": value for part in ("model", "ema") for key, value in saved.get(part, {}).items()}


def same(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def shown_by(*words):
    """What `detector` prints in a process of its own."""
    process = ranks.start("detector", *words)
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


def test_train_resume_val_and_predict_through_the_command_line(tmp_path, data, common):
    """Two epochs at once; the second again, resumed; and use of what came out, in processes of their own."""
    whole = train(tmp_path, common, "whole", "epochs=2", "plots=true", "save_period=1")
    for name in (
        "settings.yaml",
        "metrics.csv",
        "curves.png",
        "precision_recall.png",
        "f1.png",
        "confusion.png",
        "validation.jpg",
        "train_epoch1_batch0.jpg",
    ):
        assert (whole / name).stat().st_size > 0, name
    with (whole / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(float(row[key]) >= 0 for row in rows for key in ("box", "cls", "dfl", "mAP50-95", "lr"))

    halves = shutil.copytree(whole, tmp_path / "halves")
    os.replace(halves / "weights" / "epoch1.pt", halves / "weights" / "last.pt")
    assert run("train", f"resume={halves}") == 0
    assert same(whole, halves)

    best = whole / "weights" / "best.pt"
    shown = shown_by("val", best, f"data={data}", "device=cpu", f"project={tmp_path}")
    row = next(line for line in shown.splitlines() if line.startswith("all"))
    saved = torch.load(best, weights_only=True)["metrics"]
    assert row.split()[-2:] == [f"{saved['mAP50']:.3f}", f"{saved['mAP50-95']:.3f}"]
    options = ["conf=0.001", "device=cpu", f"project={tmp_path}", "save_txt=true"]
    images = data.parent / "images" / "val"
    assert "in 4 images" in shown_by("predict", best, images, *options)
    assert len(list((tmp_path / "predict").glob("*.jpg"))) == 4
    assert len(list((tmp_path / "predict" / "labels").glob("*.txt"))) == 4


def test_one_seed_gives_the_same_weights_to_the_bit_whatever_the_workers(tmp_path, common):
    first = train(tmp_path, common, "first", "epochs=2")
    workers = train(tmp_path, common, "workers", "epochs=2", "workers=2")
    other = train(tmp_path, common, "other", "epochs=2", "seed=1")
    assert same(first, workers)
    assert not same(first, other)


@pytest.mark.parametrize(("multi_scale", "batches"), [(0, (4, 2, 1)), (0.5, (3,))])
def test_a_run_does_not_depend_on_how_its_windows_are_cut(tmp_path, common, multi_scale, batches):
    """Two epochs at 8 a step with BatchNorm frozen: the same weights for every micro-batch, to rounding."""
    exact = ["epochs=2", "nbs=8", "freeze_bn=true", "amp=fp32", "accumulate_warmup=false", "optimizer=SGD", "lr0=0.01"]
    exact.append(f"multi_scale={multi_scale}")
    whole = weights(train(tmp_path, common, "b8", *exact, "batch=8"))
    for batch in batches:
        cut = weights(train(tmp_path, common, f"b{batch}", *exact, f"batch={batch}"))
        for key, value in whole.items():
            if value.dtype.is_floating_point:
                torch.testing.assert_close(cut[key], value, rtol=1e-4, atol=1e-6)


def test_training_learns(tmp_path, common):
    """The whole of it, from labels to mAP: it finds what it was shown."""
    data = write_dataset(tmp_path / "shown", train=24)
    data.write_text(data.read_text().replace("images/val", "images/train"))
    easy = ["mosaic=0", "scale=0.1", "translate=0.05", "nbs=4", "batch=4", "optimizer=AdamW", "lr0=0.01"]
    folder = train(tmp_path, [*common, f"data={data}", *easy], "learns", "epochs=20")
    with (folder / "metrics.csv").open() as file:
        best = max(float(row["mAP50"]) for row in csv.DictReader(file))
    assert best > 0.5


@pytest.mark.parametrize(("metric", "val", "wanted"), [("recall", "true", max), ("box", "false", min)])
def test_the_best_epoch_is_that_of_the_metric(tmp_path, common, metric, val, wanted):
    """Any column of metrics.csv: the highest of a metric, the lowest of a loss, which needs no validation."""
    folder = train(tmp_path, common, "run", "epochs=4", f"metric={metric}", f"val={val}", "lr0=0.005")
    with (folder / "metrics.csv").open() as file:
        values = [float(row[metric]) for row in csv.DictReader(file)]
    best = torch.load(folder / "weights" / "best.pt", weights_only=True)
    assert best["epoch"] == values.index(wanted(values)) + 1


def test_python_trains_loads_and_predicts(tmp_path, data):
    result = detector.train(
        data=data,
        model=str(MINUTE),
        imgsz=64,
        batch=4,
        epochs=1,
        workers=0,
        device="cpu",
        project=tmp_path,
        plots=False,
    )
    assert result.folder == tmp_path / "train"
    assert {"mAP50-95", "mAP50", "precision", "recall"} <= result.metrics.keys()
    model = detector.load(result.best, device="cpu")
    assert model.names == ("square", "disc")
    files = sorted((data.parent / "images" / "val").iterdir())
    by_path = model.predict(files, conf=0.0)
    arrays = [cv2.cvtColor(cv2.imread(str(file)), cv2.COLOR_BGR2RGB) for file in files]
    by_array = model.predict(arrays, conf=0.0)
    listing = data.parent / "listing.txt"
    listing.write_text("\n".join(f"images/val/{file.name}" for file in files))
    by_list, by_glob = model.predict(listing, conf=0.0), model.predict(str(data.parent / "images/val/*.png"), conf=0.0)
    assert [one.path.name for one in by_list] == [one.path.name for one in by_glob] == [file.name for file in files]
    one_by_one = [model.predict(file, conf=0.0, batch=1)[0] for file in files]
    assert len(by_path) == len(files)
    for a, b, c, file in zip(by_path, by_array, one_by_one, files, strict=True):
        assert a.path == file
        assert a.boxes.shape == (len(a.scores), 4)
        assert len(a) > 0
        np.testing.assert_array_equal(a.boxes, b.boxes)
        np.testing.assert_allclose(a.scores, c.scores, atol=0.02)  # another batch size rounds differently in bf16
        assert (a.boxes >= 0).all()
        assert (a.boxes <= 64).all()
        assert (np.diff(a.scores) <= 0).all()


def test_weights_of_a_run_start_another(tmp_path, common, trained, capsys):
    train(tmp_path, common, "second", "epochs=1", f"weights={trained / 'weights' / 'best.pt'}", "freeze=2")
    assert "tensors" in capsys.readouterr().out
    start, end = weights(trained, "best"), weights(tmp_path / "second")
    assert torch.equal(start["ema.model.0.conv.weight"], end["model.model.0.conv.weight"])
    assert torch.equal(start["ema.model.1.bn.running_mean"], end["model.model.1.bn.running_mean"])
    assert not torch.equal(start["ema.model.2.conv.weight"], end["model.model.2.conv.weight"])


def test_weights_bring_their_model_where_none_is_named(tmp_path, common, trained, capsys):
    unnamed = [word for word in common if not word.startswith("model=")]
    second = train(tmp_path, unnamed, "second", "epochs=1", f"weights={trained}", "val=false", "device=cpu")
    assert capsys.readouterr().out.count("minute.yaml, scale t, ") == 1
    assert weights(trained, "best").keys() == weights(second, "best").keys()
    again = yaml.safe_load((second / "settings.yaml").read_text())
    assert (again["model"], again["weights"]) == ("auto", str(trained))  # so that the run's settings give it again
    assert run("train", f"resume={second}", "epochs=2") == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=nothing.yaml"], "nothing.yaml"),
        (["model=v13n"], "v13n: not a model (v10[blmnsx], v11[nsmlx], "),
        (["model=v8n-p6", "imgsz=96"], "imgsz=96: must be a multiple of 64, the largest stride of this model"),
        (["nms=false"], "nms=false: this model has no branch whose boxes need no suppression"),
        (["metric=l1"], "metric=l1: the losses of this model are box, cls, dfl"),
        (["epoch=3"], "Did you mean 'epochs'?"),
        (["imgsz=100"], "multiple of 32"),
        (["device=7"], "device=7"),
        (["weights=nothing.pt"], "nothing.pt: no such checkpoint"),
        (["freeze=99"], "the head, must train"),
        (["names=[one]"], "2 classes"),
        (["resume=nowhere"], "nowhere: no such checkpoint"),
        (["device=tpu"], "device=tpu: not a device"),
        (["device=cpu,cpu"], "device=cpu,cpu: several devices"),
        (["bn=renorm"], "should be 'batch', 'sync' or 'frozen'"),
        (["bn=sync", "freeze_bn=true"], "contradicts bn=sync"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_line_and_leaves_no_run(tmp_path, common, capsys, overrides, message):
    assert run("train", *common, "epochs=1", f"project={tmp_path / 'runs'}", *overrides) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "runs").exists()


def test_a_label_mistake_is_found_before_anything_is_written(tmp_path, capsys):
    data = write_dataset(tmp_path / "bad")
    label = data.parent / "labels" / "train" / "001.txt"
    label.write_text("5 0.5 0.5 0.1 0.1\n")
    assert run("train", f"data={data}", f"model={MINUTE}", f"project={tmp_path / 'runs'}") == 2
    assert f"{label}:1:" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_not_written_into(tmp_path, common, trained, capsys):
    folder = shutil.copytree(trained, tmp_path / "mine")
    before = (folder / "weights" / "last.pt").read_bytes()
    assert run("train", *common, f"project={tmp_path}", "name=mine", "epochs=1") == 2
    assert f"resume={folder}" in capsys.readouterr().err
    assert (folder / "weights" / "last.pt").read_bytes() == before
    assert run("train", f"resume={folder / 'weights' / 'best.pt'}") == 2
    assert "weights only" in capsys.readouterr().err
    moved = tmp_path / "moved.pt"
    moved.write_bytes(before)
    assert run("train", f"resume={moved}") == 2
    assert f"weights={moved}" in capsys.readouterr().err


def test_weights_of_other_classes_are_refused_for_a_measurement(tmp_path, trained, capsys):
    other = write_dataset(tmp_path / "other")
    other.write_text(other.read_text().replace("- disc", "- disc\n- cross"))
    assert run("val", trained / "weights" / "best.pt", f"data={other}") == 2
    assert "only here cross" in capsys.readouterr().err


def test_info_says_what_a_checkpoint_holds(trained, capsys):
    assert run("info", trained) == 0
    shown = capsys.readouterr().out
    for part in ("best.pt", "minute.yaml", "square, disc", "1 of 1", "mAP50-95", "batch=2", "torch"):
        assert part in shown
    assert run("info", trained / "weights" / "last.pt") == 0
    assert "with all to go on" in capsys.readouterr().out


def test_a_damaged_image_is_left_out_and_named(tmp_path, data, trained, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"no image")
    options = ["conf=0.001", "device=cpu", f"project={tmp_path}", "name=found"]
    assert run("predict", trained, tmp_path / "photos", *options) == 2
    assert "a.jpg" in capsys.readouterr().err
    good = next((data.parent / "images" / "val").iterdir())
    (tmp_path / "photos" / good.name).write_bytes(good.read_bytes())
    assert run("predict", trained, tmp_path / "photos", *options) == 0
    shown = capsys.readouterr()
    assert "left out" in shown.err
    assert "in 1 images" in shown.out


def test_a_missing_source_is_named(tmp_path, trained, capsys):
    assert run("predict", trained / "weights" / "best.pt", tmp_path / "no*.jpg", f"project={tmp_path}") == 2
    assert "no image there" in capsys.readouterr().err
    assert not (tmp_path / "predict").exists()
