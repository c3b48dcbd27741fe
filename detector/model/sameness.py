"""Whether two networks compute the same function of their weights, whatever their class counts.

Tensors of equal names and shapes are not enough for that: strides, shortcuts and activations are in no tensor.
"""

import copy
from typing import Any

import torch
from torch import nn

from detector.model.blocks.pooling import SPPF
from detector.model.network import Network

# What may differ: how a network is used, and what follows from the number of classes and the shapes of weights.
ASIDE = {"training", "nc", "rerun", "nms", "in_channels", "out_channels", "num_features", "groups"}


def adopted(description: dict[str, Any], other: Network) -> tuple[dict[str, Any], list[str]]:
    """The description, with what no model name says taken from a network of that model; and what was taken, in words.

    That is whether an SPPF has an activation, and how wide the class branches are: the first depends on which program
    made the network, the second on the classes that it was first trained for.
    """
    notes: list[str] = []
    description = copy.deepcopy(description)
    with torch.device("meta"):
        network = Network(description)
    rows = [*description["backbone"], *description["head"]]
    for row, ours, theirs in zip(rows, network.model, other.model, strict=False):
        if isinstance(ours, SPPF) and isinstance(theirs, SPPF) and is_active(ours.cv1) != is_active(theirs.cv1):
            row[3] = [row[3][0], ours.kernel, ours.pools, ours.add, is_active(theirs.cv1)]
            notes.append(f"its SPPF with{'' if is_active(theirs.cv1) else 'out'} activation")
    own, width = (getattr(one.head, "class_channels", None) for one in (network, other))
    if own and width and own != width:
        description["class_channels"] = width
        notes.append(f"its class branches of {width} channels")
    return description, notes


def is_active(module: nn.Module) -> bool:
    """Whether an activation follows a convolution."""
    return module.activation is not None


def difference(network: Network, other: Network) -> str | None:
    """What is not the same in two networks apart from their classes, in words; None where they are the same."""
    ours, theirs = network.state_dict(), other.state_dict()
    outputs = tuple(f"{name}." for name, module in network.named_modules() if module in network.head.class_outputs)
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in theirs or key not in ours:
            return f"'{key}' is only {'here' if key in ours else 'there'}"
        start = 1 if key.startswith(outputs) else 0  # the rows of these are the classes
        if ours[key].shape[start:] != theirs[key].shape[start:]:
            return f"'{key}' does not fit: {list(theirs[key].shape)} for {list(ours[key].shape)}"
    if sources(network.description) != sources(other.description):
        return "its layers read other layers"
    modules = dict(other.named_modules())
    for name, module in network.named_modules():
        mine, its = traits(module), traits(modules[name])
        for key in sorted(mine.keys() | its.keys()):
            if mine.get(key) != its.get(key):
                return f"'{name}' has {key} {its.get(key)}, not {mine.get(key)}"
    return None


def sources(description: dict[str, Any]) -> list[list[int]]:
    """The numbers of the layers that each layer reads."""
    rows = [*description["backbone"], *description["head"]]
    read = [row[0] if isinstance(row[0], list) else [row[0]] for row in rows]
    return [[one if one >= 0 else one + index for one in some] for index, some in enumerate(read)]


def traits(module: nn.Module) -> dict[str, Any]:
    """What a module computes by beside its tensors."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str | tuple)}
    own = {key: value for key, value in plain.items() if not key.startswith("_") and key not in ASIDE}
    if hasattr(module, "activation"):
        function, given = (
            getattr(module.activation, "func", module.activation),
            getattr(module.activation, "keywords", {}),
        )
        own["activation"] = function and (function.__name__, given)
    return own
