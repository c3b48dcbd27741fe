"""The measuring scripts run, and what they print makes sense."""

import csv
import itertools
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
import yaml
from scenes import MINUTE, TINY, write_dataset

from detector import checkpoint_file
from detector.model.network import build_network

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parents[1] / "scripts"
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


def run(script, *arguments, status=0):
    """What a script prints, in a process of its own with one thread."""
    done = ranks.call(SCRIPTS / script, *arguments)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=13, val=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A checkpoint whose predictions overlap the boxes, as a trained one's do."""
    network = build_network(TINY, nc=2, seed=0)
    with torch.no_grad():
        for branch in network.head.cv3:
            branch[-1].bias.fill_(-1.0)
    path = tmp_path_factory.mktemp("weights") / "best.pt"
    contents = {"description": network.description, "names": ["square", "disc"], "imgsz": 64, "settings": {}}
    checkpoint_file.write(path, {**contents, "model": network.state_dict(), "ema": network.state_dict(), "epoch": 1})
    return path


def test_the_picture_of_the_benchmarks_is_drawn_from_their_file(tmp_path):
    assert run("draw_benchmarks.py", tmp_path / "ratios.png") == ""
    assert (tmp_path / "ratios.png").stat().st_size > 10_000


def test_exactness():
    lines = re.findall(rf"(fp\d\d), normalised by (\w+) .*: ({NUMBER}) of", run("exactness.py"))
    found = {(precision, rule): float(number) for precision, rule, number in lines}
    assert len(found) == 4
    assert found["fp32", "window"] < 1e-5
    assert found["fp64", "window"] < 1e-10
    assert found["fp32", "micro"] > 0.01
    assert found["fp64", "micro"] > 0.01


@pytest.mark.parametrize("mosaic", ["--mosaic", pytest.param("--no-mosaic", marks=pytest.mark.long)])
def test_gradient_difference(data, weights, mosaic):
    options = ("--imgsz", 128, "--window", 7, "--windows", 3, mosaic, "--device", "cpu")
    printed = run("gradient_difference.py", "--weights", weights, "--data", data, *options)
    assert f"mosaic {'off' if 'no' in mosaic else 'on'}" in printed
    assert "3 windows of 6 to 7 images" in printed
    rows = re.findall(rf"^\| (\d+) \| ({NUMBER}) \| ({NUMBER})° \| ({NUMBER}) \| ({NUMBER})° \|$", printed, flags=re.M)
    assert [row[0] for row in rows] == ["1", "2", "4"]
    for row in rows:
        window, window_angle, micro, micro_angle = map(float, row[1:])
        assert window < 1e-5
        assert window_angle < 1e-3
        assert 0.01 < micro < 10
        assert max(0.01, 10 * window_angle) < micro_angle < 180


def test_gradient_difference_names_the_users_mistake(data, tmp_path):
    missing = tmp_path / "none.pt"
    message = run("gradient_difference.py", "--weights", missing, "--data", data, status=1)
    assert message.startswith(f"CheckpointError: {missing}")


@pytest.mark.long
def test_benchmark_accumulation():
    tiny = ("--model", TINY, "--imgsz", 64, "--batch", 4, "--accumulate", 4, "--turns", 2, "--warmup", 1)
    memory = ("--no-memory",) if sys.platform != "linux" else ()
    printed = run("benchmark_accumulation.py", *tiny, *memory, "--device", "cpu", "--amp", "fp32")
    assert all(float(number) > 0 for number in re.findall(rf"({NUMBER}) images/s", printed))
    assert len(re.findall("images/s", printed)) == 2
    ratio = float(re.search(rf"accumulated / not: ({NUMBER})", printed)[1])
    assert ratio > 0
    if not memory:
        small, whole = (float(number) for number in re.findall(rf": ({NUMBER}) MiB", printed))
        assert 0 < small < whole


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_benchmark_memory():
    tiny = ("--models", TINY, "--sizes", 128, "--batch", 16, "--turns", 1, "--amp", "fp32", "--crowd", 4, "--boxes", 50)
    printed = run("benchmark_memory.py", *tiny)
    rows = {row[1]: row for row in re.findall(r"^\| (\S+) \| 128 \| (.*?) \| (.*?) \| (.*?) \|", printed, flags=re.M)}
    rows = {way: (float(kept), float(host)) for way, (_, _, kept, host) in rows.items()}
    assert rows["plain"][0] > rows["stages"][0] > rows["all"][0] > 0
    assert rows["plain"][1] == rows["stages"][1] == rows["all"][1] == 0
    assert sum(rows["offload"]) == pytest.approx(rows["plain"][0], rel=0.01)  # moved, not gone
    assert rows["offload"][1] > rows["plain"][0] / 2
    ours, theirs = re.findall(rf"(?:sparse|dense): .* target weight ({NUMBER})", printed)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)


@pytest.mark.long
def test_benchmark_scale():
    """GradientSum hands as many bytes to a reduction as torch's module; the loss is of every class and anchor."""
    small = ("--model", MINUTE, "--imgsz", 64, "--batch", 2, "--turns", 1)
    printed = run("benchmark_scale.py", *small)
    assert [row[0] for row in re.findall(rf"^\| (1|10|100|300) \| ({NUMBER}) \|", printed, flags=re.M)][:4] == [
        "1", "10", "100", "300"
    ]  # fmt: skip
    assert float(re.search(rf"({NUMBER}) bytes per class and anchor", printed)[1]) > 4
    assert float(re.search(rf"({NUMBER}) times as many", printed)[1]) > 0
    sums = re.findall(rf"^\| [24] \| (\w+) \| {NUMBER} \| ({NUMBER}) \|$", printed, flags=re.M)
    assert [name for name, _ in sums] == ["GradientSum", "DistributedDataParallel"] * 2
    assert len({float(size) for _, size in sums}) == 1


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_benchmark_pipeline():
    printed = run("benchmark_pipeline.py", "--model", TINY, "--sizes", 128, "--accumulate", 4, "--turns", 1)
    rows = re.findall(rf"^\| (.*?) \| ([\d, ]+) \| ({NUMBER}) \|", printed, flags=re.M)
    assert [name for name, _, _ in rows] == ["one process", "2 replicas", "2 stages", "2 stages, one at a time"]
    assert [len(memory.split(",")) for _, memory, _ in rows] == [1, 2, 2, 2]
    assert all(float(rate) > 0 for _, _, rate in rows)


def test_optimizer_step():
    printed = run("optimizer_step.py", TINY, "--device", "cpu", "--turns", 1)
    seconds = re.search(rf"SGD ({NUMBER}) ms, AdamW ({NUMBER}) ms, MuSGD ({NUMBER}) ms", printed)
    assert all(float(one) > 0 for one in seconds.groups())
    shares = [int(one) for one in re.findall(r"(\d+)% of \d", printed)]
    assert 100 > shares[0] >= shares[1] >= shares[2] > 0


def test_profile_step():
    tiny = ("--model", MINUTE, "--imgsz", 64, "--batch", 2, "--accumulate", 2, "--turns", 1)
    printed = run("profile_step.py", *tiny, "--amp", "fp32")
    rows = {
        row[0]: row[1:]
        for row in re.findall(rf"^\| (.+?) \| ({NUMBER}) \| ({NUMBER})% \| (.*) \|$", printed, flags=re.M)
    }
    parts = {kind: float(share) for kind, (_, share, _) in rows.items()}
    assert parts.pop("**all**") == 100
    alone = parts.pop("convolutions alone")
    assert sum(parts.values()) == pytest.approx(100, abs=0.05 * len(parts))
    assert alone == pytest.approx(parts["convolutions, forward"] + parts["convolutions, backward"], abs=0.11)
    assert min(parts[kind] for kind in ("assigner", "loss", "optimizer", "EMA", "clipping", "undo")) > 0
    assert float(rows["convolutions alone"][2]) > float(rows["**all**"][2]) > 0


@pytest.mark.long
def test_cards():
    """A card twice as large never takes a smaller micro-batch of a plain step."""
    printed = run("cards.py", "--models", TINY, "--imgsz", 128, "--cards", 1, 2, "--boxes", 20)
    batches = [int(batch) for batch in re.findall(r"^\| \d GB \| `batch=(\d+)` \|$", printed, flags=re.M)]
    assert len(batches) == 2
    assert 8 <= batches[0] <= batches[1] <= 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run on the GPU for minutes")
def test_gpu_check_says_that_there_is_no_gpu():
    assert run("gpu_check.py").startswith("skipped: there is no CUDA GPU")


def test_recipes_are_compared_seed_by_seed(data, tmp_path):
    """The table says what the runs' own files say, a second call trains nothing, and a changed plan is refused."""
    plan = {
        "common": {"model": str(MINUTE), "imgsz": 64, "epochs": 2, "batch": 4, "nbs": 4, "workers": 0, "device": "cpu"},
        "sets": {"shapes": {"data": os.path.relpath(data, tmp_path)}},
        "variants": {"today": None},
        "seeds": [0, 1],
        "known": {"public": {"shapes": {0: 0.5, 1: 0.75}}},
    }
    file, out = tmp_path / "plan.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump(plan, sort_keys=False))
    printed = run("compare_recipes.py", file, out, "--last")
    last = [last_of(out / f"shapes-today-{seed}" / "metrics.csv") for seed in plan["seeds"]]
    assert f"| shapes | today | 2 | {np.mean(last):.3f} |" in printed
    assert f"| shapes | public | 2 | 0.625 | 0.177 | {np.mean([0.5 - last[0], 0.75 - last[1]]):+.3f} (2) |" in printed

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    assert run("compare_recipes.py", file, out, "--last") == printed[printed.index("| set") :]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.*")} == before

    file.write_text(yaml.safe_dump({**plan, "variants": {"today": {"lr0": 0.1}}}))
    assert "made by other settings than the plan's" in run("compare_recipes.py", file, out, status=1)


def last_of(file):
    with file.open(encoding="utf-8") as rows:
        return float(list(csv.DictReader(rows))[-1]["mAP50-95"])


def test_a_bootstrap_interval_is_that_of_all_resamples():
    """Four differences have 256 resamples: their 2.5% and 97.5% points, counted one by one."""
    differences = [0.03, -0.01, 0.05, 0.02]
    means = sorted(np.mean(drawn) for drawn in itertools.product(differences, repeat=4))
    low, high = runpy.run_path(str(SCRIPTS / "compare_recipes.py"))["interval"](differences)
    assert (low, high) == pytest.approx((np.quantile(means, 0.025), np.quantile(means, 0.975)), abs=0.002)
