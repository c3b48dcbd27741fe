"""Several processes are one: the same gradient, the same weights, one reduction a window, the same images."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
from scenes import MINUTE, MINUTE26, write_dataset
from test_training import run, weights

from detector import distributed
from detector.distributed import launch

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("rank_worker.py")
WINDOWS = [
    [2, 2, 2, 2, 2, 2, 2, 2],
    [1, 9, 0, 3, 14, 0, 0],  # ragged
    [0, 0, 0, 0, 5, 3, 2, 1],  # the first of two ranks sees background only
    [3],  # fewer images than ranks
    [0, 0],  # background only
    [4, 1, 2],  # a gradient of the last rank overflows: all skip the step
    [2, 2, 1, 1],
]
POISONED = 5
ARGUMENTS = (json.dumps(WINDOWS), str(POISONED), "off", str(MINUTE))


def torchrun(processes, *command):
    options = ["--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *map(str, command)],
        capture_output=True, text=True, timeout=240, cwd=WORKER.parent,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out.pt"
    assert ranks.run(1, WORKER.name, out, *ARGUMENTS).returncode == 0
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_take_the_step_of_one_process_with_one_reduction(tmp_path, alone, processes):
    out = tmp_path / "out.pt"
    done = ranks.run(processes, WORKER.name, out, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    together = torch.load(out, weights_only=True)
    assert together["skipped"] == alone["skipped"] == 1
    for number, (row, other) in enumerate(zip(together["rows"], alone["rows"], strict=True)):
        (gradient, report, reductions, micro_batches), (expected, one, _, _) = row, other
        assert report[3] == one[3] == (number != POISONED)
        assert reductions == 1
        if number == POISONED:
            continue
        assert float((gradient - expected).norm() / expected.norm()) < 1e-10
        assert report[1:3] == pytest.approx(one[1:3], rel=1e-9)
        assert report[0] == pytest.approx(one[0], rel=1e-9)
        assert micro_batches >= 1
    assert max(row[3] for row in together["rows"]) > 1 or processes == 4
    for name, value in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], value, rtol=1e-9, atol=1e-12)


def test_gradients_are_the_sums_of_torchs_own_parallel_module(tmp_path):
    """Which takes means; over a micro-batch without a reduction and one with, with one head and two."""
    done = ranks.run(2, "ddp_worker.py", tmp_path / "out.pt", MINUTE, MINUTE26)
    assert done.returncode == 0, done.stderr
    for found in torch.load(tmp_path / "out.pt", weights_only=True):
        assert found["buckets"] > 3
        assert found["ours"].norm() > 0
        torch.testing.assert_close(found["ours"], found["theirs"], rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"))
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "nbs=8", "workers=0", "plots=false", "epochs=2", "amp=fp32",
            "bn=frozen", "accumulate_warmup=false", "optimizer=SGD"]  # fmt: skip


@pytest.fixture(scope="module")
def single(tmp_path_factory, common):
    folder = tmp_path_factory.mktemp("single")
    assert run("train", *common, "batch=8", "device=cpu", f"project={folder}", "name=run") == 0
    return folder / "run"


@pytest.mark.parametrize(("processes", "batch"), [(2, 4), (2, 1), pytest.param(4, 2, marks=pytest.mark.long), (3, 1)])
def test_a_run_on_several_devices_ends_with_the_weights_of_one(tmp_path, common, single, processes, batch):
    options = [*common, f"batch={batch}", f"project={tmp_path}", "name=run"]
    if (processes, batch) == (2, 4):  # as a user starts it
        assert run("train", *options, "device=cpu:2") == 0
    else:
        done = ranks.run(processes, "detector", "train", *options, "device=cpu")
        assert done.returncode == 0, done.stderr
    expected = weights(single)
    for name, value in weights(tmp_path / "run").items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    ours, theirs = ((folder / "metrics.csv").read_text().splitlines() for folder in (tmp_path / "run", single))
    assert [row.split(",")[0:2] for row in ours] == [row.split(",")[0:2] for row in theirs]


@pytest.mark.long
def test_torchrun_starts_it_too(tmp_path, common, single):
    done = torchrun(2, "-m", "detector", "train", *common, "batch=4", "device=cpu", f"project={tmp_path}", "name=run")
    assert done.returncode == 0, done.stderr
    expected = weights(single)
    for name, value in weights(tmp_path / "run").items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    assert done.stdout.count("window    8 images a step = 4 a micro-batch x 1 accumulated x 2 devices") == 1


def test_ranks_with_batch_statistics_stay_equal_and_resume(tmp_path, common):
    """Each rank moves its own running statistics; after every step they are averaged, so all ranks validate alike."""

    def train(*words):
        done = ranks.run(2, "detector", "train", *words)
        assert done.returncode == 0, done.stderr

    options = [*common, "bn=batch", "batch=2", "device=cpu", f"project={tmp_path}"]
    train(*options, "name=whole")
    train(*options, "name=halves", "save_period=1")
    halves = tmp_path / "halves" / "weights"
    (halves / "epoch1.pt").replace(halves / "last.pt")
    train(f"resume={tmp_path / 'halves'}")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_mistake_on_all_ranks_is_told_once(tmp_path, common, capfd, monkeypatch):
    logs = tmp_path / "tmp"
    logs.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(logs))
    arguments = ["train", *common, f"data={tmp_path / 'no.yaml'}", "device=cpu:2", f"project={tmp_path}"]
    assert launch(2, arguments) == 2
    error = capfd.readouterr().err
    assert error.count("no.yaml") == 1
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [logs]
    assert list(logs.iterdir()) == []  # nor does the launcher leave anything


def test_nothing_is_still_asking_the_store_when_a_process_ends(monkeypatch):
    """A thread inside torch's store when Python ends would abort the process, and the launch report that (134)."""

    class Slow:
        def check(self, keys):
            asked.set()
            time.sleep(0.3)
            return False

        def set(self, key, value):
            told.append((key, value))

    asked, told = threading.Event(), []
    monkeypatch.setattr(distributed, "launch_store", Slow)
    monkeypatch.setattr(distributed, "POLL", 0.01)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), distributed.watching("failed"):
        asked.wait(5) / 0
    assert threading.active_count() == before
    assert told == [("failed", "yes")]


def test_an_error_with_reductions_under_way_ends_a_process_by_its_own_status(tmp_path):
    """Torch's threads would let go of tensors while Python ends, and abort the process (134, in rare cases)."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from detector.distributed import process_group\n"
        "with process_group(torch.device('cpu')):\n"
        "    for _ in range(1000):\n"
        "        dist.all_reduce(torch.zeros(100_000), async_op=True)\n"
        "    raise SystemExit(3)\n"
    )
    done = torchrun(2, script)
    assert "exitcode  : 3" in done.stderr, done.stderr
    assert "terminate called" not in done.stderr


def test_sync_norms_are_for_gpus(tmp_path, common, capsys):
    assert run("train", *common, "bn=sync", "device=cpu", f"project={tmp_path}") == 2
    assert "bn=sync" in capsys.readouterr().err
