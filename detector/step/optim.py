"""Optimizers, their parameter groups, and what `optimizer: auto` chooses."""

from typing import NamedTuple

import torch
from torch import nn

from detector.step.schedule import Gains, Rates
from detector.step.statistics import NORMS


class Choice(NamedTuple):
    """An optimizer and its rates."""

    optimizer: str  # SGD or AdamW
    lr0: float
    momentum: float  # SGD's, or Adam's first beta


def choose(optimizer: str, steps: int, classes: int, lr0: float | None = None, momentum: float | None = None) -> Choice:
    """The optimizer of a run. `auto`: SGD at 0.01 for runs of over 10,000 steps, else AdamW at 0.01 / (4 + classes).

    steps: the run's optimizer steps at the nominal window. With `auto`, an lr0 or momentum that is None is chosen, too.
    """
    if optimizer != "auto":
        assert lr0 is not None
        assert momentum is not None
        return Choice(optimizer, lr0, momentum)
    long = steps > 10_000
    chosen = 0.01 if long else round(0.01 / (4 + classes), 6)
    return Choice("SGD" if long else "AdamW", chosen if lr0 is None else lr0, 0.9 if momentum is None else momentum)


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


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates | None) -> Gains | None:
    """Give each parameter group its rate of the moment; returns the gains of the loss terms. None changes nothing."""
    if rates is None:
        return None
    for group in optimizer.param_groups:
        group["lr"] = rates.lr[group["name"]]
        if "betas" in group:
            group["betas"] = (rates.momentum, group["betas"][1])
        else:
            group["momentum"] = rates.momentum
    return rates.gains
