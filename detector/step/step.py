"""THE HEART: one window in, one update out. Gradient accumulation that is exact.

A step is the gradient of one big batch, however the batch is cut. The loss of a window of n images is n * S / N: S the
terms summed over its images, N its target weight. N carries no gradient, so the gradients of the micro-batches' sums
add up exactly, and one multiplication at the end, when N is known over all micro-batches and ranks, makes the step's
gradient. Dividing earlier, by each micro-batch's own N, is what makes accumulation approximate elsewhere.

Accumulate 1, one GPU, many GPUs, CPU, fp16, bf16 and fp32 run through the same lines. Nothing here knows what is
detected, or that it is a detector: see `StepRules`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from detector import distributed
from detector.step.gradients import GradientSum
from detector.step.optim import set_rates
from detector.step.pipeline import Pipeline
from detector.step.plan import Window
from detector.step.schedule import Rates
from detector.step.state import TrainState
from detector.step.statistics import norms_at_rest
from detector.step.undo import undone_on_failure
from detector.step.weighting import BY_WINDOW, Weighting, branches_of


class LossSums(Protocol):
    """The loss of one branch of a network over one micro-batch: sums over its images, divided by nothing."""

    terms: Tensor  # (T,) the loss terms, with gradient
    weight: Tensor  # scalar without gradient: what the sums of a whole window are divided by


class Sums(NamedTuple):
    """`LossSums` as a value."""

    terms: Tensor
    weight: Tensor


@dataclass(frozen=True)
class StepRules:
    """What stays the same from step to step, for any network and any kind of batch.

    `forward(network, batch)` runs under autocast; `criterion(outputs, batch)` turns what it returned into one
    `LossSums` for each branch of the network; `images(batch)` is how many images of the batch count.
    """

    criterion: Callable[[Any, Any], Sequence[LossSums]]
    forward: Callable[[nn.Module, Any], Any] = lambda network, batch: network(batch.network_input())
    images: Callable[[Any], int] = lambda batch: len(batch.samples)
    clip_norm: float = float("inf")  # largest norm of a step's gradient
    weighting: Weighting = BY_WINDOW
    keeping: Callable[[], AbstractContextManager[None]] = nullcontext  # where activations wait, see offload.py
    apart: bool = True  # whether ranks run alone until gradients are summed; not with SyncBatchNorm
    pipeline: Pipeline | None = None  # where other processes run other layers of the network


class StepReport(NamedTuple):
    """What a step did. The losses are what was optimised: the window's sums per target weight, over all ranks."""

    losses: tuple[float, ...]  # one a term, times its gain
    weight: float  # the window's target weight
    norm: float  # of the gradient before clipping
    applied: bool  # False: not finite, or of no images; weights, EMA and optimizer are as before
    images: int  # that counted, over all ranks: those of the window without the damaged ones


def train_window(
    state: TrainState,
    gradients: GradientSum,
    rules: StepRules,
    window: Window,
    micro_batches: Iterable[Any],
    rates: Rates | None = None,
) -> StepReport:
    """Take the optimizer step of a window.

    `micro_batches` are this rank's, in the window's order, on the device; without `rates` the optimizer keeps its own.
    Gradient clipping, loss scaling and EMA come once a step. Raises OutOfMemoryError on all ranks, with the state as it
    was, where memory ran out on any.
    """
    gains = set_rates(state.optimizer, rates)
    with undone_on_failure(state) as undo:
        with distributed.together(state.device, rules.apart), gradients.summed(rules.apart):
            sums = add_up(state, gradients, rules, window, micro_batches, gains)
        images, weights, terms = distributed.sum_over_ranks(sums).split((1, 1, sums.shape[1] - 2), dim=1)
        undo.statistics.average(rules.pipeline)

        with distributed.together(state.device):
            factors = rules.weighting.after(weights[:, 0], images[0], state.loss_scale)
            losses = (terms * factors[:, None]).sum(dim=0) / images[0].clamp(min=1)
            state.scaler.unscale_(state.optimizer)
            norm = finish_gradient(state, factors, rules.clip_norm)
            counted, weight, size, *told = on_host(images[0, 0], weights.sum(), norm, *losses)
            if applied := math.isfinite(size) and counted > 0:
                undo.remember_weights()
                state.scaler.step(state.optimizer)
                state.ema.update(state.network)
            else:
                undo.statistics.back()
            state.scaler.update()
    if counted:  # else every image is damaged: no step was tried
        state.count(applied, weight)
    return StepReport(tuple(told), weight, size, applied, int(counted))


def on_host(*numbers: Tensor) -> list[float]:
    """Numbers of the device: the one time in a window that it is waited for, so that the host runs ahead of it."""
    return torch.stack([number.to(numbers[0].dtype) for number in numbers]).tolist()


def add_up(
    state: TrainState,
    gradients: GradientSum,
    rules: StepRules,
    window: Window,
    micro_batches: Iterable[Any],
    gains: Sequence[Sequence[float]] | None,
) -> Tensor:
    """Accumulate the gradients of a window's micro-batches; ranks sum them, in gradient buckets, in the last alone.

    Returns (branches, 2 + terms) sums: images, target weights and loss terms. No rank waits here for another that fails
    (but in SyncBatchNorm), so that one may fail and still answer afterwards.
    """
    passes = Passes(state, rules, gains)
    if rules.pipeline:
        rules.pipeline.run(state.network, iter(micro_batches), window.accumulate, passes)
        return passes.nothing(rules.pipeline.terms) if passes.total is None else passes.total
    for number, batch in enumerate(micro_batches, start=1):
        if number == window.accumulate:
            gradients.send_as_they_come()
        with passes.at_rest(batch):
            with passes.running():
                outputs = rules.forward(state.network, batch)
            passes.loss(outputs, batch).backward()
    return passes.total


class Passes:
    """What the passes of a window's micro-batches have in common, and the sums that they came to."""

    def __init__(self, state: TrainState, rules: StepRules, gains: Sequence[Sequence[float]] | None):
        self.state, self.rules, self.gains = state, rules, gains
        self.total: Tensor | None = None  # (branches, 2 + terms)

    def at_rest(self, batch: Any) -> AbstractContextManager[None]:
        """A context for both passes of a micro-batch: where it has no image, norm layers learn nothing from it."""
        return nullcontext() if self.rules.images(batch) else norms_at_rest(self.state.network)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for the network's forward pass."""
        with self.state.precision.autocast(), self.rules.keeping():
            yield

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """What the backward pass of a micro-batch begins with; its sums are added to the total."""
        images, rules = self.rules.images(batch), self.rules
        branches = rules.criterion(outputs, batch)
        rows, loss = [], 0.0
        for branch, gain in zip(branches, self.gains or [None] * len(branches), strict=True):
            share = rules.weighting.before(branch.weight, images, self.state.loss_scale)
            terms = gained(branch.terms, gain)
            loss = loss + terms.sum() * share
            counted = branch.weight.new_full((), images)
            rows.append(torch.cat((counted[None], branch.weight[None], terms.detach() * share)))
        sums = torch.stack(rows)
        self.total = sums if self.total is None else self.total + sums
        return self.state.scaler.scale(loss)

    def nothing(self, terms: int) -> Tensor:
        """The sums of a process that has run no loss."""
        weight = next(self.state.network.parameters())
        sums = weight.new_zeros(len(branches_of(self.state.network)), 2 + terms)
        self.state.scaler.scale(sums)  # whose first call it must have had
        return sums


def gained(terms: Tensor, gains: Sequence[float] | None) -> Tensor:
    """(T,) terms times their gains; None: all are 1."""
    return terms if gains is None else torch.stack([one * gain for one, gain in zip(terms, gains, strict=True)])


def finish_gradient(state: TrainState, factors: Tensor, clip_norm: float) -> Tensor:
    """Multiply each branch's gradients by its factor, then clip all together, once, to `clip_norm`.

    Returns the norm before.
    """
    gradients = []
    for parameters, factor in zip(branches_of(state.network), factors, strict=True):
        branch = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(branch, factor)
        gradients += branch
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
