"""Optimizers, their parameter groups, and what `optimizer: auto` chooses."""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from detector.step.eager import SGD, AdamW
from detector.step.musgd import MuSGD
from detector.step.schedule import GROUPS, Gains, Rates
from detector.step.statistics import NORMS

LONG = 10_000  # iterations of a run beyond which the public trainer takes MuSGD
BIAS_LR = 0.1  # where warmup starts the biases, for an optimizer with a momentum that was asked for by name
DECAYED = ("muon", "weights", "fast muon", "fast weights")
FUSED = ("cuda",)  # devices on which one kernel takes a whole step; on a CPU it would save milliseconds of seconds


class Choice(NamedTuple):
    """An optimizer and its rates."""

    optimizer: str  # SGD, MuSGD or AdamW
    lr0: float
    momentum: float  # SGD's, or Adam's first beta
    warmup_bias_lr: float = 0.0


def choose(
    optimizer: str,
    gentle: bool,
    classes: int,
    lr0: float | None = None,
    momentum: float | None = None,
    warmup_bias_lr: float | None = None,
) -> Choice:
    """The optimizer of a run. `auto`: MuSGD at 0.01 or, if it is to be gentle, AdamW at 0.01 / (4 + classes).

    What is None is chosen, too: with `auto` all of them, and warmup_bias_lr for any optimizer, 0.1 but for AdamW and
    `auto`, where it is 0.
    """
    if optimizer != "auto":
        assert lr0 is not None
        assert momentum is not None
        start = 0.0 if optimizer == "AdamW" else BIAS_LR
        return Choice(optimizer, lr0, momentum, start if warmup_bias_lr is None else warmup_bias_lr)
    chosen = round(0.01 / (4 + classes), 6) if gentle else 0.01
    return Choice(
        "AdamW" if gentle else "MuSGD",
        chosen if lr0 is None else lr0,
        0.9 if momentum is None else momentum,
        0.0 if warmup_bias_lr is None else warmup_bias_lr,
    )


def parameter_groups(
    network: nn.Module, muon: bool = False, fast: Collection[nn.Parameter] = ()
) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters as `weights` (decayed), `norms` and `biases` (not decayed), each parameter once.

    With `muon`, those of 2 or 4 dimensions are a group `muon` (decayed) before all others. Those in `fast` are groups
    of their own, `fast muon` and so on, with a higher rate (`GROUPS`).
    """
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    fast_ones, seen = set(fast), set()
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            if muon and parameter.ndim in (2, 4):
                kind = "muon"
            else:
                kind = "biases" if "bias" in name else "norms" if isinstance(module, NORMS) else "weights"
            groups[f"fast {kind}" if parameter in fast_ones else kind].append(parameter)
    return groups


def build_optimizer(
    network: nn.Module, choice: Choice, decay: float, fast: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer over a network's groups; rates are set before each step by `set_rates`.

    fast: the parameters that MuSGD moves faster; to other optimizers they are like the rest.
    """
    muon = choice.optimizer == "MuSGD"
    groups: list[dict[str, Any]] = [
        {"params": parameters, "name": name}
        for name, parameters in parameter_groups(network, muon, fast if muon else ()).items()
        if parameters
    ]
    fused = fused_where_it_pays(parameter for group in groups for parameter in group["params"])
    if muon:
        for group in groups:
            group["muon"] = group["name"].endswith("muon")
        optimizer: torch.optim.Optimizer = MuSGD(groups, choice.lr0, choice.momentum, fused)
    elif choice.optimizer == "AdamW":
        optimizer = AdamW(groups, lr=choice.lr0, betas=(choice.momentum, 0.999), fused=fused)
    else:
        nesterov = choice.momentum > 0
        optimizer = SGD(groups, lr=choice.lr0, momentum=choice.momentum, nesterov=nesterov, fused=fused)
    set_decay(optimizer, decay)
    return optimizer


def fused_where_it_pays(parameters: Iterable[nn.Parameter]) -> bool | None:
    """What torch's optimizers take as `fused`; None leaves it to them."""
    return all(one.device.type in FUSED and one.is_floating_point() for one in parameters) or None


def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer's state from another device's, too. Raises ValueError where it is of other parameters.

    Which kernels do the work stays as it was built, and what is of a parameter's shape is laid out in memory as the
    parameter is, which fused kernels rely on.
    """
    kernels = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in optimizer.param_groups]
    own = dict(enumerate(kernels))
    groups = [group | own.get(number, {}) for number, group in enumerate(saved["param_groups"])]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    for parameter, one in optimizer.state.items():
        for name, value in one.items():
            alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if alike and value.stride() != parameter.stride():
                one[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def set_decay(optimizer: torch.optim.Optimizer, decay: float) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = decay if group["name"] in DECAYED else 0.0


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
