"""Optimizers, their parameter groups, and what `optimizer: auto` chooses."""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from detector.config import Settings
from detector.step.statistics import NORMS


class Choice(NamedTuple):
    """What the settings come to."""

    optimizer: str  # SGD or AdamW
    lr0: float
    momentum: float
    warmup_bias_lr: float


class Rates(NamedTuple):
    """What one step runs at."""

    lr: float
    bias_lr: float
    momentum: float


def choose(settings: Settings, steps: int, classes: int) -> Choice:
    """The optimizer of a run. `auto`: SGD at 0.01 for runs of over 10,000 steps, else AdamW at 0.01 / (4 + classes).

    steps: the run's optimizer steps at the nominal window. An lr0 or momentum that the user wrote always wins.
    """
    written = settings.model_fields_set
    name, lr0, momentum = settings.optimizer, settings.lr0, settings.momentum
    if name == "auto":
        long = steps > 10_000
        name = "SGD" if long else "AdamW"
        lr0 = lr0 if "lr0" in written else 0.01 if long else round(0.01 / (4 + classes), 6)
        momentum = momentum if "momentum" in written else 0.9
    return Choice(name, lr0, momentum, settings.warmup_bias_lr if name == "SGD" else 0.0)


def parameter_groups(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters as `weights` (decayed), `norms` and `biases` (not decayed)."""
    groups: dict[str, list[nn.Parameter]] = {"weights": [], "norms": [], "biases": []}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                kind = "biases" if name.endswith("bias") else "norms" if isinstance(module, NORMS) else "weights"
                groups[kind].append(parameter)
    return groups


def build_optimizer(network: nn.Module, choice: Choice, decay: float) -> torch.optim.Optimizer:
    """The optimizer over a network's groups; rates are set before each step by `set_rates`."""
    groups = [
        {"params": parameters, "name": name} for name, parameters in parameter_groups(network).items() if parameters
    ]
    if choice.optimizer == "SGD":
        optimizer = torch.optim.SGD(groups, lr=choice.lr0, momentum=choice.momentum, nesterov=choice.momentum > 0)
    else:
        optimizer = torch.optim.AdamW(groups, lr=choice.lr0, betas=(choice.momentum, 0.999))
    set_decay(optimizer, decay)
    return optimizer


def set_decay(optimizer: torch.optim.Optimizer, decay: float) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = decay if group["name"] == "weights" else 0.0


class Undo:
    """What an optimizer's step can change, copied, to put it back."""

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors += [value for state in self.states.values() for value in state.values() if isinstance(value, Tensor)]
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)  # AdamW counts on the CPU, whatever it trains
        for tensor in tensors:
            by_device[tensor.device].append(tensor)
        # Times one is exact, and a few kernels for all tensors where a clone is one for each.
        self.before = [(group, torch._foreach_mul(group, 1.0)) for group in by_device.values()]

    @torch.no_grad()
    def back(self) -> None:
        """Put everything back, also to an optimizer that had no state yet."""
        for group, before in self.before:
            torch._foreach_copy_(group, before)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.states)


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rates.bias_lr if group["name"] == "biases" else rates.lr
        if "betas" in group:
            group["betas"] = (rates.momentum, group["betas"][1])
        else:
            group["momentum"] = rates.momentum
