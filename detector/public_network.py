"""What the network of a public checkpoint says of itself: weights, names, and a description to build it again from.

Most of it stands in its layer list. What the list does not say is read from the objects: with the same list and the
same tensors, versions of the public trainer built different networks.
"""

from collections.abc import Iterator
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

from torch import Tensor

from detector.errors import CheckpointError

UNCAPPED = 10**6  # channels: for layer lists from before there was a cap
DEPTHWISE = {"C3k2", "A2C2f", "C2fCIB", "v10Detect"}  # with one of these the class branch has depthwise layers
INSIDE = 32  # deepest that modules are in each other


class Record:
    """An object of a class that is not here: what a file says of it, as plain attributes."""

    def __init__(self, *values: object):
        self.values = values  # of objects that are written as a call

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # of objects that write theirs in a form of their own, as numpy's do
            self.state = state


class Held(NamedTuple):
    """What a network object holds."""

    weights: dict[str, Tensor]  # fp32, by the names of the state dict
    description: dict[str, Any]
    names: list[str]
    activations: dict[str, str]  # what follows each convolution with a norm, by its name; "Identity": nothing
    strides: list[int]  # of the levels, pixels


def read(network: Record) -> Held:
    """Everything that is needed of a network. Raises CheckpointError, without the file's name, for what is not read."""
    description = _layer_list(network)
    rows = [*description["backbone"], *description["head"]]
    layers = list(_children(_children(network).get("model")).values())
    if len(layers) != len(rows):
        raise CheckpointError(f"has {len(layers)} layers, and {len(rows)} in its layer list: the network was altered")
    modules = dict(_modules(network, ""))
    tensors = dict(_tensors(modules))
    if not any(name.endswith(".bn.weight") for name in tensors):
        raise CheckpointError("a fused network, without the norms that were folded into it; take the file from before")
    for row, layer in zip(rows, layers, strict=True):
        if row[2] == "SPPF":
            row[3] = _sppf(row[3], layer)
    description |= _head_of(layers[-1], {row[2] for row in rows})
    followers = {name: _children(module)["act"] for name, module in modules.items() if "act" in _children(module)}
    if activation := _activation(followers):
        description["activation"] = activation
    strides = getattr(network, "stride", None)
    return Held(
        weights={name: one.float() if one.is_floating_point() else one for name, one in tensors.items()},
        description=description,
        names=_names(network, description["nc"]),
        activations={name: _kind(act) for name, act in followers.items()},
        strides=strides.int().flatten().tolist() if isinstance(strides, Tensor) else [],
    )


# --- the tree of modules ---------------------------------------------------------------------------------------------


def _children(module: object) -> dict[str, Record]:
    found = getattr(module, "_modules", None)
    return {name: one for name, one in found.items() if isinstance(one, Record)} if isinstance(found, dict) else {}


def _modules(module: Record, name: str, depth: int = 0) -> Iterator[tuple[str, Record]]:
    """A module and all that are in it, in the order of the state dict."""
    if depth > INSIDE:
        raise CheckpointError("has modules that are inside themselves: damaged")
    yield name, module
    for key, one in _children(module).items():
        yield from _modules(one, f"{name}.{key}" if name else key, depth + 1)


def _tensors(modules: dict[str, Record]) -> Iterator[tuple[str, Tensor]]:
    """The state dict: parameters and buffers of each module, without the caches that are not part of it."""
    for name, module in modules.items():
        caches = getattr(module, "_non_persistent_buffers_set", ())
        for key, value in [*_members(module, "_parameters"), *_members(module, "_buffers")]:
            if isinstance(value, Tensor) and key not in caches:
                yield f"{name}.{key}", value.detach()


def _members(module: object, kind: str) -> list[tuple[str, Any]]:
    found = getattr(module, kind, None)
    return list(found.items()) if isinstance(found, dict) else []


def _kind(module: object) -> str:
    return type(module).__name__


# --- the description -------------------------------------------------------------------------------------------------


def _layer_list(network: Record) -> dict[str, Any]:
    """The description as far as the layer list goes, in plain data of our own."""
    given = _plain(getattr(network, "yaml", None))
    if not isinstance(given, dict) or not all(_is_list_of_rows(given.get(part)) for part in ("backbone", "head")):
        raise CheckpointError("a network without a layer list ('yaml'), which cannot be built again")
    scales, scale = given.get("scales"), given.get("scale")
    if not scales:
        scales = {"": [given.get("depth_multiple", 1.0), given.get("width_multiple", 1.0), UNCAPPED]}
    file, channels = given.get("yaml_file"), given.get("channels", given.get("ch", 3))
    return {
        **({} if channels == 3 else {"channels": channels}),
        "name": PureWindowsPath(file).stem if isinstance(file, str) and file else "a public model",
        "scales": scales,
        "scale": scale if scale in scales else next(iter(scales)),
        "backbone": given["backbone"],
        "head": given["head"],
    }


def _plain(value: object) -> Any:
    """A copy of what is plain data, through all depths; what is not is left out."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if isinstance(key, str | int)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float) else None


def _is_list_of_rows(part: object) -> bool:
    return isinstance(part, list) and all(isinstance(row, list) and len(row) == 4 for row in part)


def _sppf(arguments: Any, layer: Record) -> list[Any]:
    """An SPPF's arguments with all that its row may leave open: [channels, kernel, pools, shortcut, activation].

    Whether an activation follows its first convolution changed between versions, and no tensor tells.
    """
    first = _children(layer).get("cv1")
    if _kind(layer) != "SPPF" or first is None or not isinstance(arguments, list) or not arguments:
        raise CheckpointError(
            f"layer {getattr(layer, 'i', '')} is not the SPPF of its layer list: the network was altered"
        )
    kernel = arguments[1] if len(arguments) > 1 else 5
    active = _kind(_children(first).get("act")) != "Identity"
    return [arguments[0], kernel, getattr(layer, "n", 3), bool(getattr(layer, "add", False)), active]


def _head_of(head: Record, modules: set[str]) -> dict[str, Any]:
    """What the head itself says: classes, bins, and whether it has two branches."""
    inside = _children(head)
    box, classes = (list(_children(inside.get(name)).values()) for name in ("cv2", "cv3"))
    if not box or not classes:
        raise CheckpointError(f"ends in {_kind(head)}, which has no box and class branch; only Detect is read")
    if (_kind(next(iter(_children(classes[0]).values()))) == "Sequential") != bool(modules & DEPTHWISE):
        raise CheckpointError(
            "has a class branch of another kind than its layer list asks for: the network was altered"
        )
    nc, width = _last(classes[0]).shape[:2]
    said = {"nc": nc, "reg_max": len(_last(box[0])) // 4, "end2end": "one2one_cv3" in inside}
    # The width follows from the classes that the network was first built for, which need not be those of now.
    return said if width == max(_inputs(box[0]), min(nc, 100)) else {**said, "class_channels": width}


def _inputs(branch: Record) -> int:
    """Channels that a branch reads: those of its first convolution with a norm."""
    first = _children(next(iter(_children(branch).values()))).get("conv")
    return _weight(first).shape[1]


def _last(branch: Record) -> Tensor:
    """The weight of the convolution that a branch ends in."""
    return _weight(list(_children(branch).values())[-1])


def _weight(module: object) -> Tensor:
    weight = dict(_members(module, "_parameters")).get("weight")
    if not isinstance(weight, Tensor) or weight.ndim != 4:
        raise CheckpointError("has a head whose branches are not made of convolutions: the network was altered")
    return weight


def _activation(followers: dict[str, Record]) -> str | None:
    """The text of the one activation, `torch.nn.ReLU()`; None: SiLU. CheckpointError where there are several."""
    active = {name: act for name, act in followers.items() if _kind(act) != "Identity"}
    texts = {_text(act): name for name, act in active.items()}
    if len(texts) > 1:
        (one, here), (other, there) = list(texts.items())[:2]
        raise CheckpointError(f"has {one} at {here} and {other} at {there}; one activation throughout is read")
    text = next(iter(texts), None)
    return None if text == "torch.nn.SiLU()" else text


def _text(act: Record) -> str:
    """An activation as it is written in a description."""
    said = {key: value for key, value in vars(act).items() if key in ("negative_slope", "alpha")}
    values = ", ".join(f"{key}={value}" for key, value in said.items() if isinstance(value, int | float))
    return f"torch.nn.{_kind(act)}({values})"


def _names(network: Record, nc: int) -> list[str]:
    """The classes' names in the order of their numbers."""
    given = getattr(network, "names", None)
    if isinstance(given, list | tuple):
        given = dict(enumerate(given))
    if not isinstance(given, dict) or sorted(given, key=str) != sorted(range(nc), key=str):
        raise CheckpointError(f"has {nc} classes and other names for them: {given!r:.100}")
    return [str(given[number]) for number in range(nc)]
