"""Nothing lost: a run that is killed at any named point, or at any time, and resumed ends like one that was not."""

import copy
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from faults.compare import BrokenPromiseError, Outcome, assert_same, bytes_lost, leftovers, outcome_of, sizes_of
from faults.points import POINTS
from faults.run import NEVER, Kill, Nursery, Run
from scenes import MINUTE, write_dataset

pytestmark = pytest.mark.slow
EVERY_WINDOW = "save_minutes=1e-9"  # 0 saves at epochs' ends only

# Which call of a point kills the run, where it is not the first: one inside an epoch, of which something is saved.
STEPS = ("forward done", "backward done", "gradient finished", "weights stepped", "step done", "save begun")
WRITES = ("checkpoint half written", "checkpoint flushed", "old one linked", "old one set aside", "last.pt in place")
NUMBERS = dict.fromkeys(STEPS, 2) | dict.fromkeys(WRITES, 3) | {"validating": 2}


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as one:
        yield one


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """8 images, 2 epochs, 3 windows and 2: the window grows in the first."""
    data = write_dataset(tmp_path_factory.mktemp("data"), train=8, val=4)
    common = ["imgsz=64", "batch=2", "nbs=4", "warmup_epochs=1", "device=cpu", "plots=false", "epochs=2"]
    return [f"data={data}", f"model={MINUTE}", *common]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory, nursery, settings):
    """What a run with these further settings leaves where nobody kills it; trained once."""

    @cache
    def trained(*more: str) -> Outcome:
        folder = tmp_path_factory.mktemp("uncut")
        words = ["train", *settings, *more, "workers=0", "save_minutes=0", f"project={folder}", "name=run"]
        ended = nursery.run(words, NEVER, folder / "log")
        assert ended.status == 0, ended.said
        return outcome_of(folder / "run")

    return trained


@pytest.fixture
def make_run(tmp_path, nursery, settings, uncut):
    """A run to be killed. How it loads and saves must not matter; `more` also holds for the one it is compared with."""

    def made(*how: str, more: tuple[str, ...] = ()) -> Run:
        return Run(nursery, tmp_path / "run", [*settings, *more, *how], uncut(*more))

    return made


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=pytest.mark.long) if i % 2 else p for i, p in enumerate(POINTS)]
)
def test_a_run_killed_at_a_point_ends_like_one_that_was_not(make_run, point):
    run = make_run("workers=0", EVERY_WINDOW)
    assert run.go_on(Kill(point, NUMBERS.get(point, 1))).killed, "the point was not reached"
    run.end()
    assert run.lost == 0


@pytest.mark.parametrize(("point", "number"), [("best.pt in place", 2), ("old one set aside", 2), ("validating", 4)])
def test_a_run_killed_at_its_last_epochs_end_does_too(make_run, point, number):
    """Saved at epochs' ends only; two of them without validation, so that each epoch is the best."""
    run = make_run("workers=0", "save_minutes=0", more=() if point == "validating" else ("val=false",))
    assert run.go_on(Kill(point, number)).killed, "the point was not reached"
    run.end()
    assert run.lost == 0


@pytest.mark.parametrize("point", [pytest.param("gradient finished", marks=pytest.mark.long), "weights stepped"])
def test_a_run_of_musgd_with_its_two_momenta_does_too(make_run, point):
    run = make_run("workers=0", EVERY_WINDOW, more=("optimizer=MuSGD",))
    assert run.go_on(Kill(point, NUMBERS[point])).killed, "the point was not reached"
    run.end()
    assert run.lost == 0


@pytest.mark.long
def test_a_run_killed_again_and_again_does_too(make_run):
    """Also inside the writes of the processes that resume it, and through a command line of its own."""
    run = make_run("workers=0", EVERY_WINDOW)
    plan = [Kill("folder made"), Kill("checkpoint half written"), Kill("step done", 2), Kill("old one linked"),
            Kill("weights stepped"), Kill("checkpoint flushed", plain=True), Kill("validating"), Kill("validated"),
            Kill("metrics.csv half written"), Kill("forward done", 1), Kill("measured")]  # fmt: skip
    assert [run.go_on(kill).killed for kill in plan] == [True] * len(plan)
    run.end()
    assert run.kills == len(plan)
    assert run.lost == 0


@pytest.mark.parametrize(("workers", "saves"), [(0, EVERY_WINDOW), (0, "save_minutes=0"), (2, EVERY_WINDOW)])
def test_a_run_killed_at_random_times_does_too(make_run, workers, saves):
    random = Random(workers)
    run = make_run(f"workers={workers}", saves)
    for _ in range(3):
        if not run.finished:
            run.go_on(Kill(seconds=random.uniform(0.1, 0.9)))
    run.end()
    assert run.lost == 0


@pytest.mark.parametrize("point", ["epoch saved", "metrics.csv half written"])
def test_the_last_row_of_metrics_survives(make_run, point):
    run = make_run("workers=0", EVERY_WINDOW)
    assert run.go_on(Kill(point, 2)).killed, "the point was not reached"
    run.end()


@pytest.mark.parametrize("point", ["checkpoint half written", "old one set aside", "metrics.csv half written"])
def test_nothing_is_left_of_a_killed_write(make_run, uncut, point):
    run = make_run("workers=0", "save_minutes=0")
    number = {"old one set aside": 2}.get(point, 1)
    assert run.go_on(Kill(point, number)).killed, "the point was not reached"
    run.end()
    assert leftovers(run.folder, uncut()) == []


def test_a_killed_run_with_workers_is_resumed_at_once(make_run):
    run = make_run("workers=2", EVERY_WINDOW)
    assert run.go_on(Kill("step done", 2)).killed
    run.end()
    assert run.waited == []


def test_the_comparison_sees_one_bit_one_byte_and_a_cut_file(tmp_path, uncut):
    """What all of the above rests on can fail."""
    good, bad = uncut(), copy.deepcopy(uncut())
    assert_same(good, bad)
    tensor = next(value for value in bad.last["ema"].values() if value.ndim == 1)
    tensor.view(torch.int32)[0] ^= 1
    with pytest.raises(BrokenPromiseError, match=r"1 differences, the first: last\.pt\.ema"):
        assert_same(good, bad)
    with pytest.raises(BrokenPromiseError, match=r"metrics\.csv"):
        assert_same(good, replace(good, metrics=good.metrics[:-2] + b"7\n"))
    (tmp_path / "weights").mkdir()
    last, table = tmp_path / "weights" / "last.pt", tmp_path / "metrics.csv"
    torch.save(good.best, last)
    table.write_bytes(good.metrics)
    before = sizes_of(tmp_path)
    assert bytes_lost(tmp_path, before, good) == 0
    last.write_bytes(last.read_bytes()[:-1000])
    table.unlink()
    assert bytes_lost(tmp_path, before, good) == before["weights/last.pt"] - 1000 + before["metrics.csv"]
