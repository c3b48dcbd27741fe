"""THE HEART: one window in, one update out.

A step is the gradient of one big batch, however the batch is cut. The loss of a window of n images is n * S / N: S the
terms summed over its images, N its target weight. N carries no gradient, so the gradients of the micro-batches' sums
add up exactly, and one multiplication at the end, when N is known over all micro-batches and ranks, makes the step's
gradient. Dividing earlier, by each micro-batch's own N, is what makes accumulation approximate elsewhere.

Accumulate 1, one GPU, many GPUs, CPU, fp16, bf16 and fp32 run through the same lines.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from detector import distributed
from detector.data.batch import Batch
from detector.loss.criterion import DetectionLoss
from detector.memory import OutOfMemoryError, attempt
from detector.step.optim import Rates, Undo, set_rates
from detector.step.plan import Window
from detector.step.state import TrainState
from detector.step.statistics import Statistics, norms_at_rest
from detector.step.weighting import Rule


@dataclass(frozen=True)
class StepRules:
    """What stays the same from step to step."""

    criterion: DetectionLoss
    normalise: Rule
    clip_norm: float
    keeping: Callable[[], AbstractContextManager[None]] = nullcontext  # where activations wait, see offload.py
    undo: bool = True  # whether running out of memory is undone; not with norms that wait for other ranks, see `add_up`


class StepReport(NamedTuple):
    """What a step did. The losses are what was optimised: the window's sums per target weight, over all ranks."""

    losses: tuple[float, ...]  # box, cls, dfl
    weight: float  # the window's target weight
    norm: float  # of the gradient before clipping
    applied: bool  # False: not finite, or of no images; weights, EMA and optimizer are as before
    images: int  # that counted, over all ranks: those of the window without the damaged ones


def train_window(
    state: TrainState,
    gradients: distributed.GradientSum,
    rules: StepRules,
    window: Window,
    micro_batches: Iterable[Batch],
    rates: Rates,
) -> StepReport:
    """Take the optimizer step of a window.

    `micro_batches` are this rank's, in the window's order, on the device. Raises OutOfMemoryError on all ranks, with
    the state as it was, where memory ran out on any.
    """
    set_rates(state.optimizer, rates)
    statistics = Statistics(state.network)

    gradients.begin()
    run = partial(add_up, state, gradients, rules, window, micro_batches)
    sums = attempt(run) if rules.undo else run()
    gradients.finish()
    if distributed.on_any_rank(sums is None, state.device):
        statistics.back()
        raise OutOfMemoryError

    totals = distributed.sum_over_ranks(sums)  # (branches, 2 + terms)
    images, weights, terms = totals[0, 0], totals[:, 1], totals[:, 2:]
    factors = rules.normalise.after(weights, images, state.loss_scale)
    losses = (terms * factors[:, None]).sum(dim=0) / images.clamp(min=1)
    state.scaler.unscale_(state.optimizer)
    norm = finish_gradient(state, factors, rules.clip_norm)

    counted = int(images)
    if not counted:  # every image is damaged: no gradient, and no step that momentum and decay would take without one
        statistics.back()
        state.forget_unscaled()
        return StepReport(tuple(losses.tolist()), 0.0, 0.0, applied=False, images=0)
    applied = bool(torch.isfinite(norm))
    if applied and not update(state):
        statistics.back()
        raise OutOfMemoryError
    if applied:
        statistics.average()
        state.ema.update(state.network)
    else:
        statistics.back()
    state.scaler.update()
    count(state, applied, weight := float(weights.sum()))
    return StepReport(tuple(losses.tolist()), weight, float(norm), applied, counted)


def add_up(
    state: TrainState,
    gradients: distributed.GradientSum,
    rules: StepRules,
    window: Window,
    micro_batches: Iterable[Batch],
) -> Tensor:
    """Add up the gradients of a window's micro-batches; returns their sums.

    Those are (branches, 2 + terms): images, target weights, loss terms.

    No rank waits for another here (but in SyncBatchNorm), so that one may fail and still answer afterwards.
    """
    sums = []
    for number, batch in enumerate(micro_batches, start=1):
        if number == window.accumulate:
            gradients.send_as_they_come()
        with statistics_of(state.network, batch):
            with state.precision.autocast(), rules.keeping():
                predictions = state.network(batch.network_input())
            branches = rules.criterion(predictions, batch)
            shares = [rules.normalise.before(one.weight, len(batch.samples), state.loss_scale) for one in branches]
            loss = sum(branch.total * share for branch, share in zip(branches, shares, strict=True))
            state.scaler.scale(loss).backward()
        images = branches[0].weight.new_full((1,), len(batch.samples))
        rows = [
            torch.cat((images, one.weight[None], one.terms * share))
            for one, share in zip(branches, shares, strict=True)
        ]
        sums.append(torch.stack(rows))
    return torch.stack(sums).sum(dim=0)


def finish_gradient(state: TrainState, factors: Tensor, clip_norm: float) -> Tensor:
    """Multiply each branch's gradients by its factor, then clip all of them together, once. Returns the norm before."""
    gradients = []
    for parameters, factor in zip(state.network.branches(), factors, strict=True):
        branch = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(branch, factor)
        gradients += branch
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def update(state: TrainState) -> bool:
    """Take the optimizer's step; False, with everything as it was, where memory ran out on any rank."""
    undo = attempt(lambda: Undo(state.optimizer))
    done = undo is not None and attempt(lambda: [state.scaler.step(state.optimizer)])
    if not distributed.on_any_rank(not done, state.device):
        return True
    if undo is not None:
        undo.back()
    state.forget_unscaled()
    return False


def count(state: TrainState, applied: bool, weight: float) -> None:
    """Take a finished step into the state's counters."""
    state.step += applied
    state.skipped += not applied
    state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1
    if math.isfinite(weight):
        state.loss_scale = 2.0 ** round(math.log2(max(weight, 1.0)))


def statistics_of(network: nn.Module, batch: Batch) -> AbstractContextManager[None]:
    """A context in which norm layers learn from the batch, or leave their statistics alone if it is blank."""
    return nullcontext() if len(batch.samples) else norms_at_rest(network)
