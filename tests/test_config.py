"""Settings: what loads, what is refused and how the refusal reads."""

from pathlib import Path

import pytest

from detector.config import PredictSettings, Settings, load_settings
from detector.errors import ConfigError
from detector.run.build import chosen_optimizer


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
    known = """epochs 100, batch 16, imgsz 640, nbs 64, lr0 0.01, lrf 0.01, momentum 0.937, weight_decay 0.0005,
        warmup_epochs 3, warmup_momentum 0.8, warmup_bias_lr 0.1, box 7.5, cls 0.5, dfl 1.5, hsv_h 0.015, hsv_s 0.7,
        hsv_v 0.4, translate 0.1, scale 0.5, fliplr 0.5, mosaic 1, close_mosaic 10, patience 100, seed 0"""
    for key, value in (pair.split() for pair in known.split(",")):
        assert getattr(settings, key) == float(value), key


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
    assert refusal(None, "sourse=1", cls=PredictSettings) == "command line: 'sourse' is not a setting."


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
        ("optimizer=Lion", "'auto', 'SGD' or 'AdamW'"),
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


def test_warmup_leaves_at_least_the_last_epoch():
    assert load_settings(Settings, None, ["data=d", "epochs=2"]).warmup() == 1
    assert load_settings(Settings, None, ["data=d", "epochs=1"]).warmup() == 0
    assert load_settings(Settings, None, ["data=d"]).warmup() == 3


def test_auto_optimizer_follows_the_length_of_the_run_and_what_was_written_wins():
    auto = load_settings(Settings, None, ["data=d"])
    assert chosen_optimizer(auto, 240, 3) == ("AdamW", round(0.01 / 7, 6), 0.9)
    assert chosen_optimizer(auto, 10_001, 3) == ("SGD", 0.01, 0.9)
    written = load_settings(Settings, None, ["data=d", "lr0=0.02", "momentum=0.8"])
    assert chosen_optimizer(written, 240, 3) == ("AdamW", 0.02, 0.8)
    sgd = load_settings(Settings, None, ["data=d", "optimizer=SGD"])
    assert chosen_optimizer(sgd, 240, 3) == ("SGD", 0.01, 0.937)


def test_shipped_run_configs_load():
    configs = Path(__file__).parents[1] / "configs"
    files = sorted(configs.glob("*.yaml"))
    assert files
    for file in files:
        assert load_settings(Settings, file).data.exists()
