"""The exponential moving average of a network's weights."""

import copy

import torch
from torch import nn

from detector.step.schedule import ema_decay


class Ema:
    """A second network, fp32, whose floating tensors (BatchNorm statistics included) follow the trained ones'.

    It is what is validated and exported. Nobody casts or trains it in place. `tau`: how fast its decay grows, see
    `ema_decay`.
    """

    def __init__(self, network: nn.Module, tau: float | None = None):
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.steps = 0
        self.tau = tau

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Take one applied optimizer step into the average; tensors that are not floating are copied."""
        self.steps += 1
        weight = 1 - ema_decay(self.steps, self.tau)
        averages, values = [], []
        for average, value in zip(self.network.state_dict().values(), network.state_dict().values(), strict=True):
            if average.dtype.is_floating_point:
                averages.append(average)
                values.append(value.detach())
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, weight)
