"""A network with two heads: each branch of its loss has its own target weight, gains and parameters."""

import json
import signal
from itertools import pairwise

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import MINUTE26, random_batch, write_dataset
from test_distributed import ARGUMENTS, POISONED, WORKER
from test_step import Double, new_state, rates_of, relative, step_of
from test_training import run, same, train

from detector.loss.criterion import DetectionLoss
from detector.run import loop


def branch_gradients(state):
    return [torch.cat([one.grad.flatten() for one in branch]) for branch in state.network.branches()]


def by_autograd(model, batch, images):
    """The gradient of each branch, and the losses, from the criterion alone: images * sums / max(weight, 1)."""
    fresh = new_state(torch.float64, model=model)
    double = Double(batch)
    losses = DetectionLoss(fresh.network.head)(fresh.network(double.network_input()), double)
    gains = torch.tensor(rates_of(fresh).gains, dtype=torch.float64)
    total = sum(loss.terms * gain / loss.weight.clamp(min=1) for loss, gain in zip(losses, gains, strict=True))
    (images * total.sum()).backward()
    return branch_gradients(fresh), total.tolist(), [float(loss.weight) for loss in losses]


def assert_like_one_batch(model, boxes, sizes):
    batch = random_batch(boxes)
    expected, losses, weights = by_autograd(model, batch, len(boxes))
    state, report = step_of(batch, sizes, clip_norm=1e9, state=new_state(torch.float64, model=model))
    for ours, theirs in zip(branch_gradients(state), expected, strict=True):
        assert theirs.norm() > 0
        assert relative(ours, theirs) < 1e-10
    assert report.losses == pytest.approx(losses, rel=1e-10, abs=1e-12)
    assert report.weight == pytest.approx(sum(weights), rel=1e-10, abs=1e-12)
    return weights


@st.composite
def cut_windows(draw):
    """Boxes of each image of a window, and the sizes of its micro-batches."""
    boxes = draw(st.lists(st.one_of(st.integers(0, 6), st.just(0), st.just(60)), min_size=1, max_size=6))
    edges = sorted({0, len(boxes), *draw(st.lists(st.integers(0, len(boxes)), max_size=4))})
    return boxes, [b - a for a, b in pairwise(edges)]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(cut_windows())
def test_any_cut_of_a_window_takes_the_step_of_one_batch(window):
    assert_like_one_batch(MINUTE26, *window)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v26n", "v10n"])
@pytest.mark.parametrize(
    ("boxes", "sizes"), [([1, 9, 0, 3, 14, 0, 0], [3, 3, 1]), ([0, 0, 0], [2, 1]), ([0, 150, 0, 1], [1] * 4)], ids=str
)
def test_any_cut_of_a_window_of_a_whole_model(model, boxes, sizes):
    assert_like_one_batch(model, boxes, sizes)


def test_the_floor_of_the_target_weight_holds_for_each_branch():
    """Ten positives a box weigh more than 1 here and one less, so that one branch is divided by it and one by 1."""
    weights = assert_like_one_batch(MINUTE26, [0, 3, 0, 0], [1, 3])
    assert weights[0] > 1 > weights[1] > 0


def test_each_branch_reaches_its_own_parameters_alone():
    state = new_state(torch.float64, model=MINUTE26)
    batch = Double(random_batch([3, 9, 1]))
    losses = DetectionLoss(state.network.head)(state.network(batch.network_input()), batch)
    names = {parameter: name for name, parameter in state.network.named_parameters()}
    for loss, own in zip(losses, state.network.branches(), strict=True):
        every = [one for branch in state.network.branches() for one in branch]
        found = torch.autograd.grad(loss.terms.sum(), every, retain_graph=True, allow_unused=True)
        reached = {names[one] for one, gradient in zip(every, found, strict=True) if gradient is not None}
        assert reached == {names[one] for one in own}
    assert all(".one2one_" in names[one] for one in state.network.branches()[1])


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path):
    found = []
    for processes in (1, 2):
        done = ranks.run(processes, WORKER.name, tmp_path / f"{processes}.pt", *ARGUMENTS[:2], "off", MINUTE26)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(tmp_path / f"{processes}.pt", weights_only=True))
    alone, together = found
    assert len(alone["rows"]) == len(json.loads(ARGUMENTS[0]))
    for number, (row, other) in enumerate(zip(together["rows"], alone["rows"], strict=True)):
        assert row[1][3] == other[1][3] == (number != POISONED)
        if number != POISONED:
            assert relative(row[0], other[0]) < 1e-10
            assert row[1][0] == pytest.approx(other[1][0], rel=1e-9)
            assert row[1][1:3] == pytest.approx(other[1][1:3], rel=1e-9)
    for name, value in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_run_that_is_stopped_inside_an_epoch_goes_on_with_the_gains_of_that_epoch(tmp_path, monkeypatch):
    """Also as one of more epochs: from there on its gains are those of the longer run."""
    data = write_dataset(tmp_path, train=12)
    common = [f"data={data}", f"model={MINUTE26}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "workers=0",
              "plots=false", "patience=0", "amp=fp32"]  # fmt: skip
    seen = []
    take = loop.recover.take

    def watched(run, window, held, rates):
        seen.append((window.epoch, window.done, [gains[0] for gains in rates.gains]))
        if len(seen) == stop:
            signal.raise_signal(signal.SIGINT)
        return take(run, window, held, rates)

    monkeypatch.setattr(loop.recover, "take", watched)
    stop = 0
    whole = train(tmp_path, common, "whole", "epochs=3")
    steps, seen[:] = list(seen), []
    shares = [0.8, 0.45, 0.1]
    for epoch, _, gains in steps:
        assert gains == pytest.approx([7.5 * shares[epoch], 7.5 * (1 - shares[epoch])])

    stop = next(number for number, (epoch, done, _) in enumerate(steps, start=1) if epoch == 1 and done)
    assert run("train", *common, f"project={tmp_path}", "name=halves", "epochs=3") == 128 + signal.SIGINT
    halves = tmp_path / "halves"
    assert len(seen) == stop
    assert run("train", f"resume={halves}") == 0
    assert seen == steps
    assert same(halves, whole)

    seen[:] = []
    assert run("train", f"resume={halves}", "epochs=5") == 0
    assert {epoch for epoch, _, _ in seen} == {3, 4}
    for epoch, _, gains in seen:
        assert gains == pytest.approx([7.5 * (0.8 - 0.7 * epoch / 4), 7.5 * (0.2 + 0.7 * epoch / 4)])
