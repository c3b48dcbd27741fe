"""THE HEART: one window in, one update out.

A step is the gradient of one big batch, however the batch is cut. The loss of a window of n images is n * S / N: S the
terms summed over its images, N its target weight. N carries no gradient, so the gradients of the micro-batches' sums
add up exactly, and one multiplication at the end, when N is known over all micro-batches and ranks, makes the step's
gradient. Dividing earlier, by each micro-batch's own N, is what makes accumulation approximate elsewhere.

Accumulate 1, one GPU, many GPUs, CPU, fp16, bf16 and fp32 run through the same lines.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from detector import distributed
from detector.data.batch import Batch
from detector.loss.criterion import DetectionLoss
from detector.training.optim import Rates, set_rates
from detector.training.plan import Window
from detector.training.precision import Precision
from detector.training.state import TrainState


class StepReport(NamedTuple):
    """What a step did. The losses are what was optimised: the window's sums per target weight, over all ranks."""

    losses: tuple[float, ...]  # box, cls, dfl
    weight: float  # the window's target weight
    norm: float  # of the gradient before clipping
    applied: bool  # False: the gradient was not finite, and weights, EMA and optimizer are as before


def train_window(
    state: TrainState,
    criterion: DetectionLoss,
    window: Window,
    micro_batches: Iterable[Batch],
    rates: Rates,
    precision: Precision,
    clip_norm: float,
) -> StepReport:
    """Take the optimizer step of a window. `micro_batches` are this rank's, in the window's order, on the device."""
    set_rates(state.optimizer, rates)
    state.optimizer.zero_grad(set_to_none=True)
    images, sums = window.images, []
    for number, batch in enumerate(micro_batches, start=1):
        with distributed.gradient_sync(state.network, number == window.accumulate):
            with precision.autocast():
                predictions = state.network(batch.network_input())
            branches = criterion(predictions, batch)
            # Divided by a constant, only to keep the numbers in fp16's range; undone below.
            state.scaler.scale(sum(branch.total for branch in branches) / images).backward()
        sums.append(torch.stack([torch.cat((branch.weight[None], branch.terms)) for branch in branches]))

    totals = distributed.sum_over_ranks(torch.stack(sums).sum(dim=0))  # (branches, 1 + terms)
    weights = totals[:, 0].clamp(min=1.0)
    state.scaler.unscale_(state.optimizer)
    norm = normalise(state, images * images * distributed.world_size() / weights, clip_norm)

    applied = bool(torch.isfinite(norm))
    if applied:
        state.scaler.step(state.optimizer)
        state.ema.update(state.network)
    state.scaler.update()
    state.step += applied
    state.skipped += not applied
    state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1
    losses = (totals[:, 1:] / weights[:, None]).sum(dim=0)
    return StepReport(tuple(losses.tolist()), float(totals[:, 0].sum()), float(norm), applied)


def normalise(state: TrainState, factors: Tensor, clip_norm: float) -> Tensor:
    """Multiply each branch's gradients by its factor, then clip all of them together, once. Returns the norm before."""
    gradients = []
    for parameters, factor in zip(state.network.branches(), factors, strict=True):
        branch = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(branch, factor)
        gradients += branch
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
