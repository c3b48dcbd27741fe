"""A step that fails is a step that was never begun: what it may change, kept aside to be put back."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from detector.step.state import TrainState
from detector.step.statistics import Statistics


@contextmanager
def undone_on_failure(state: TrainState) -> Iterator["Undo"]:
    """A context around a step, which puts everything back where an error leaves it."""
    undo = Undo(state)
    try:
        yield undo
    except Exception:
        undo.back()
        raise


class Undo:
    """What a step can change, as it was: running statistics from the start, the rest once it is about to change."""

    def __init__(self, state: TrainState):
        self.state = state
        self.statistics = Statistics(state.network)
        self.weights: Weights | None = None

    def remember_weights(self) -> None:
        """Copy what the optimizer's step and the EMA's update change."""
        self.weights = Weights(self.state)

    def back(self) -> None:
        self.statistics.back()
        if self.weights is not None:
            self.weights.back()
        self.state.forget_unscaled()


class Weights:
    """Weights, optimizer state and EMA, copied."""

    @torch.no_grad()
    def __init__(self, state: TrainState):
        self.optimizer, self.ema, self.steps = state.optimizer, state.ema, state.ema.steps
        self.states = {parameter: dict(one) for parameter, one in self.optimizer.state.items()}
        tensors = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        tensors += [value for one in self.states.values() for value in one.values() if isinstance(value, Tensor)]
        tensors += self.ema.network.state_dict().values()
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in tensors:  # AdamW counts on the CPU, whatever it trains
            alike[tensor.device, tensor.dtype].append(tensor)
        # Times one is exact, and a few kernels for all tensors where a clone is one for each.
        self.before = [(group, torch._foreach_mul(group, 1)) for group in alike.values()]

    @torch.no_grad()
    def back(self) -> None:
        """Put everything back, also to an optimizer that had no state yet."""
        for group, before in self.before:
            torch._foreach_copy_(group, before)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.states)
        self.ema.steps = self.steps
