"""First tries: what people type who come from another trainer, or guess. Each works or says what does."""

import csv
import os
import threading

import numpy as np
import pytest
import torch
from scenes import MINUTE, write_dataset

import detector
from detector.cli import main
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import PredictSettings
from detector.errors import ConfigError, DataError
from detector.folders import create_folder, last_run, remove_run
from detector.inference.detector import STRIDE, check_limits
from detector.inference.sources import Reading, find_sources, read_sources
from detector.inference.sources.arrays import check_image
from detector.precision import choose_precision

DATA = "path: .\ntrain: images/train\nval: images/val\nnames: [a, b]\nnc: 2\ndownload: https://none\n"


def line_id(value):
    return " ".join(value) if isinstance(value, list) else ""


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with one file of each kind."""
    monkeypatch.chdir(tmp_path)
    contents = {
        "data.yaml": DATA,
        "config.yaml": "data: data.yaml\nepochs: 5\n",
        "model.yaml": "nc: 2\nbackbone: []\nhead: []\n",
        "both.yaml": DATA + "epochs: 5\n",
        "best.pt": "",
        "a=b.jpg": "",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "runs" / "train" / "weights").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "file", "values", "overrides"),
    [
        (["data.yaml"], None, {"data": "data.yaml"}, ()),
        (["data.yaml", "epochs=3"], None, {"data": "data.yaml"}, ("epochs=3",)),
        (["epochs=3", "data.yaml"], None, {"data": "data.yaml"}, ("epochs=3",)),
        (["config.yaml", "epochs=3"], "config.yaml", {}, ("epochs=3",)),
        (["config.yaml", "data.yaml"], "config.yaml", {"data": "data.yaml"}, ()),
        (["data.yaml", "model.yaml"], None, {"data": "data.yaml", "model": "model.yaml"}, ()),
        (["data.yaml", "yolo11s"], None, {"data": "data.yaml", "model": "yolo11s"}, ()),
        (["resume"], None, {"resume": True}, ()),
        (["both.yaml"], "both.yaml", {}, ()),
        (["none.yaml"], "none.yaml", {}, ()),
    ],
    ids=line_id,
)
def test_words_of_train_are_taken_for_what_they_hold(files, line, file, values, overrides):
    said = words.of_run(line)
    assert (said.file and str(said.file), said.values, said.overrides) == (file, values, overrides)
    assert len(said.notes) == len(values)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["best.pt"], "weights=best.pt starts from it, resume=best.pt goes on"),
        (["runs/train"], "resume=runs/train goes on"),
        (["data.yaml", "data=other.yaml"], "data is set already"),
        (["config.yaml", "none.yaml"], "a second config file, after config.yaml"),
        (["epochs"], "written key=value: epochs=50. Did you mean 'epochs'?"),
        (["both.yaml"], "'path' is not a setting. It belongs to a data set"),
        (["none.yaml"], "none.yaml: cannot read this config file: No such file"),
        (["resume"], "no run in"),
        (["resume=true", "project=elsewhere"], "elsewhere; name the run's folder"),
    ],
    ids=line_id,
)
@pytest.mark.parametrize("command", ["train", "tune"])
def test_words_that_mean_nothing_are_told_what_would(files, command, line, told, capsys):
    if command == "tune" and "resume" in line[0]:
        pytest.skip("tune goes on with no run")
    assert run(command, *line) == 2
    message = capsys.readouterr().err
    assert message.startswith("ConfigError: ")
    assert told in message
    assert len(message.splitlines()) == 1 or "both" in line[0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["detect", "train", "data=x"], "leave the word out"),
        (["trian"], "Did you mean 'train'?"),
        (["fit"], "detector train"),
        (["train", "--epochs", "5"], "without dashes, epochs=VALUE"),
        (["train", "--img-size=320"], "without dashes, img_size=320"),
    ],
    ids=line_id,
)
def test_a_command_or_flag_that_is_none_is_told_what_is(line, told, capsys):
    with pytest.raises(SystemExit) as left:
        run(*line)
    assert left.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "values", "overrides"),
    [
        (["best.pt", "img.jpg", "more"], {"weights": "best.pt", "source": ["img.jpg", "more"]}, ()),
        (["weights=best.pt", "img.jpg"], {"source": ["img.jpg"]}, ("weights=best.pt",)),
        (["model=best.pt", "source=img.jpg"], {}, ("model=best.pt", "source=img.jpg")),
        (["best.pt", "conf=0.3", "a=b.jpg"], {"weights": "best.pt", "source": ["a=b.jpg"]}, ("conf=0.3",)),
        (["best.pt", "source=*.jpg"], {"weights": "best.pt"}, ("source=*.jpg",)),
    ],
    ids=line_id,
)
def test_words_of_predict_name_a_checkpoint_and_sources(files, line, values, overrides):
    said = words.of_checkpoint(line, sources=True)
    assert (said.values, said.overrides) == (values, overrides)
    settings = load_settings(PredictSettings, None, said.overrides, said.values)
    assert settings.weights == files / "best.pt"
    assert settings.source


def test_words_of_val_name_a_checkpoint_and_a_data_set(files):
    assert words.of_checkpoint(["best.pt", "data.yaml"]).values == {"weights": "best.pt", "data": "data.yaml"}
    assert words.of_checkpoint(["model=best.pt", "data=data.yaml"]).values == {}
    with pytest.raises(ConfigError, match="'batch': a setting is written key=value"):
        words.of_checkpoint(["best.pt", "batch"])


@pytest.mark.parametrize("command", ["val", "predict", "info", "convert"])
def test_commands_without_a_checkpoint_ask_for_one(command, capsys):
    assert run(command) == 2
    assert "name a checkpoint" in capsys.readouterr().err
    assert run(command, "weights=none.pt", "model=none.pt") == 2
    assert "the same setting" in capsys.readouterr().err
    more = {"predict": ["x.jpg"], "convert": ["mine.pt"]}.get(command, [])
    assert run(command, "none.pt", *more) == 2
    assert "no such checkpoint file" in capsys.readouterr().err
    assert run(command, "none.pt", "epochs=3") == 2
    assert f"not a setting of detector {command}" in capsys.readouterr().err


def test_the_command_line_works_in_a_thread(files):
    status = []
    thread = threading.Thread(target=lambda: status.append(run("info", "none.pt")))
    thread.start()
    thread.join()
    assert status == [2]


# --- arguments of load and predict -----------------------------------------------------------------------------------


LIMITS = {"conf": 0.25, "iou": 0.7, "imgsz": None, "batch": 16, "max_det": 300}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("conf", value) for value in (1.5, -0.1, float("nan"), True, None, "high", 0, 1, 0.5)),
        *(("iou", value) for value in (-1, 2, float("inf"), 0, 1)),
        *(("batch", value) for value in (0, -1, 2.5, True, None, 1)),
        *(("max_det", value) for value in (0, -3, 0.5, 1)),
        *(("imgsz", value) for value in (0, 31, 33, 641, -32, "big", True, 32, 320, None)),
    ],
)
def test_predict_takes_what_the_settings_take(name, value):
    def refused(attempt):
        try:
            attempt()
        except ConfigError as error:
            return name in str(error)
        return False

    ours = refused(lambda: check_limits(**{**LIMITS, name: value}))
    assert ours == refused(lambda: load_settings(PredictSettings, None, values={name: value}))


def test_predict_takes_numbers_of_numpy():
    check_limits(np.float32(0.5), np.float64(0.5), np.int64(320), np.int32(4), np.uint8(5))
    assert load_settings(PredictSettings, None, ["imgsz=32"]).imgsz == STRIDE


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        ((8, 8, 5), np.uint8, ""),
        ((0, 8, 3), np.uint8, "no pixels"),
        ((0,), np.uint8, "no pixels"),
        ((8, 8, 3), np.float32, "astype(np.uint8)"),
        ((8, 8), bool, "image.astype(np.uint8) * 255"),
        ((8, 8, 4), np.int64, "image.astype(np.uint8)"),
        ((3, 8, 8), np.uint8, "transpose(1, 2, 0)"),
        ((2, 8, 8, 3), np.uint8, "list(images)"),
    ],
)
def test_an_array_that_is_no_image_is_told_how_it_becomes_one(shape, dtype, told):
    with pytest.raises(DataError, match=r"images are \(H, W, 3\) uint8 RGB") as caught:
        check_image(np.zeros(shape, dtype), Reading())
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "source", [1.5, None, True, b"a.jpg", {"a": 1}, torch.zeros(2, 8, 8, 3), np.float32(1)], ids=type
)
def test_what_is_no_source_is_refused(source):
    with pytest.raises(DataError):
        list(read_sources(find_sources(source), Reading()))


def test_a_precision_is_taken_as_in_a_config():
    cpu = torch.device("cpu")
    names = [choose_precision(amp, cpu).name for amp in (False, "FP32", torch.bfloat16, "half")]
    assert names == ["fp32", "fp32", "bf16", "fp16"]
    with pytest.raises(ConfigError, match="amp='fp8': should be auto, fp32, bf16, fp16"):
        choose_precision("fp8", cpu)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_only_what_a_run_writes_is_removed(tmp_path):
    folder = create_folder(tmp_path, "mine", "train", exist_ok=False)
    for name in ("weights/last.pt", "weights/epoch12.pt", "metrics.csv", "train_epoch1_batch0.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"old")
    mine = {folder / name for name in ("weights/mine.pt", "weights/epoch_best.pt", "notes.txt", "train_epochs.jpg")}
    for file in mine:
        file.write_bytes(b"mine")
    assert remove_run(folder) == 4
    assert {file for file in folder.rglob("*") if file.is_file()} == mine
    assert remove_run(folder) == 0


def test_the_last_run_is_the_one_that_was_saved_last(tmp_path):
    for number, name in enumerate(("b", "c", "a")):
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "weights" / "last.pt").write_bytes(b"")
        os.utime(tmp_path / name / "weights" / "last.pt", (number, number))
    (tmp_path / "val").mkdir()
    assert last_run(tmp_path) == tmp_path / "a"


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=4, val=2)


SMALL = {"model": MINUTE, "imgsz": 64, "batch": 2, "nbs": 4, "workers": 0, "device": "cpu", "patience": 0}


def small(**changes):
    return [f"{key}={value}" for key, value in {**SMALL, **changes}.items()]


@pytest.mark.slow
def test_a_run_in_another_ones_place_leaves_nothing_of_it(tmp_path, data):
    def train(name, **changes):
        assert run("train", data, *small(project=tmp_path, name=name, **changes)) == 0
        return {str(file.relative_to(tmp_path / name)) for file in (tmp_path / name).rglob("*") if file.is_file()}

    old = train("mine", epochs=4, save_period=1)
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    short = {"epochs": 1, "plots": False}
    fresh = train("fresh", **short)
    assert train("mine", exist_ok=True, **short) == fresh | {"notes.txt"}
    assert len(old) > len(fresh) + 5
    with (tmp_path / "mine" / "metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 1


@pytest.mark.slow
def test_a_run_may_start_from_the_weights_that_it_replaces(tmp_path, data, capsys):
    place = {"project": tmp_path, "name": "mine", "epochs": 1, "plots": False}
    assert run("train", data, *small(**place)) == 0
    assert run("train", data, *small(**place, exist_ok=True, weights=tmp_path / "mine")) == 0
    assert "weights of best.pt" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dict_of_numpy_values_trains_and_resume_true_goes_on(tmp_path, data, capsys):
    config = {
        **SMALL,
        "epochs": np.int64(1),
        "project": tmp_path,
        "plots": np.bool_(False),
        "device": torch.device("cpu"),
    }
    result = detector.train(config, data=data, lr0=np.float64(0.01))
    assert result.folder == tmp_path / "train"
    assert "mosaic    in all epochs" in capsys.readouterr().out
    again = detector.train(resume=True, project=tmp_path, epochs=2)
    assert again.folder == result.folder
    assert "changed   epochs  1 -> 2" in capsys.readouterr().out
    assert (
        detector.train(str(data), **{**SMALL, "epochs": 1, "plots": False, "project": tmp_path}).folder.name == "train2"
    )
    model = detector.load(result.folder, device=torch.device("cpu"), amp=False)
    image = np.zeros((64, 64, 3), np.uint8)
    assert len(model.predict([image, image], batch=np.int64(1), conf=np.float32(0.5))) == 2
    for wrong in ({"batch": 0}, {"conf": 1.5}, {"iou": -1}, {"max_det": 0}, {"imgsz": 0}, {"imgsz": 65}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            model.predict(image, **wrong)
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            model.stream(image, **wrong)  # at once, and not with the first image


@pytest.mark.slow
def test_pictures_of_a_second_call_take_the_place_of_the_first_ones(tmp_path, data, capsys):
    weights = detector.train(data, **{**SMALL, "epochs": 1, "plots": False, "project": tmp_path}).best
    photos = data.parent / "images" / "val"
    place = ["device=cpu", "conf=0.001", f"project={tmp_path}", "name=out", "exist_ok=true"]
    assert run("predict", weights, photos, *place, "save_txt=true") == 0
    assert run("predict", f"model={weights}", f"source={photos}", *place) == 0
    names = sorted(file.name for file in photos.iterdir())
    out = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert out == [name.replace(".png", ".jpg") for name in names]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / names[0]).write_bytes((photos / names[0]).read_bytes())
    assert run("predict", weights, photos / names[0], tmp_path / "b" / names[0], *place) == 0
    assert (tmp_path / "out" / names[0].replace(".png", "_2.jpg")).exists()

    before = {file: file.read_bytes() for file in photos.iterdir()}
    among = ["device=cpu", f"project={photos.parent}", f"name={photos.name}", "exist_ok=true"]
    assert run("predict", weights, photos, *among) == 2
    assert "among the images themselves" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in photos.iterdir()} == before
