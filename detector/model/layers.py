"""From the layer list of a model description to modules: the table of modules and how their arguments are read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from torch import nn

from detector.errors import ConfigError, did_you_mean
from detector.model.arguments import read_arguments
from detector.model.blocks import attention, conv, csp, elan, join, pooling, psa
from detector.model.description import check_description
from detector.model.head import Detect


class Maps(NamedTuple):
    """What a layer puts out: the channels of its feature map and the pixels of the network input per cell."""

    channels: int
    stride: Fraction


class Layer(NamedTuple):
    """A module and the numbers of the layers it reads; -1 is the image, and only layer 0 can read it."""

    module: nn.Module
    sources: tuple[int, ...]
    many: bool  # whether the module takes a list of maps
    stride: Fraction  # pixels of the network input per cell of its map


@dataclass(frozen=True)
class Site:
    """Where a layer is built: all that its arguments are read by."""

    place: str  # of the layer, for messages
    inputs: tuple[Maps, ...]
    written: int  # repeats as the description has them
    repeats: int  # after scaling by depth
    nc: int
    scale: str
    width: float
    most_channels: int
    reg_max: int
    end2end: bool
    separable: bool  # the kind of a head's class branches
    class_channels: int | None  # and their width, where it does not follow from the number of classes

    def channels(self, base: int) -> int:
        """Base channels to channels: at most `most_channels`, times width, up to a multiple of 8."""
        return math.ceil(min(base, self.most_channels) * self.width / 8) * 8

    def fail(self, message: object) -> ConfigError:
        return ConfigError(f"{self.place}: {message}")

    @property
    def input(self) -> Maps:
        """The one input of a module that reads one layer."""
        if len(self.inputs) != 1:
            raise self.fail(f"the module reads one layer, not {len(self.inputs)}; join them with Concat first")
        return self.inputs[0]


class Kind(NamedTuple):
    """A module that a description can name, and what its arguments there are.

    `scaled`: the output channels, which are scaled, and what comes after `inputs` (and `repeats`) of the module;
    `written`: all arguments of the module, of which `inputs` must be those that come in; `after`: what comes after
    `inputs`; `same`: all arguments of a module that keeps its input's channels; `joined`: those of a module that takes
    a list of maps; `predicting`: what comes after `site` of what builds a head, from the maps of `site.inputs`.
    """

    build: Callable[..., nn.Module]
    takes: Literal["scaled", "written", "after", "same", "joined", "predicting"] = "scaled"
    repeats: bool = False  # whether the repeats of a layer are units inside the module; else it is built so often
    up: bool = False  # whether its stride makes the map larger

    @property
    def hidden(self) -> tuple[str, ...]:
        """The parameters of `build` that the description does not write."""
        first = {"scaled": ("inputs",), "after": ("inputs",), "predicting": ("site",)}.get(self.takes, ())
        return (*first, "repeats") if self.repeats else first


# --- torch's own modules, by the arguments that descriptions write


def max_pool(kernel: int, stride: int | None = None, padding: int | None = 0) -> nn.Module:
    return nn.MaxPool2d(kernel, stride, padding or 0)


def zero_pad(sides: list[int]) -> nn.Module:
    return nn.ZeroPad2d(sides)


def upsample(size: None = None, factor: int = 2, mode: str = "nearest") -> nn.Module:
    if mode != "nearest":
        raise ValueError(f"takes [None, 2, nearest], not the mode {mode}")
    enlarged = nn.Upsample(scale_factor=factor, mode=mode)
    enlarged.stride = factor
    return enlarged


def identity() -> nn.Module:
    return nn.Identity()


def transposed(inputs: int, outputs: int, kernel: int = 2, stride: int = 2, padding: int | None = 0) -> nn.Module:
    return nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding or 0)


# --- heads


def detect(site: Site, nc: int, reg_max: int | None = None) -> nn.Module:
    """`reg_max` and `end2end` are keys of the description; the former may stand in the head's row instead."""
    channels, strides = zip(*site.inputs, strict=True)
    if any(stride.denominator != 1 for stride in strides):
        raise ValueError(f"reads maps of strides {', '.join(map(str, strides))}: they must be whole")
    steps, bins = [int(one) for one in strides], reg_max or site.reg_max
    return Detect(nc, channels, steps, bins, site.end2end, site.separable, site.class_channels)


def detect_v10(site: Site, nc: int) -> nn.Module:
    """Two branches, whatever the description says."""
    return detect(replace(site, end2end=True, separable=True), nc)


# Every module a description can name. The parameters of what builds it are the arguments there, in the same order.
MODULES: dict[str, Kind] = {
    "Conv": Kind(conv.Conv),
    "DWConv": Kind(conv.DWConv),
    "ConvTranspose": Kind(conv.ConvTranspose, "written", up=True),
    "Focus": Kind(conv.Focus),
    "GhostConv": Kind(conv.GhostConv),
    "RepConv": Kind(conv.RepConv, "written"),
    "RepVGGDW": Kind(conv.RepVGGDW, "same"),
    "Bottleneck": Kind(csp.Bottleneck),
    "GhostBottleneck": Kind(csp.GhostBottleneck),
    "CIB": Kind(csp.CIB, "written"),
    "C1": Kind(csp.C1, repeats=True),
    "C2": Kind(csp.C2, repeats=True),
    "C2f": Kind(csp.C2f, repeats=True),
    "C3": Kind(csp.C3, repeats=True),
    "C3k": Kind(csp.C3k, repeats=True),
    "C3x": Kind(csp.C3x, repeats=True),
    "C3k2": Kind(csp.C3k2, repeats=True),
    "C3Ghost": Kind(csp.C3Ghost, repeats=True),
    "C2fCIB": Kind(csp.C2fCIB, repeats=True),
    "BottleneckCSP": Kind(csp.BottleneckCSP, repeats=True),
    "RepC3": Kind(csp.RepC3, repeats=True),
    "RepCSP": Kind(csp.RepCSP, "written"),
    "ELAN1": Kind(elan.ELAN1),
    "RepNCSPELAN4": Kind(elan.RepNCSPELAN4),
    "AConv": Kind(pooling.AConv),
    "ADown": Kind(pooling.ADown),
    "SCDown": Kind(pooling.SCDown),
    "SPP": Kind(pooling.SPP),
    "SPPF": Kind(pooling.SPPF),
    "SPPELAN": Kind(pooling.SPPELAN),
    "PSA": Kind(psa.PSA),
    "C2PSA": Kind(psa.C2PSA, repeats=True),
    "C2fPSA": Kind(psa.C2fPSA, repeats=True),
    "ABlock": Kind(attention.ABlock, "same"),
    "A2C2f": Kind(psa.A2C2f, repeats=True),
    "nn.ConvTranspose2d": Kind(transposed, up=True),
    "nn.MaxPool2d": Kind(max_pool, "same"),
    "nn.ZeroPad2d": Kind(zero_pad, "same"),
    "nn.Upsample": Kind(upsample, "same", up=True),
    "nn.Identity": Kind(identity, "same"),
    "Concat": Kind(join.Concat, "joined"),
    "CBLinear": Kind(join.CBLinear, "after"),
    "CBFuse": Kind(join.CBFuse, "joined"),
    "Detect": Kind(detect, "predicting"),
    "v10Detect": Kind(detect_v10, "predicting"),
}
ALIASES = {"Silence": "nn.Identity"}
OTHER_TASKS = {
    "Segment": "segmentation",
    "Pose": "keypoints",
    "OBB": "oriented boxes",
    "Classify": "classification",
    "WorldDetect": "open-vocabulary detection",
    "RTDETRDecoder": "a transformer's detection",
}
LARGE = ("m", "l", "x")  # scales at which every C3k2 is built of C3k units, whatever its arguments say
LARGEST = ("l", "x")  # at which every A2C2f is residual, with a narrower inner network
SEPARABLE = ("C3k2", "A2C2f", "C2fCIB")  # with one of them, class branches have depthwise convolutions


def build_layers(description: dict[str, Any]) -> list[Layer]:
    """The layers of a description, backbone then head; the last one is a detection head. Raises ConfigError."""
    check_description(description)
    name, scale = description.get("name", "model description"), description["scale"]
    depth, width, most_channels = description["scales"][scale]
    rows = [*description["backbone"], *description["head"]]
    layers: list[Layer] = []
    outputs: list[Maps] = []
    for index, (source, repeats, written, arguments) in enumerate(rows):
        place = f"{name}: layer {index}"
        module = known(place, written)
        if (MODULES[module].takes == "predicting") != (index == len(rows) - 1):
            heads = ", ".join(name for name, kind in MODULES.items() if kind.takes == "predicting")
            raise ConfigError(f"{place}: {module}: the last layer, and no other, is a head ({heads})")
        sources = _sources(place, source, index)
        site = Site(
            place=place,
            inputs=tuple(outputs[i] if i >= 0 else Maps(description.get("channels", 3), Fraction(1)) for i in sources),
            written=repeats,
            repeats=max(round(repeats * depth), 1) if repeats > 1 else 1,
            nc=description["nc"],
            scale=scale,
            width=width,
            most_channels=most_channels,
            reg_max=description.get("reg_max", 16),
            end2end=description.get("end2end", False),
            separable=any(row[2] in SEPARABLE for row in rows),
            class_channels=description.get("class_channels"),
        )
        built, maps = _layer(site, module, arguments)
        layers.append(Layer(built, sources, MODULES[module].takes in ("joined", "predicting"), maps.stride))
        outputs.append(maps)
    return layers


def known(place: str, written: str) -> str:
    """The name in MODULES of what a layer calls its module. Raises ConfigError."""
    module = ALIASES.get(written, written.removeprefix("torch."))
    if module in OTHER_TASKS:
        raise ConfigError(f"{place}: {module} is for another task ({OTHER_TASKS[module]}); this program finds boxes")
    if module not in MODULES:
        raise ConfigError(f"{place}: {written!r} is not a module.{did_you_mean(written, MODULES)}")
    return module


def _layer(site: Site, module: str, arguments: list[Any]) -> tuple[nn.Module, Maps]:
    """Build a layer; ConfigError with its place for arguments that cannot be built."""
    kind = MODULES[module]
    values = read_arguments(site.place, module, kind.build, kind.hidden, adjusted(site, module, arguments), site.nc)
    try:
        if kind.takes == "joined":
            return _join(site, kind, values)
        if kind.takes == "predicting":
            return kind.build(site, *values), Maps(0, Fraction(1))
        inputs, stride = site.input
        if kind.takes == "scaled":
            outputs = site.channels(values[0])
            inside = [site.repeats] if kind.repeats else []
            values = [inputs, outputs, *inside, *values[1:]]
        elif kind.takes == "written":
            if values[0] != inputs:
                raise ValueError(f"is written for {values[0]} channels, and {inputs} come in")
            outputs = values[1]
        elif kind.takes == "after":
            outputs, values = inputs, [inputs, *values]
        else:
            outputs = inputs
        times = 1 if kind.repeats else site.repeats
        if times > 1 and inputs != outputs:
            raise ValueError(f"is repeated {times} times, and so must put out what comes in: {outputs} for {inputs}")
        built = [kind.build(*values) for _ in range(times)]
    except ValueError as error:
        raise site.fail(f"{module} {error}") from None
    for one in built:
        step = Fraction(whole(getattr(one, "stride", 1)))
        stride = stride / step if kind.up else stride * step
    return nn.Sequential(*built) if times > 1 else built[0], Maps(outputs, stride)


def adjusted(site: Site, module: str, arguments: list[Any]) -> list[Any]:
    """A layer's arguments with what the scale itself changes."""
    if module == "C3k2" and site.scale in LARGE:
        return [*arguments[:1], True, *arguments[2:]]
    if module == "A2C2f" and site.scale in LARGEST:
        return [*arguments, True, 1.2]
    return arguments


def whole(stride: int | tuple[int, int]) -> int:
    """A stride that is the same along both sides."""
    return stride[0] if isinstance(stride, tuple) else stride


def _join(site: Site, kind: Kind, values: list[Any]) -> tuple[nn.Module, Maps]:
    """Concat adds channels of maps of one size; CBFuse adds to its last map what it resizes."""
    if kind.build is join.Concat:
        strides = sorted({maps.stride for maps in site.inputs})
        if len(strides) != 1:
            raise ValueError(f"joins maps of one stride, not strides {', '.join(map(str, strides))}")
        maps = Maps(sum(maps.channels for maps in site.inputs), strides[0])
    else:
        if len(values[0]) != len(site.inputs) - 1:
            raise ValueError(f"names {len(values[0])} maps of the {len(site.inputs) - 1} layers before the last")
        maps = site.inputs[-1]
    return kind.build(*values), maps


def _sources(place: str, source: int | list[int], index: int) -> tuple[int, ...]:
    """The `from` of layer `index` as layer numbers; negative ones count back from the layer."""
    sources = tuple(i + index if i < 0 else i for i in (source if isinstance(source, list) else [source]))
    for i in sources:
        if not (0 <= i < index or (index == 0 and i == -1)):
            rule = f"0 to {index - 1}, or -1 to {-index} counted back" if index else "-1, the image"
            raise ConfigError(f"{place}: from {source} is not an earlier layer ({rule})")
    return sources
