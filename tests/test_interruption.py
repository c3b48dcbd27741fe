"""Signals, damaged files and locked folders: a run is interrupted, and goes on. Kills are in test_faults.py."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
import yaml
from scenes import MINUTE, write_dataset
from test_training import run, same, train, weights

import detector
from detector import checkpoint_file
from detector.errors import CheckpointError
from detector.run.lock import run_id

pytestmark = pytest.mark.slow
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
ONE_LONG = [SIGNALS[0], pytest.param(*SIGNALS[1], marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"), train=24)
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "plots=false", "epochs=4"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, common):
    return train(tmp_path_factory.mktemp("whole"), [*common, "workers=0"], "whole")


def start(folder, common, *overrides):
    return ranks.start("detector", "train", *common, f"project={folder}", "name=run", *overrides)


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def loaders_of(process, folder):
    """The process numbers of a run's loaders, once it has some; until it has a folder its children are others."""
    wait_for(folder / "weights" / "last.pt", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 250
    while not (found := children.read_text().split()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return [int(one) for one in found]


def assert_ends_like(folder, whole):
    assert run("train", f"resume={folder}") == 0
    assert same(folder, whole)
    assert (folder / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    ("number", "status", "method"), [*((*one, "auto") for one in SIGNALS), (*SIGNALS[-1], "forkserver")]
)
def test_a_signal_saves_and_stops_with_its_status(tmp_path, common, whole, number, status, method):
    """By a forkserver, which takes seconds to begin, the signal finds no loader process yet."""
    process = start(tmp_path, common, "workers=2", f"multiprocessing_start={method}")
    folder = tmp_path / "run"
    wait_for(folder / "weights" / "last.pt", process)
    time.sleep(0.3)
    os.killpg(process.pid, number)  # as a terminal, `timeout` and batch systems do: to the loader's processes too
    out, error = process.communicate(timeout=60)
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert f"go on with: detector train resume={folder}" in out
    assert_ends_like(folder, whole)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
@pytest.mark.parametrize(("number", "status"), ONE_LONG)
def test_a_signal_is_answered_while_the_run_waits_for_a_batch_that_never_comes(tmp_path, common, whole, number, status):
    process = start(tmp_path, common, "workers=1")
    (loader,) = loaders_of(process, tmp_path / "run")
    os.kill(loader, signal.SIGSTOP)
    time.sleep(1)  # it has nothing left to do but wait
    process.send_signal(number)
    out, error = process.communicate(timeout=60)  # far less than the limit of silence
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert f"go on with: detector train resume={tmp_path / 'run'}" in out
    assert_ends_like(tmp_path / "run", whole)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_a_loader_process_that_is_killed_ends_the_run_with_the_reason(tmp_path, common, whole):
    process = start(tmp_path, common, "workers=1")
    (loader,) = loaders_of(process, tmp_path / "run")
    os.kill(loader, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"TrainingError: a loader process (pid {loader}) was ended by SIGKILL" in error
    assert_ends_like(tmp_path / "run", whole)


def test_a_run_in_a_thread_says_that_signals_are_not_for_it(tmp_path, common, whole, capsys):
    def begin():
        results.append(detector.train(**settings))

    results = []
    settings = dict(one.split("=", 1) for one in common) | {"project": str(tmp_path), "name": "run", "workers": "2"}
    settings = {key: yaml.safe_load(value) for key, value in settings.items()}
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert same(results[0].folder, whole)
    assert capsys.readouterr().out.count("in a thread a run cannot be stopped") == 1


@pytest.mark.parametrize(("number", "status"), ONE_LONG)
def test_a_signal_saves_and_stops_a_run_of_several_processes(tmp_path, common, number, status):
    process = start(tmp_path, common, "workers=0", "device=cpu:2", "batch=1", "epochs=500")
    folder = tmp_path / "run"
    wait_for(folder / "metrics.csv", process)
    os.killpg(process.pid, number)
    out, error = process.communicate(timeout=90)
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert f"go on with: detector train resume={folder}" in out
    assert checkpoint_file.read(folder / "weights" / "last.pt")["epoch"] >= 1


def test_a_run_stopped_at_every_window_and_at_another_batch_each_time_takes_the_same_steps(tmp_path, common):
    """Windows keep their images when the batch changes; with frozen norms only rounding is left."""
    exact = [*common, "workers=0", "amp=fp32", "bn=frozen", "optimizer=SGD", "epochs=2", "save_period=1"]
    expected = weights(train(tmp_path, exact, "whole"))
    folder = train(tmp_path, exact, "cut")
    os.replace(folder / "weights" / "epoch1.pt", folder / "weights" / "last.pt")
    assert run("train", f"resume={folder}", "batch=3") == 0
    for name, value in weights(folder).items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, common, whole, capsys):
    folder = train(tmp_path, [*common, "workers=0"], "run", "save_period=2")
    last = folder / "weights" / "last.pt"
    assert checkpoint_file.read(checkpoint_file.previous_of(last))["epoch"] == 3
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint_file.read(last)
    assert run("train", f"resume={folder}") == 0
    assert "last.prev.pt" in capsys.readouterr().out
    assert same(folder, whole)


def test_two_runs_never_share_a_folder(tmp_path, common, capsys):
    process = start(tmp_path, common, "workers=0", "epochs=500")
    folder = tmp_path / "run"
    wait_for(folder / "weights" / "last.pt", process)
    try:
        assert run("train", f"resume={folder}") == 2
        said = capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()
    assert f"process {process.pid} of run {run_id(folder)} is training in this folder" in said
    assert run("train", f"resume={folder}", "batch=4", "seed=3") == 2  # a lock without its process holds nothing
    assert "seed=3: cannot change" in capsys.readouterr().err


def test_steps_that_are_never_finite_stop_the_run_with_the_reason(tmp_path, common, capsys):
    options = [*common, "workers=0", "box=1e38", "max_bad_steps=3", f"project={tmp_path}", "name=run"]
    assert run("train", *options) == 2
    shown = capsys.readouterr()
    assert "3 steps in a row were not finite" in shown.err
    assert "images" in shown.out
    saved = torch.load(tmp_path / "run" / "weights" / "last.pt", weights_only=True)
    assert all(value.isfinite().all() for value in saved["model"].values())
