"""The promise the project is named for: a window's update is that of one big batch, however the window is cut."""

import copy
import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from scenes import MINUTE, cut_batch, random_batch

from detector.loss.criterion import BranchLoss, DetectionLoss
from detector.model.network import build_network
from detector.precision import Precision
from detector.run.build import class_parameters
from detector.run.state import RunState
from detector.step.ema import Ema
from detector.step.gradients import GradientSum
from detector.step.optim import Choice, build_optimizer
from detector.step.plan import Window
from detector.step.schedule import GROUPS, Rates, ema_decay
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import StepRules, train_window
from detector.step.weighting import BY_WINDOW

FP32 = Precision("fp32", "cpu")
GAINS = (7.5, 0.5, 1.5)
RATES = Rates(dict.fromkeys(GROUPS, 0.01), 0.9, [GAINS])


def rates_of(state):
    """The same for a network with one head; with two, each has its share of the gains."""
    shares = (1.0,) if len(state.network.branches()) == 1 else (0.7, 0.3)
    return RATES._replace(gains=[[share * gain for gain in GAINS] for share in shares])


class ByMicroBatch:
    """The usual approximation, to compare with: each micro-batch by its own weight, times its images."""

    def before(self, weight, images, scale):
        return images / weight.clamp(min=1.0)

    def after(self, weights, images, scale):
        return torch.ones_like(weights)


def total(branch):
    """The loss of a branch as it is optimised, undivided."""
    return sum(term * gain for term, gain in zip(branch.terms, GAINS, strict=True))


class Double:
    """A batch whose images arrive in fp64, so that rounding does not hide a wrong gradient."""

    def __init__(self, batch):
        self.batch = batch
        self.boxes_xyxy, self.classes, self.image_index = batch.boxes_xyxy, batch.classes, batch.image_index
        self.host_boxes_xyxy, self.samples = batch.host_boxes_xyxy, batch.samples

    def network_input(self):
        return self.batch.network_input(torch.float64)


def new_state(dtype=torch.float32, momentum=0.9, optimizer="SGD", model=MINUTE):
    network = build_network(model, nc=2, seed=0).to(dtype)
    with torch.no_grad():  # predictions that overlap the boxes, so that every term has a gradient
        for output in network.head.class_outputs:
            output.bias.fill_(-1.0)
    set_modes(network, freeze_norms=True)
    steps = build_optimizer(network, Choice(optimizer, 0.01, momentum), 0.0005, class_parameters(network))
    return RunState(network, Ema(network), steps, FP32)


def step_of(
    batch, sizes, dtype=torch.float64, clip_norm=10.0, state=None, scaler=None, weighting=BY_WINDOW, rates=None
):
    """Train one window, cut into micro-batches of these sizes; returns the state and the report."""
    state = state or new_state(dtype)
    if scaler is not None:
        state.scaler = scaler
    criterion = DetectionLoss(state.network.head)
    micro_batches = cut_batch(batch, sizes)
    samples = tuple(tuple(int(sample) for sample in micro.samples) for micro in micro_batches)
    if dtype == torch.float64:
        micro_batches = [Double(micro) for micro in micro_batches]
    rules = StepRules(criterion, clip_norm=clip_norm, weighting=weighting)
    rates = rates or rates_of(state)
    report = train_window(state, GradientSum(state.network), rules, Window(0, 0, (samples,)), micro_batches, rates)
    return state, report


def gradient(state):
    return torch.cat([parameter.grad.flatten() for branch in state.network.branches() for parameter in branch])


def relative(a, b):
    return float((a - b).norm() / b.norm())


WINDOWS = {
    "even": [2, 2, 2, 2, 2, 2, 2, 2],
    "uneven": [1, 9, 0, 3, 14, 0, 0, 5],
    "one crowded image": [0, 0, 0, 300, 0, 1, 0, 2],
    "background only": [0, 0, 0, 0, 0, 0, 0, 0],
}


@cache
def whole_window(window):
    """The step of one batch, and what it reports."""
    return step_of(random_batch(WINDOWS[window]), [8], clip_norm=1e9)


@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2, 2], [1] * 8, [3, 3, 2], [7, 1], [1, 7]], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_window_gradient_equals_one_batch(window, sizes):
    whole, expected = whole_window(window)
    cut, report = step_of(random_batch(WINDOWS[window]), sizes, clip_norm=1e9)
    assert gradient(whole).norm() > 0
    assert relative(gradient(cut), gradient(whole)) < 1e-10
    assert report.losses == pytest.approx(expected.losses, rel=1e-10)
    assert report.weight == pytest.approx(expected.weight, rel=1e-10)
    assert report.norm == pytest.approx(expected.norm, rel=1e-10)


def test_fp32_gradient_differs_by_rounding_only():
    batch = random_batch(WINDOWS["uneven"])
    whole, _ = step_of(batch, [8], torch.float32, clip_norm=1e9)
    cut, _ = step_of(batch, [2, 2, 2, 2], torch.float32, clip_norm=1e9)
    assert relative(gradient(cut), gradient(whole)) < 1e-5


def test_normalising_by_micro_batch_is_the_sum_of_their_own_steps_and_not_the_large_batch():
    """That is what others do; on the same windows the test above would fail with it."""
    batch = random_batch(WINDOWS["uneven"])
    whole, _ = step_of(batch, [8], clip_norm=1e9)
    micro, _ = step_of(batch, [2, 2, 2, 2], clip_norm=1e9, weighting=ByMicroBatch())
    parts = [gradient(step_of(part, [2], clip_norm=1e9)[0]) for part in cut_batch(batch, [2, 2, 2, 2])]
    assert relative(gradient(micro), sum(parts)) < 1e-10
    assert relative(gradient(micro), gradient(whole)) > 0.01


def test_gradient_is_images_times_that_of_the_mean_loss():
    """The sum convention, from the criterion alone: n * d(S / N)."""
    batch = random_batch(WINDOWS["uneven"])
    state, report = step_of(batch, [3, 3, 2], clip_norm=1e9)
    fresh = new_state(torch.float64)
    criterion = DetectionLoss(fresh.network.head)
    branch = criterion(fresh.network(batch.network_input(torch.float64)), batch)[0]
    (8 * total(branch) / branch.weight).backward()
    assert relative(gradient(state), gradient(fresh)) < 1e-10
    assert sum(report.losses) == pytest.approx((total(branch) / branch.weight).item(), rel=1e-10)


def test_the_gradient_is_clipped_once_to_the_norm():
    batch = random_batch(WINDOWS["uneven"])
    free, report = step_of(batch, [2, 2, 2, 2], clip_norm=1e9)
    clipped, again = step_of(batch, [2, 2, 2, 2], clip_norm=report.norm / 3)
    assert again.norm == pytest.approx(report.norm)
    assert relative(gradient(clipped) * 3, gradient(free)) < 1e-5
    assert float(gradient(clipped).norm()) == pytest.approx(report.norm / 3, rel=1e-5)


def test_the_step_is_sgd_on_that_gradient_with_decay_on_weights_only():
    batch = random_batch(WINDOWS["even"])
    state = new_state(torch.float64)
    before = copy.deepcopy(dict(state.network.named_parameters()))
    step_of(batch, [4, 4], state=state)
    for name, parameter in state.network.named_parameters():
        if parameter.grad is None:
            continue
        decay = 0.0005 if parameter.ndim == 4 else 0.0
        update = parameter.grad + decay * before[name]
        expected = before[name] - 0.01 * (update + 0.9 * update)  # Nesterov, first step
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-14)


def test_ema_follows_each_applied_step():
    batch = random_batch(WINDOWS["even"])
    state = new_state(torch.float64)
    average = copy.deepcopy(state.ema.network.state_dict())
    for number in (1, 2, 3):
        step_of(batch, [4, 4], state=state)
        decay = ema_decay(number)
        for name, value in state.network.state_dict().items():
            if value.dtype.is_floating_point:
                average[name] = decay * average[name] + (1 - decay) * value
    for name, value in state.ema.network.state_dict().items():
        torch.testing.assert_close(value, average[name], rtol=1e-9, atol=1e-12)
    assert (state.step, state.ema.steps) == (3, 3)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    batch = random_batch(WINDOWS["even"])
    state = new_state()
    step_of(batch, [4, 4], torch.float32, state=state)
    before = copy.deepcopy((state.network.state_dict(), state.ema.network.state_dict(), state.optimizer.state_dict()))
    hook = state.network.model[0].conv.weight.register_hook(lambda gradient: gradient * float("inf"))
    _, report = step_of(batch, [4, 4], torch.float32, state=state)
    hook.remove()
    after = (state.network.state_dict(), state.ema.network.state_dict(), state.optimizer.state_dict())
    assert not report.applied
    assert (state.step, state.ema.steps, state.skipped, state.skipped_in_a_row) == (1, 1, 1, 1)
    for old, new in zip(before[:2], after[:2], strict=True):
        for name in old:
            assert torch.equal(old[name], new[name]), name
    for key, old in before[2]["state"].items():
        assert torch.equal(old["momentum_buffer"], after[2]["state"][key]["momentum_buffer"])
    step_of(batch, [4, 4], torch.float32, state=state)
    assert (state.step, state.skipped, state.skipped_in_a_row) == (2, 1, 0)


def test_a_loss_scaler_changes_no_gradient():
    batch = random_batch(WINDOWS["uneven"])
    plain, _ = step_of(batch, [4, 4], torch.float32, clip_norm=1e9)
    scaled, report = step_of(
        batch, [4, 4], torch.float32, clip_norm=1e9, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
    )
    assert report.applied
    assert relative(gradient(scaled), gradient(plain)) < 1e-6


def test_frozen_batchnorm_keeps_its_statistics():
    state = new_state()
    before = copy.deepcopy(state.network.model[0].bn.running_mean)
    step_of(random_batch(WINDOWS["even"]), [4, 4], torch.float32, state=state)
    assert torch.equal(before, state.network.model[0].bn.running_mean)
    set_modes(state.network, freeze_norms=False)
    step_of(random_batch(WINDOWS["even"]), [4, 4], torch.float32, state=state)
    assert not torch.equal(before, state.network.model[0].bn.running_mean)


def test_the_scale_of_the_backward_pass_cancels_to_the_bit():
    """It follows the last window's weight, a power of two: a resumed run need not know it to go on bit for bit."""
    batch = random_batch(WINDOWS["uneven"])
    states = []
    for scale in (1.0, 64.0, 4096.0):
        state = new_state()
        state.loss_scale = scale
        states.append(step_of(batch, [4, 4], torch.float32, state=state)[0])
    assert torch.equal(gradient(states[0]), gradient(states[1]))
    assert torch.equal(gradient(states[0]), gradient(states[2]))
    weight = step_of(batch, [4, 4], torch.float32)[1].weight
    assert states[0].loss_scale == 2 ** round(math.log2(weight))


def test_fp16_overflows_no_sooner_than_with_a_mean():
    """With 64 crowded images the sum is thousands of times the mean: the largest gradient of the backward pass of a
    sum must not exceed that of the usual mean (times the micro-batch's images)."""
    batch = random_batch([40] * 64, size=64)
    largest = {}
    for name in ("sum", "mean"):
        state = new_state()
        seen = []
        for module in state.network.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_full_backward_pre_hook(lambda _, out, seen=seen: seen.append(float(out[0].abs().max())))
        if name == "sum":
            step_of(batch, [16] * 4, torch.float32)  # any state: only its scale after a step is wanted
            state.loss_scale = step_of(batch, [16] * 4, torch.float32)[0].loss_scale
        step_of(batch, [16] * 4, torch.float32, state=state, weighting=BY_WINDOW if name == "sum" else ByMicroBatch())
        largest[name] = max(seen)
    assert largest["sum"] <= largest["mean"]


class TwoHeads(torch.nn.Module):
    """A toy with a trunk and two heads, the second on detached features: branches of their own weights."""

    def __init__(self):
        super().__init__()
        self.trunk, self.many, self.one = (torch.nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, images):
        features = self.trunk(images)
        return self.many(features), self.one(features.detach())

    def branches(self):
        return [[*self.trunk.parameters(), *self.many.parameters()], list(self.one.parameters())]


class ToyBatch(NamedTuple):
    rows: torch.Tensor
    samples: torch.Tensor

    def network_input(self):
        return self.rows


def toy_criterion(predictions, batch):
    """Weights that differ from row to row, and between the branches."""
    weights = batch.rows.detach().abs().sum(dim=1), batch.rows.detach().square().sum(dim=1)
    sums = [(prediction.square().sum(dim=1) * w).sum() for prediction, w in zip(predictions, weights, strict=True)]
    return tuple(BranchLoss(total[None], weight.sum()) for total, weight in zip(sums, weights, strict=True))


@pytest.mark.parametrize("sizes", [[8], [4, 4], [5, 2, 1]], ids=str)
def test_each_branch_is_scaled_by_its_own_weight(sizes):
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = TwoHeads()
    optimizer = build_optimizer(network, Choice("SGD", 0.01, 0.9), decay=0.0)
    state = TrainState(network, Ema(network), optimizer, FP32)
    micro_batches = [ToyBatch(part, torch.arange(len(part))) for part in rows.split(sizes)]
    window = Window(0, 0, (tuple(tuple(range(size)) for size in sizes),))
    rules = StepRules(toy_criterion, clip_norm=1e9)
    train_window(state, GradientSum(network), rules, window, micro_batches)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = TwoHeads()
    loss = sum(8 * branch.terms[0] / branch.weight for branch in toy_criterion(fresh(rows), ToyBatch(rows, rows)))
    loss.backward()
    for ours, theirs in zip(network.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
