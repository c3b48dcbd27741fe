"""What a run leaves behind, when it is written, and what becomes of it where it cannot be."""

import copy
import threading
from types import SimpleNamespace

import pytest
import ranks
import torch
from scenes import MINUTE, write_dataset
from test_resume import rates
from test_step import new_state
from test_training import run

from detector import checkpoint_file
from detector.config.settings import Settings
from detector.errors import TrainingError
from detector.reporting.reports import Reports
from detector.run import saving
from detector.run.background import Background
from detector.run.run import Run


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"), train=12)
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "workers=0"]


def bare_run(folder):
    """A run without data and device, in a folder that exists."""
    settings = Settings(data="data.yaml", on_save_error="warn")
    images = type("Images", (), {"index": SimpleNamespace(digest=""), "__len__": lambda self: 3})()
    (folder / "weights").mkdir()
    run = Run.__new__(Run)
    run.settings, run.training, run.names, run.folder, run.say = settings, images, ("a",), folder, print
    run.beside, run.reports = Background(), Reports()
    return run


@pytest.mark.parametrize("name", ["model.1.conv.weight", "model.1.bn.running_var"])
def test_a_tensor_that_is_not_finite_is_never_saved(tmp_path, name):
    run, state = bare_run(tmp_path), new_state()
    run.state = state
    saving.save(run)
    saving.settle(run)
    assert "beside the run" not in [thread.name for thread in threading.enumerate()]  # so that loaders may be forked
    before = run.last.read_bytes()
    state.network.state_dict()[name].view(-1)[0] = float("inf")
    saving.save(run)
    with pytest.raises(TrainingError, match=f"model.{name} holds values that are not finite"):
        saving.settle(run)
    assert run.last.read_bytes() == before
    assert [file.name for file in run.last.parent.iterdir()] == ["last.pt"]


def test_what_is_written_is_the_state_at_the_edge_of_the_window(tmp_path, monkeypatch):
    """However far the run has gone before the disk takes it."""
    run, state = bare_run(tmp_path), new_state()
    run.state, slow, write = state, threading.Event(), checkpoint_file.write
    monkeypatch.setattr(checkpoint_file, "write", lambda *arguments: slow.wait(60) and write(*arguments))
    before = copy.deepcopy(state.state_dict())
    saving.save(run)
    for tensor in [*state.network.state_dict().values(), *state.ema.network.state_dict().values()]:
        tensor.add_(1)
    state.step += 1
    saving.settle(run, wait=False)  # which does not wait
    assert not run.last.exists()
    slow.set()
    saving.settle(run)
    saved = checkpoint_file.read(run.last)
    assert saved["step"] == before["step"]
    for part in ("model", "ema"):
        assert all(torch.equal(saved[part][name], value) for name, value in before[part].items())


def test_curves_are_drawn_at_first_and_at_the_end_of_a_short_run(tmp_path, common, monkeypatch):
    drawn = []
    monkeypatch.setattr(saving, "plot_history", lambda rows, path, terms: drawn.append(len(rows)))
    assert run("train", *common, "epochs=3", f"project={tmp_path}", "name=run") == 0
    assert drawn == [1, 3]


@pytest.mark.parametrize(("rule", "status"), [("stop", 2), ("warn", 0)])
def test_a_full_disk_keeps_good_files(tmp_path, common, rule, status):
    """A tmpfs that an epoch's checkpoint after another fills up."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    if not ranks.can_mount():
        pytest.skip("mounting in a namespace of one's own does not work here")
    options = [f"on_save_error={rule}", "plots=false", "epochs=5", "save_period=1", f"project={disk}", "name=run"]
    done = ranks.call("detector", "train", *common, *options, mounts=[("size=12m", disk)], keep=(disk / "run", copy))
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stdout + done.stderr
    assert checkpoint_file.read(copy / "weights" / "last.pt")["epoch"] >= 1
    assert not list(copy.rglob(".*.unfinished"))
    assert run("train", f"resume={copy}", "save_period=-1") == 0
    assert len(rates(copy)) == 5
