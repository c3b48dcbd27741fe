"""Settings: what loads, what is refused and how the refusal reads."""

import enum
from fractions import Fraction
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

from detector.config import foreign
from detector.config.groups import PUBLIC
from detector.config.settings import Settings, TuneSettings, load_settings
from detector.config.uses import InfoSettings, PredictSettings, ValSettings
from detector.errors import ConfigError, did_you_mean
from detector.run.build import chosen_optimizer
from detector.step.plan import Cut

PUBLIC_RECIPE = "recipe=public"


def write(folder, text, name="my.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def refusal(file, *overrides, cls=Settings):
    with pytest.raises(ConfigError) as caught:
        load_settings(cls, file, overrides)
    return str(caught.value)


def test_defaults_are_those_that_users_know():
    settings = load_settings(Settings, None, ["data=d.yaml"])
    known = """epochs 100, batch 16, imgsz 640, lr0 0.01, lrf 0.01, momentum 0.937, weight_decay 0.0005,
        warmup_epochs 3, warmup_momentum 0.8, warmup_bias_lr 0.1, box 7.5, cls 0.5, dfl 1.5, hsv_h 0.015, hsv_s 0.7,
        hsv_v 0.4, translate 0.1, scale 0.5, fliplr 0.5, mosaic 1, patience 100, seed 0"""
    for key, value in (pair.split() for pair in known.split(",")):
        assert getattr(settings, key) == float(value), key
    assert settings.closing() == 10


def test_overrides_are_yaml_and_win_over_the_file(tmp_path):
    file = write(tmp_path, "data: d.yaml\nepochs: 5\nlr0: 0.1\n")
    settings = load_settings(
        Settings, file, ["lr0=1e-3", "epochs=7", "names=[a, b]", "cos_lr=true", "freeze=[0, 1]", "device=cpu"]
    )
    assert (settings.lr0, settings.epochs, settings.names, settings.cos_lr) == (0.001, 7, ["a", "b"], True)
    assert (settings.freeze, settings.device) == ([0, 1], "cpu")
    assert load_settings(Settings, file, ["names={0: a, 1: b}"]).names == ["a", "b"]


def test_paths_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = write(tmp_path / "configs", "data: ../datasets/d.yaml\nmodel: mine.yaml\n")
    settings = load_settings(Settings, file, ["weights=best.pt"])
    assert settings.data == tmp_path / "datasets" / "d.yaml"
    assert settings.model == str(tmp_path / "configs" / "mine.yaml")
    assert settings.weights == tmp_path / "elsewhere" / "best.pt"
    assert load_settings(Settings, file, ["model=v11s"]).model == "v11s"


def test_saved_settings_load_to_the_same_settings(tmp_path):
    file = write(tmp_path, "data: d.yaml\nfreeze: [1, 2]\nnames: [é, b]\nlr0: 1e-5\n")
    settings = load_settings(Settings, file, ["project=out", "device=0"])
    again = load_settings(Settings, write(tmp_path, settings.to_yaml(), "saved.yaml"))
    assert again == settings


def test_settings_are_frozen():
    settings = load_settings(Settings, None, ["data=d.yaml"])
    with pytest.raises(ValueError, match="frozen"):
        settings.epochs = 3


def test_an_unknown_key_names_its_line_and_the_nearest_setting(tmp_path):
    file = write(tmp_path, "data: d.yaml\nepoch: 3\n")
    assert refusal(file) == f"{file}:2: 'epoch' is not a setting. Did you mean 'epochs'?"
    assert refusal(None, "data=d.yaml", "mosiac=1") == "command line: 'mosiac' is not a setting. Did you mean 'mosaic'?"
    assert "not a setting of detector predict. Did you mean 'source'?" in refusal(None, "sourse=1", cls=PredictSettings)
    assert refusal(None, "data=d.yaml", "banana=1") == "command line: 'banana' is not a setting."


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("epochs=many", "integer"),
        ("epochs=2.5", "integer"),
        ("epochs=0", "greater than or equal to 1"),
        ("epochs=true", "integer"),
        ("lr0=-1", "greater than 0"),
        ("lr0=fast", "number"),
        ("lr0=.nan", "finite"),
        ("mosaic=1.5", "less than or equal to 1"),
        ("imgsz=330", "must be a multiple of 32; the nearest is 320"),
        ("amp=fp8", "'auto', 'fp32', 'bf16' or 'fp16'"),
        ("optimizer=Lion", "'auto', 'SGD', 'MuSGD' or 'AdamW'"),
        ("workers=-1", "greater than or equal to 0"),
        ("freeze=-2", "counted from 0"),
        ("names={1: a, 2: b}", "they are 0 to 1"),
        ("cos_lr=1", "boolean"),
        ("momentum=1", "less than 1"),
    ],
)
def test_a_bad_value_is_refused_with_place_value_and_rule(override, reason):
    message = refusal(None, "data=d.yaml", override)
    key = override.partition("=")[0]
    assert message.startswith(f"command line: {key}=")
    assert reason in message
    assert "\n" not in message


def test_all_bad_values_are_named_at_once(tmp_path):
    file = write(tmp_path, "data: d.yaml\nepochs: 0\nbatch: none\n")
    lines = refusal(file).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{file}:3", f"{file}:2"] or len(lines) == 2


def test_files_that_are_no_settings_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "not a YAML file" in refusal(write(tmp_path, "a: [1"))
    assert "'key: value' lines" in refusal(write(tmp_path, "- a\n- b\n"))
    assert "'data' is missing" in refusal(write(tmp_path, ""))
    assert refusal(write(tmp_path, "data: a\nepochs: 1\nepochs: 2\n")).endswith(
        "'epochs' is set twice, first in line 2; keep one"
    )
    assert "written key=value" in refusal(None, "data=d.yaml", "epochs")


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("amp=True", "amp", "auto"),
        ("amp=false", "amp", "fp32"),
        ("amp=BF16", "amp", "bf16"),
        ("amp=float16", "amp", "fp16"),
        ("cache=ram", "cache", "ram"),
        ("cache=true", "cache", "ram"),
        ("cache=Disk", "cache", "disk"),
        ("cache=Auto", "cache", "auto"),
        ("cache=false", "cache", "off"),
        ("optimizer=sgd", "optimizer", "SGD"),
        ("optimizer=ADAMW", "optimizer", "AdamW"),
        ("optimizer=musgd", "optimizer", "MuSGD"),
        ("optimizer=Muon", "optimizer", "MuSGD"),
        ("bn=Batch", "bn", "batch"),
        ("checkpoint=off", "checkpoint", "off"),
        ("metric=map50-95", "metric", "mAP50-95"),
        ("metric=f1", "metric", "F1"),
        ("batch=-1", "batch", "auto"),
        ("batch=AUTO", "batch", "auto"),
        ("epochs=1e2", "epochs", 100),
        ("epochs=50.0", "epochs", 50),
        ("name=5", "name", "5"),
        ("name=007", "name", "007"),
        ("name=1e3", "name", "1e3"),
        ("name=no", "name", "no"),
        ("name=2024-05-06", "name", "2024-05-06"),
        ("name=null", "name", None),
        ("names=[1, no, 1e3, 'a b']", "names", ["1", "no", "1e3", "a b"]),
        ("names={0: 7, 1: off}", "names", ["7", "off"]),
        ("names={1: b, '0': a}", "names", ["a", "b"]),
        ("model=yolo11n.yaml", "model", "v11n"),
        ("model=yolo11S", "model", "v11s"),
        ("model=YOLOv11m", "model", "v11m"),
        ("model=11x", "model", "v11x"),
        ("model=v11n", "model", "v11n"),
        ("device=0,1", "device", "0,1"),
        ("device=[0, 1]", "device", [0, 1]),
        ("device='[cuda:0, cuda:1]'", "device", "[cuda:0, cuda:1]"),
        ("resume=true", "resume", True),
        ("resume=false", "resume", None),
        ("lr0=1e-3", "lr0", 0.001),
        ("close_mosaic=AUTO", "close_mosaic", "auto"),
        ("nbs=AUTO", "nbs", "auto"),
        ("nbs=1e2", "nbs", 100),
        ("ema_tau=Auto", "ema_tau", "auto"),
        ("ema_tau=500.0", "ema_tau", 500.0),
        ("recipe=Public", "recipe", "public"),
    ],
)
def test_a_value_is_taken_in_any_spelling_that_is_plain(word, key, value):
    settings = load_settings(Settings, None, ["data=d.yaml", word])
    assert getattr(settings, key) == value
    assert type(getattr(settings, key)) is type(value)


def test_a_value_in_a_file_is_taken_as_on_the_command_line(tmp_path):
    file = write(tmp_path, "data: 5\nname: 007\nnames: [yes, 2]\namp: true\noptimizer: sgd\nproject: 2024\n")
    settings = load_settings(Settings, file)
    assert (settings.data, settings.name, settings.names) == (tmp_path / "5", "007", ["yes", "2"])
    assert (settings.amp, settings.optimizer, settings.project) == ("auto", "SGD", tmp_path / "2024")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("batch=0.7", "not a share of the memory; batch=auto"),
        ("imgsz=641", "the nearest is 640"),
        ("imgsz=[640, 640]", "square: give one number, 640"),
        ("optimizer=adam", "SGD, MuSGD, AdamW, or auto"),
        ("model=yolo11n.pt", "nothing is downloaded"),
        ("resume=", "there is no value"),
        ("name=", "there is no value"),
        ("amp=maybe", "'auto', 'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_what_is_not_to_be_had_is_told_with_what_is(word, told):
    assert told in refusal(None, "data=d.yaml", word)


def test_a_model_file_that_is_there_is_taken_and_a_checkpoint_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "yolo11n.yaml")
    write(tmp_path, "", "v12.yaml")  # of which v12s.yaml is a scale
    write(tmp_path, "", "best.pt")
    assert load_settings(Settings, None, ["data=d", "model=yolo11n.yaml"]).model == str(tmp_path / "yolo11n.yaml")
    assert load_settings(Settings, None, ["data=d", "model=v12s.yaml"]).model == str(tmp_path / "v12s.yaml")
    assert f"weights={tmp_path / 'best.pt'} starts from it" in refusal(None, "data=d", "model=best.pt")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("img=640", "The setting here is 'imgsz'."),
        ("img_size=640", "The setting here is 'imgsz'."),
        ("batch_size=4", "The setting here is 'batch'."),
        ("lr=0.1", "The setting here is 'lr0'."),
        ("cos-lr=true", "Did you mean 'cos_lr'?"),
        ("Epochs=3", "Did you mean 'epochs'?"),
        ("pretrained=false", "The setting here is 'weights'."),
        ("rect=true", "are square"),
        ("save_dir=x", "set project and name"),
        ("task=detect", "leave it out"),
        ("train=images", "YAML of their own"),
        ("optim=SGD", "Did you mean 'optimizer'?"),
        ("data_path=x", "Did you mean 'data'?"),
    ],
)
def test_names_of_other_trainers_are_told_what_they_are_here(word, told):
    message = refusal(None, "data=d.yaml", word)
    assert message.startswith(f"command line: '{word.partition('=')[0]}' is not a setting. ")
    assert told in message
    assert "\n" not in message


def test_tables_of_other_names_hold_no_setting_and_lead_to_one():
    settings = (Settings, TuneSettings, ValSettings, PredictSettings, InfoSettings)
    ours = {key for cls in settings for key in (*cls.model_fields, *cls.also)}
    assert set(foreign.CALLED.values()) <= ours
    assert not foreign.CALLED.keys() & foreign.ABSENT.keys()
    assert not (foreign.CALLED.keys() | foreign.ABSENT.keys()) & ours
    assert all(key == key.lower() and "-" not in key for key in (*foreign.CALLED, *foreign.ABSENT))


def test_a_slip_is_near_and_a_likeness_is_not():
    known = list(Settings.model_fields)
    slips = {"epoch": "epochs", "bacth": "batch", "imgzs": "imgsz", "weigth_decay": "weight_decay", "mosiac": "mosaic"}
    for word, meant in slips.items():
        assert did_you_mean(word, known) == f" Did you mean {meant!r}?"
    for word in ("train", "rect", "half", "time", "dropout", "erasing", "profile", "task", "w", ""):
        assert did_you_mean(word, known) == "", word


def test_mosaic_closes_in_at_most_a_quarter_of_the_epochs_unless_it_was_written():
    closing = [load_settings(Settings, None, ["data=d", f"epochs={epochs}"]).closing() for epochs in (100, 20, 4, 3, 1)]
    assert closing == [10, 5, 1, 0, 0]
    assert load_settings(Settings, None, ["data=d", "epochs=5", "close_mosaic=10"]).closing() == 10
    assert load_settings(Settings, None, ["data=d", "epochs=5", "close_mosaic=0"]).closing() == 0


def test_closing_follows_the_new_length_of_a_run_that_is_extended(tmp_path):
    short = load_settings(Settings, None, ["data=d", "epochs=8"])
    again = load_settings(Settings, write(tmp_path, short.to_yaml()), ["epochs=100"])
    assert (short.closing(), again.closing()) == (2, 10)
    written = load_settings(Settings, None, ["data=d", "epochs=8", "close_mosaic=3"])
    assert load_settings(Settings, write(tmp_path, written.to_yaml()), ["epochs=100"]).closing() == 3


class Optimizer(enum.Enum):
    SGD = "sgd"


class Size(enum.IntEnum):
    SMALL = 320


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"lr0": np.float64(0.02)}, "lr0=0.02"),
        ({"lr0": np.float32(0.5)}, "lr0=0.5"),
        ({"lr0": Fraction(1, 4)}, "lr0=0.25"),
        ({"batch": np.int64(8)}, "batch=8"),
        ({"batch": torch.tensor(8)}, "batch=8"),
        ({"cos_lr": np.bool_(True)}, "cos_lr=true"),
        ({"device": torch.device("cpu")}, "device=cpu"),
        ({"device": (0, 1)}, "device=[0, 1]"),
        ({"amp": torch.bfloat16}, "amp=bf16"),
        ({"amp": False}, "amp=fp32"),
        ({"checkpoint": False}, "checkpoint=off"),
        ({"optimizer": Optimizer.SGD}, "optimizer=SGD"),
        ({"imgsz": Size.SMALL}, "imgsz=320"),
        ({"name": np.str_("a")}, "name=a"),
        ({"name": Text("a")}, "name=a"),
        ({"name": 5}, "name='5'"),
        ({"names": ("a", "b")}, "names=[a, b]"),
        ({"names": np.array(["a", "b"])}, "names=[a, b]"),
        ({"names": {np.int64(0): "a", 1: "b"}}, "names=[a, b]"),
        ({"names": {0: "a", 1: "b"}.values()}, "names=[a, b]"),
        ({"names": [1, "no"]}, "names=['1', 'no']"),
        ({"freeze": "23.cv2"}, "freeze=['23.cv2']"),
        ({"freeze": range(3)}, "freeze=[0, 1, 2]"),
        ({"freeze": np.arange(3)}, "freeze=[0, 1, 2]"),
        ({"epochs": np.float64(3)}, "epochs=3"),
        ({"project": PurePosixPath("out")}, "project=out"),
        ({"weights": "~/best.pt"}, "weights=~/best.pt"),
    ],
    ids=str,
)
def test_values_from_python_are_those_of_the_command_line(given, written):
    from_python = load_settings(Settings, None, values={"data": Path("d.yaml"), **given})
    assert from_python == load_settings(Settings, None, ["data=d.yaml", written])
    assert from_python.model_fields_set == {"data", *given}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"8", len, torch.nn.Identity(), np.zeros((1000, 1000))], ids=type)
def test_other_objects_are_refused_with_their_type(value):
    with pytest.raises(ConfigError, match=r"argument: batch=.*no value of a setting") as caught:
        load_settings(Settings, None, values={"data": "d.yaml", "batch": value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_values_from_python_win_over_the_file_and_name_themselves(tmp_path):
    file = write(tmp_path, "data: d.yaml\nepochs: 5\n")
    assert load_settings(Settings, file, values={"epochs": 7}).epochs == 7
    with pytest.raises(ConfigError, match=r"^argument: epochs=0: should be greater"):
        load_settings(Settings, file, values={"epochs": 0})
    with pytest.raises(ConfigError, match=r"^argument: 'epoch' is not a setting"):
        load_settings(Settings, file, values={"epoch": 1})


def test_warmup_leaves_at_least_the_last_epoch():
    assert load_settings(Settings, None, ["data=d", "epochs=2"]).warmup() == 1
    assert load_settings(Settings, None, ["data=d", "epochs=1"]).warmup() == 0
    assert load_settings(Settings, None, ["data=d"]).warmup() == 3


def test_auto_optimizer_is_one_by_the_public_recipe_another_and_what_was_written_wins():
    def chosen(images, *words, classes=3):
        return chosen_optimizer(
            load_settings(Settings, None, ["data=d", "nbs=64", *words]), Cut(16, 4), images, classes
        )

    assert chosen(64) == chosen(10**6, classes=80) == ("MuSGD", 0.01, 0.9, 0.0)
    assert chosen(100 * 64, PUBLIC_RECIPE) == ("AdamW", 0.001429, 0.9, 0.0)  # 10,000 iterations of 64 in 100 epochs
    assert chosen(100 * 64 + 1, PUBLIC_RECIPE) == ("MuSGD", 0.01, 0.9, 0.0)
    assert chosen(64, PUBLIC_RECIPE, classes=80) == ("AdamW", 0.000119, 0.9, 0.0)
    written = "lr0=0.02", "momentum=0.8", "warmup_bias_lr=0.05"
    assert chosen(64, PUBLIC_RECIPE, *written) == ("AdamW", 0.02, 0.8, 0.05)
    assert chosen(64, *written) == ("MuSGD", 0.02, 0.8, 0.05)
    assert chosen(64, "optimizer=SGD") == ("SGD", 0.01, 0.937, 0.1)
    assert chosen(64, "optimizer=MuSGD") == ("MuSGD", 0.01, 0.937, 0.1)
    assert chosen(10**6, "optimizer=AdamW") == ("AdamW", 0.01, 0.937, 0.0)
    assert chosen(10**6, "optimizer=AdamW", "warmup_bias_lr=0.1") == ("AdamW", 0.01, 0.937, 0.1)


@pytest.mark.parametrize(
    ("cut", "words", "nominal"),
    [
        (Cut(16, 4), (), 64),
        (Cut(24, 3), (), 64),  # not the window, which is of 72
        (Cut(96, 1), (), 96),
        (Cut(48, 1, devices=2), (), 96),
        (Cut(16, 2, devices=2), (), 64),
        (Cut(16, 4, devices=2), ("nbs_scope=device",), 128),
        (Cut(16, 2), ("nbs=32",), 32),
    ],
)
def test_iterations_of_the_public_recipe_are_nominal_batches(cut, words, nominal):
    """ceil(images / max(batch, nbs)) * epochs, the batch over all devices."""
    for epochs, images, expected in [
        (100, 100 * nominal, "AdamW"),
        (100, 100 * nominal + 1, "MuSGD"),
        (10_000, nominal, "AdamW"),
        (10_001, 1, "MuSGD"),
    ]:
        settings = load_settings(Settings, None, ["data=d", PUBLIC_RECIPE, f"epochs={epochs}", *words])
        assert chosen_optimizer(settings, cut, images, 3).optimizer == expected


def test_the_public_recipe_fills_in_what_was_left_out_and_no_more():
    own, public, mixed = (
        load_settings(Settings, None, ["data=d", *words])
        for words in ((), ("recipe=public",), ("close_mosaic=0", "recipe=PUBLIC"))
    )
    assert {key for key, value in public if value != getattr(own, key)} == {"recipe", *PUBLIC}
    assert (public.nbs, public.ema_tau, public.close_mosaic) == (64, 2000.0, 10)
    assert (mixed.nbs, mixed.close_mosaic) == (64, 0)


def test_shipped_run_configs_load():
    configs = Path(__file__).parents[1] / "configs"
    files = sorted(configs.glob("*.yaml"))
    assert files
    for file in files:
        assert load_settings(Settings, file).data.exists()
