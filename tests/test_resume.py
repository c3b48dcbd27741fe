"""Going on with other settings: applied or refused by name, never ignored."""

import csv
import os
import shutil

import pytest
from scenes import MINUTE, write_dataset
from test_training import run, same, train, weights

from detector import checkpoint_file
from detector.config.settings import Settings, load_settings
from detector.errors import ConfigError
from detector.run.resume import FIXED, take_up
from detector.step.schedule import Leg, Schedule, extended

OTHER = {
    "model": "v11s", "weights": "other.pt", "freeze": 1, "bn": "frozen", "freeze_bn": True, "data": "other.yaml",
    "names": "[a, b]", "cache": True, "device": "cpu:2", "amp": "fp16", "optimizer": "SGD", "nbs_scope": "device",
    "scale_lr": "sqrt", "project": "elsewhere", "name": "other", "metric": "recall",
    "checkpoint": "all", "val_batch": 4, "on_save_error": "warn", "extend_lr": "constant-final", "workers": 1,
    "imgsz": 96, "perspective": 0.0005, "multiprocessing_start": "spawn",
    "classes": "[disc]", "sampling": "balanced", "albumentations": "[Blur]",
    "bad_images": "error", "bad_boxes": "drop_box", "close_mosaic": 3, "nms": True, "compile": "default",
    "recipe": "public", "ema_tau": 500.0, "pipeline": 2, "log": "[tensorboard]",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=12)


@pytest.fixture(scope="module")
def common(data):
    options = ["imgsz=64", "batch=2", "nbs=4", "device=cpu", "workers=0", "plots=false", "patience=0"]
    return [f"data={data}", f"model={MINUTE}", *options]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, common):
    return train(tmp_path_factory.mktemp("finished"), common, "run", "epochs=2")


@pytest.fixture
def mine(tmp_path, finished):
    """A copy of a finished run of two epochs, to go on with."""
    return shutil.copytree(finished, tmp_path / "mine")


def rates(folder):
    with (folder / "metrics.csv").open() as file:
        return [float(row["lr"]) for row in csv.DictReader(file)]


def other_value(key, now):
    if key in OTHER:
        return OTHER[key]
    if isinstance(now, bool):
        return not now
    return now + 1 if isinstance(now, int) else now / 2 if now else 0.25


@pytest.mark.parametrize("key", sorted(Settings.model_fields.keys() - {"resume"}))
def test_every_setting_is_applied_or_refused_by_name(finished, key):
    now = getattr(load_settings(Settings, finished / "settings.yaml"), key)
    other = str(other_value(key, now))
    other = other.lower() if other in ("True", "False") else other
    settings = load_settings(Settings, None, [f"resume={finished}", f"{key}={other}"])
    if key in FIXED:
        with pytest.raises(ConfigError, match=f"{key}=.*cannot change in the middle of a run"):
            take_up(settings)
        return
    chosen, resume = take_up(settings)
    assert getattr(chosen, key) == getattr(settings, key) != now
    assert list(resume.changes) == [key]


@pytest.mark.parametrize(
    ("rule", "legs"),
    [
        ("rescale", (Leg(0, 5, "linear"),)),
        ("constant-final", (Leg(0, 2, "linear"), Leg(2, 5, "constant"))),
        ("restart-cosine", (Leg(0, 2, "linear"), Leg(2, 5, "cosine"))),
    ],
)
def test_a_finished_run_is_extended_by_the_rule_also_through_an_interruption(mine, rule, legs, capsys):
    saved = checkpoint_file.read(mine / "weights" / "last.pt")
    assert extended((Leg(*saved["legs"][0]),), 5, rule) == legs
    assert run("train", f"resume={mine}", "epochs=5", f"extend_lr={rule}", "save_period=1") == 0
    assert "changed   epochs       2 -> 5" in capsys.readouterr().out
    settings = saved["settings"]
    schedule = Schedule(legs, 1.0, settings["lr0"], settings["lrf"], 0.9, 0.8, 0.0)
    assert rates(mine)[2:] == pytest.approx([schedule.lr(epoch) for epoch in (3, 4, 5)], rel=1e-5)

    halves = shutil.copytree(mine, mine.parent / "halves")
    os.replace(halves / "weights" / "epoch4.pt", halves / "weights" / "last.pt")
    assert run("train", f"resume={halves}") == 0
    assert same(halves, mine)
    assert rates(halves) == rates(mine)


def test_changed_rates_decay_and_augmentation_reach_the_steps(tmp_path, common):
    """A run that changes them after its first epoch is one that had the first epoch of another."""
    whole = train(tmp_path, common, "whole", "epochs=3", "save_period=1")
    os.replace(whole / "weights" / "epoch1.pt", whole / "weights" / "last.pt")
    unchanged = shutil.copytree(whole, tmp_path / "unchanged")
    assert run("train", f"resume={unchanged}") == 0
    for change in ("lr0=0.004", "fliplr=0", "weight_decay=0.5", "box=1", "imgsz=32"):
        folder = shutil.copytree(whole, tmp_path / change)
        assert run("train", f"resume={folder}", change) == 0
        assert not same(folder, unchanged), change
    assert rates(tmp_path / "lr0=0.004")[1:] == pytest.approx([0.004 * (1 - 0.99 * e / 3) for e in (2, 3)], rel=1e-5)
    groups = checkpoint_file.read(tmp_path / "weight_decay=0.5" / "weights" / "last.pt")["optimizer"]["param_groups"]
    decays = {group["name"].removeprefix("fast "): group["weight_decay"] for group in groups}
    assert decays == {"muon": 0.5, "norms": 0, "biases": 0}


def test_a_moved_run_with_moved_data_goes_on_and_ends_like_one_that_stayed(tmp_path, data, common):
    stayed = train(tmp_path, common, "stayed", "epochs=2", "save_period=1")
    moved = shutil.copytree(stayed, tmp_path / "elsewhere" / "moved")
    os.replace(moved / "weights" / "epoch1.pt", moved / "weights" / "last.pt")
    shutil.copytree(data.parent, tmp_path / "data")
    assert run("train", f"resume={moved}", f"data={tmp_path / 'data' / data.name}") == 0
    assert same(moved, stayed)


def test_other_images_are_refused_even_if_they_are_as_many(mine, tmp_path, data, capsys):
    shutil.copytree(data.parent, tmp_path / "data")
    os.rename(tmp_path / "data/images/train/003.png", tmp_path / "data/images/train/103.png")
    os.rename(tmp_path / "data/labels/train/003.txt", tmp_path / "data/labels/train/103.txt")
    assert run("train", f"resume={mine}", "epochs=3", f"data={tmp_path / 'data' / data.name}") == 2
    assert "a run goes on with its own images" in capsys.readouterr().err


def test_a_finished_run_says_so_and_changes_without_effect_are_refused(mine, capsys):
    assert run("train", f"resume={mine}") == 0
    assert "finished  2 epochs; to train on" in capsys.readouterr().out
    assert run("train", f"resume={mine}", "lr0=0.1") == 2
    assert "this run is finished, with no step left that lr0 could change" in capsys.readouterr().err
    assert run("train", f"resume={mine}", "epochs=1") == 2
    assert "has trained 2 already" in capsys.readouterr().err


def test_a_run_that_ended_before_its_first_checkpoint_says_how_to_start_again(mine, capsys):
    shutil.rmtree(mine / "weights")
    assert run("train", f"resume={mine}") == 2
    assert f"Start it again with: detector train {mine / 'settings.yaml'}" in capsys.readouterr().err


def test_leftovers_of_a_killed_write_are_removed(mine):
    left = [mine / "weights" / ".last.pt.abc.unfinished", mine / ".metrics.csv.unfinished"]
    for file in left:
        file.write_bytes(b"half")
    assert run("train", f"resume={mine}") == 0
    assert not any(file.exists() for file in left)


def test_amp_changes_on_resume_and_auto_keeps_what_it_was(mine, capsys):
    assert run("train", f"resume={mine}", "amp=fp32", "epochs=3") == 0
    assert run("train", f"resume={mine}", "epochs=4", "amp=auto") == 0
    assert checkpoint_file.read(mine / "weights" / "last.pt")["precision"] == ["fp32", "cpu"]
    assert "cpu, fp32, imgsz 64" in capsys.readouterr().out


def test_steps_that_only_amp_breaks_go_on_in_fp32_if_amp_is_auto(tmp_path, common, capsys, monkeypatch):
    """A loss whose gradient is beyond fp16, but not beyond fp32."""
    monkeypatch.setattr("detector.precision.native_precision", lambda device: "fp16")
    options = [*common, "box=1e12", "epochs=2", "max_bad_steps=2", f"project={tmp_path}"]
    assert run("train", *options, "name=auto", "save_period=1") == 0
    assert "2 steps in a row were not finite in fp16, and the same images are in fp32" in capsys.readouterr().out
    saved = checkpoint_file.read(tmp_path / "auto" / "weights" / "last.pt")
    assert (saved["precision"], saved["skipped"], saved["skipped_in_a_row"]) == (["fp32", "cpu"], 2, 0)
    again = shutil.copytree(tmp_path / "auto", tmp_path / "again")
    os.replace(again / "weights" / "epoch1.pt", again / "weights" / "last.pt")
    assert run("train", f"resume={again}") == 0  # and stays there
    assert same(again, tmp_path / "auto")

    assert run("train", *options, "name=asked", "amp=fp16") == 2
    shown = capsys.readouterr().err
    assert "Go on with amp=fp32 from the last good checkpoint" in shown


def test_a_run_that_breaks_leaves_a_checkpoint_from_before_it_broke(tmp_path, common, capsys):
    """The first step makes the weights enormous; the epoch ends and is validated before that stops the run."""
    options = ["optimizer=SGD", "lr0=1e30", "warmup_epochs=0", "max_bad_steps=3", "epochs=2"]
    assert run("train", *common, *options, f"project={tmp_path}", "name=run") == 2
    assert "3 steps in a row were not finite" in capsys.readouterr().err
    assert max(float(value.abs().max()) for value in weights(tmp_path / "run").values()) < 100
    assert run("train", f"resume={tmp_path / 'run'}", "lr0=0.01") == 0
    assert checkpoint_file.read(tmp_path / "run" / "weights" / "last.pt")["skipped"] == 0
