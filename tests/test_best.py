"""Which epoch is the best, and that best.pt is its weights: whatever was skipped, not validated, rewound."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import MINUTE, write_dataset
from test_step import new_state
from test_training import run

from detector import checkpoint_file
from detector.run.state import Best, fitness_of
from detector.step.step import StepReport


@given(st.lists(st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.floats(-1, 1)), min_size=1))
def test_the_best_epoch_is_the_first_of_the_highest_among_those_with_a_fitness(fitness):
    best = Best()
    for epoch, one in enumerate(fitness, start=1):
        best.take(epoch, one)
    real = [one for one in fitness if one is not None and math.isfinite(one)]
    assert best.epoch == (fitness.index(max(real)) + 1 if real else len(fitness))


def test_a_loss_is_best_where_it_is_lowest_and_a_metric_where_it_is_highest():
    row = {"box": 2.0, "mAP50": 0.5}
    assert fitness_of(row, "box", ("box", "cls")) == -2.0
    assert fitness_of(row, "mAP50", ("box", "cls")) == 0.5
    assert fitness_of(row, "recall", ("box", "cls")) is None


def test_the_epochs_loss_is_over_the_images_that_were_learned_from():
    """A skipped window leaves neither its losses nor its images; half an epoch skipped does not halve the loss."""
    state = new_state()
    state.learned(StepReport((2.0, 1.0), 5.0, 1.0, True, images=8))
    state.learned(StepReport((4.0, 0.0), 5.0, 1.0, True, images=4))
    assert [one / state.loss_images for one in state.loss_sums] == pytest.approx([(16 + 16) / 12, 8 / 12])
    state.end_epoch({}, None)
    assert (state.loss_sums, state.loss_images, state.epoch) == ([], 0, 1)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"), train=8)
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=4", "nbs=4", "workers=0", "plots=false", "epochs=5",
            "amp=fp32", "device=cpu", "save_period=1", "val=false", "seed=1"]  # fmt: skip


def ema_of(path):
    return checkpoint_file.read(path)["ema"]


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


def lowest(history, metric="cls"):
    """The epoch, from 1, whose loss is the lowest."""
    return 1 + min(range(len(history)), key=lambda i: history[i][metric])


@pytest.mark.slow
def test_a_rewound_run_rewinds_its_best(tmp_path, common, capsys):
    """Gone back to before the best epoch: what counts is the best of the epochs that this run has trained."""
    assert run("train", *common, "metric=cls", f"project={tmp_path}", "name=run") == 0
    weights = tmp_path / "run" / "weights"
    best = lowest(checkpoint_file.read(weights / "last.pt")["history"])
    assert checkpoint_file.read(weights / "best.pt")["epoch"] == best > 1
    back = best - 1
    earlier = checkpoint_file.read(weights / f"epoch{back}.pt")
    # The rest of the run learns nothing more: the rates are tiny, and its losses those of the weights that it has.
    assert run("train", f"resume={weights / f'epoch{back}.pt'}", "lr0=1e-12", "momentum=0") == 0
    history = checkpoint_file.read(weights / "last.pt")["history"]
    expected = lowest(history)
    found = checkpoint_file.read(weights / "best.pt")
    assert (found["epoch"], found["metrics"]) == (expected, history[expected - 1])
    assert f"(epoch {expected})" in capsys.readouterr().out
    assert same(found["ema"], earlier["ema"]) == (expected == back)


@pytest.mark.slow
def test_a_run_that_is_rewound_and_ends_at_once_has_its_own_best(tmp_path, common):
    assert run("train", *common, "metric=cls", f"project={tmp_path}", "name=run") == 0
    weights = tmp_path / "run" / "weights"
    assert checkpoint_file.read(weights / "best.pt")["epoch"] > 1
    assert run("train", f"resume={weights / 'epoch1.pt'}", "epochs=1") == 0
    assert same(ema_of(weights / "best.pt"), ema_of(weights / "epoch1.pt"))


@pytest.mark.slow
def test_a_best_that_is_gone_gives_way_to_the_best_that_is_there(tmp_path, common, capsys):
    assert run("train", *common, "metric=cls", f"project={tmp_path}", "name=run") == 0
    weights = tmp_path / "run" / "weights"
    first = ema_of(weights / "epoch1.pt")
    saved = checkpoint_file.read(weights / "epoch3.pt")  # as if its second epoch had been the best
    saved["best"] = {"epoch": 2, "fitness": 0.0}
    saved["history"][2]["cls"] = math.nan
    checkpoint_file.write(weights / "epoch3.pt", saved)
    (weights / "epoch2.pt").unlink()
    assert run("train", f"resume={weights / 'epoch3.pt'}", "epochs=3") == 0
    out = capsys.readouterr().out
    assert "warning: the weights of epoch 2, the best until here, are not in" in out
    assert same(ema_of(weights / "best.pt"), first)


@pytest.mark.slow
def test_a_best_of_the_future_and_a_damaged_checkpoint(tmp_path, common):
    """The last checkpoint is damaged, and best.pt is of its epoch: the one before stands in for both."""
    assert run("train", *common, f"project={tmp_path}", "name=run", "epochs=2", "save_period=-1") == 0
    weights = tmp_path / "run" / "weights"
    first = checkpoint_file.read(weights / "last.prev.pt")
    assert (first["epoch"], first["best"]["epoch"], first["done"]) == (1, 1, 0)
    assert checkpoint_file.read(weights / "best.pt")["epoch"] == 2
    (weights / "last.pt").write_bytes((weights / "last.pt").read_bytes()[:-1000])
    assert run("train", f"resume={tmp_path / 'run'}", "epochs=1") == 0
    assert same(ema_of(weights / "best.pt"), first["ema"])


@pytest.mark.slow
def test_validation_that_is_switched_on_later_decides(tmp_path, common):
    """Epochs without a validation never stand in the way of one that has a value."""
    assert run("train", *common, f"project={tmp_path}", "name=run", "epochs=3") == 0
    weights = tmp_path / "run" / "weights"
    assert checkpoint_file.read(weights / "best.pt")["epoch"] == 3
    assert run("train", f"resume={tmp_path / 'run'}", "epochs=5", "val=true") == 0
    last = checkpoint_file.read(weights / "last.pt")
    values = {row["epoch"]: row["mAP50-95"] for row in last["history"] if "mAP50-95" in row}
    assert sorted(values) == [4, 5]
    assert last["best"]["epoch"] == max(values, key=lambda epoch: (values[epoch], -epoch))
    assert checkpoint_file.read(weights / "best.pt")["epoch"] == last["best"]["epoch"]
