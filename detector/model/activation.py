"""Activations by the text that model descriptions write, such as `torch.nn.LeakyReLU(0.1)`; nothing is evaluated."""

import re
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from detector.errors import ConfigError

# torch.nn's name: the function that does the same, with its parameters by torch.nn's names
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SiLU": F.silu,
    "ReLU": F.relu,
    "ReLU6": F.relu6,
    "LeakyReLU": F.leaky_relu,
    "ELU": F.elu,
    "SELU": F.selu,
    "CELU": F.celu,
    "Hardswish": F.hardswish,
    "Hardsigmoid": F.hardsigmoid,
    "Mish": F.mish,
}
PARAMETERS = {"LeakyReLU": "negative_slope", "ELU": "alpha", "CELU": "alpha"}


_CALL = re.compile(r"(?:torch\.)?(?:nn\.)?(\w+)\(([^()]*)\)")  # a name and its arguments


def activation(text: str, place: str = "activation") -> Callable[..., Tensor]:
    """The function of a text; it takes `inplace`, whatever the text says of that. Raises ConfigError."""
    called = _CALL.fullmatch(text.strip())
    name = called[1] if called else ""
    if name not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise ConfigError(f"{place} {text!r} is not one of torch.nn's {known}, written as torch.nn.ReLU()")
    numbers: dict[str, float] = {}
    for argument in filter(None, (one.strip() for one in called[2].split(","))):
        key, _, value = argument.rpartition("=")
        if key.strip() == "inplace" or value.strip() in ("True", "False"):
            continue
        if name not in PARAMETERS or key.strip() not in ("", PARAMETERS[name]) or not _is_number(value):
            raise ConfigError(f"{place} {text!r}: {name} takes {PARAMETERS.get(name, 'no number')}, not {argument}")
        numbers[PARAMETERS[name]] = float(value)
    return partial(FUNCTIONS[name], **numbers) if numbers else FUNCTIONS[name]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def set_activation(network: nn.Module, function: Callable[..., Tensor]) -> None:
    """Give all modules that have an activation this one."""
    for module in network.modules():
        if getattr(module, "activation", None) is not None:
            module.activation = function
