"""A process of several is killed: torchrun starts them again, and the run ends like one that nobody killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ranks
import torch
from scenes import MINUTE, write_dataset
from test_training import run, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"), train=16)
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "nbs=4", "workers=0", "plots=false", "epochs=16", "amp=fp32",
            "bn=frozen", "accumulate_warmup=false", "optimizer=SGD", "patience=0"]  # fmt: skip


@pytest.fixture(scope="module")
def single(tmp_path_factory, common):
    folder = tmp_path_factory.mktemp("single")
    assert run("train", *common, "batch=4", "device=cpu", f"project={folder}", "name=run") == 0
    return weights(folder / "run")


def start(folder, common, *options):
    """Two processes under torchrun, in a run without a name of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
    command = [*launcher, "-m", "detector", "train", *common, "batch=2", "device=cpu", f"project={folder}"]
    with open(folder / "out.txt", "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def workers(launcher, restarts):
    """The process ids of the launcher's two workers, by rank, after that many restarts."""
    found = {}
    for _ in range(1200):
        for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
            with suppress(OSError):
                about = Path(f"/proc/{child}/environ").read_text()
                if f"\0TORCHELASTIC_RESTART_COUNT={restarts}\0" in about:
                    found[int(about.partition("\0RANK=")[2].partition("\0")[0])] = int(child)
        if len(found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError(f"the launcher did not start its workers for the {restarts}. time")


def rows(folder):
    with suppress(FileNotFoundError):
        return len((folder / "metrics.csv").read_text().splitlines()) - 1
    return 0


def wait_for_epoch(folder, epoch, process):
    deadline = time.monotonic() + 120
    while rows(folder) < epoch and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, (folder.parent / "out.txt").read_text()


def assert_like(folder, expected):
    for name, value in weights(folder).items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("meeting", "rank"), [("--standalone", 0), ("--master-port", 1)])
def test_a_killed_process_is_started_again_and_the_run_ends_like_one_that_was_not(
    tmp_path, common, single, meeting, rank
):
    """`--standalone` gives the launch a name of its own; without it every launch is called "none"."""
    (tmp_path / "train").mkdir()  # of another run: this one is train2
    options = [meeting] if meeting == "--standalone" else [f"{meeting}={free_port()}"]
    launcher, folder = start(tmp_path, common, "--max-restarts=3", *options), tmp_path / "train2"
    pid = workers(launcher, restarts=0)[rank]
    wait_for_epoch(folder, 2, launcher)
    os.kill(pid, signal.SIGKILL)
    launcher.wait(timeout=100)
    out = (tmp_path / "out.txt").read_text()
    assert launcher.returncode == 0, out
    assert out.count(f"restarted by torchrun: going on with {folder}") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "train", "train2"]
    assert rows(folder) == 16
    assert_like(folder, single)


@pytest.mark.long
def test_one_process_goes_on_with_a_run_of_two(tmp_path, common, single):
    words = [*common, "batch=2", "device=cpu", f"project={tmp_path}", "name=run", "save_period=3"]
    done = ranks.run(2, "detector", "train", *words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    os.replace(folder / "weights" / "epoch3.pt", folder / "weights" / "last.pt")  # as if it had been killed then
    assert run("train", f"resume={folder}", "batch=1") == 0
    assert rows(folder) == 16
    assert_like(folder, single)
