"""From the layer list of a model description to modules: the table of modules and how their arguments are scaled."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from detector.errors import ConfigError, did_you_mean
from detector.model.blocks import C2PSA, SPPF, C3k2, Concat, Conv
from detector.model.description import check_description
from detector.model.head import Detect


class Maps(NamedTuple):
    """What a layer puts out: the channels of its feature map and the pixels of the network input per cell."""

    channels: int
    stride: int


class Layer(NamedTuple):
    """A module and the numbers of the layers it reads; -1 is the image, and only layer 0 can read it."""

    module: nn.Module
    sources: tuple[int, ...]
    many: bool  # whether the module takes a list of maps


@dataclass(frozen=True)
class Site:
    """Where a layer is built: all that its arguments are scaled and checked by."""

    place: str  # of the layer, for messages
    inputs: tuple[Maps, ...]
    written: int  # repeats as the description has them
    repeats: int  # after scaling by depth
    nc: int
    scale: str
    width: float
    most_channels: int

    def channels(self, base: int) -> int:
        """Base channels to channels: at most `most_channels`, times width, up to a multiple of 8."""
        return math.ceil(min(base, self.most_channels) * self.width / 8) * 8

    def fail(self, message: str) -> ConfigError:
        return ConfigError(f"{self.place}: {message}")

    @property
    def input(self) -> Maps:
        """The one input of a module that reads one layer."""
        if len(self.inputs) != 1:
            raise self.fail(f"the module reads one layer, not {len(self.inputs)}; join them with Concat first")
        return self.inputs[0]

    def once(self) -> None:
        """Holds that the module is not repeated."""
        if self.written != 1:
            raise self.fail(f"repeats {self.written}: the module cannot be repeated; write 1, and more layers")

    def odd(self, kernel: int) -> None:
        """Holds that a kernel has a middle: with an even one, maps would grow by a cell."""
        if kernel % 2 == 0:
            raise self.fail(f"kernel {kernel} is not odd")


Built = tuple[nn.Module, Maps]


def _conv(site: Site, channels: int, kernel: int = 1, stride: int = 1) -> Built:
    """Channels are scaled."""
    site.once()
    site.odd(kernel)
    outputs = site.channels(channels)
    return Conv(site.input.channels, outputs, kernel, stride), Maps(outputs, site.input.stride * stride)


def _c3k2(site: Site, channels: int, c3k: bool = False, expansion: float = 0.5) -> Built:
    """Channels are scaled; the scales m, l and x are built of C3k units whatever `c3k` says."""
    outputs = site.channels(channels)
    block = C3k2(site.input.channels, outputs, site.repeats, c3k or site.scale in ("m", "l", "x"), expansion)
    return block, Maps(outputs, site.input.stride)


def _sppf(site: Site, channels: int, kernel: int = 5) -> Built:
    """Channels are scaled."""
    site.once()
    site.odd(kernel)
    outputs = site.channels(channels)
    return SPPF(site.input.channels, outputs, kernel), Maps(outputs, site.input.stride)


def _c2psa(site: Site, channels: int) -> Built:
    """Channels are scaled and must be those of the input."""
    outputs = site.channels(channels)
    if outputs != site.input.channels:
        raise site.fail(f"C2PSA keeps its input's channels: {site.input.channels} come in, {outputs} would go out")
    heads = C2PSA.heads(outputs)
    if (outputs // 2) % heads:
        raise site.fail(f"half of C2PSA's {outputs} channels cannot be shared by {heads} attention heads")
    return C2PSA(outputs, site.repeats), site.input


def _upsample(site: Site, size: None, factor: int = 2, mode: str = "nearest") -> Built:
    """Nothing is scaled. The size stays None: maps of every size are upsampled by the factor."""
    site.once()
    if mode != "nearest" or site.input.stride % factor:
        raise site.fail(f"nn.Upsample takes [None, 2, nearest], not [{size}, {factor}, {mode}]")
    return nn.Upsample(scale_factor=factor, mode=mode), Maps(site.input.channels, site.input.stride // factor)


def _concat(site: Site, dimension: int = 1) -> Built:
    """Nothing is scaled."""
    site.once()
    strides = sorted({maps.stride for maps in site.inputs})
    if dimension != 1 or len(strides) != 1:
        raise site.fail(f"Concat joins maps of one stride along dimension 1, not strides {strides} along {dimension}")
    return Concat(), Maps(sum(maps.channels for maps in site.inputs), strides[0])


def _detect(site: Site, nc: int, reg_max: int = 16) -> Built:
    """Nothing is scaled; nc is the number of classes the network is built for, reg_max the bins of a box's side."""
    site.once()
    if reg_max < 2:
        raise site.fail(f"reg_max {reg_max}: the distance to a side is a distribution over 2 bins or more")
    channels, strides = zip(*site.inputs, strict=True)
    return Detect(nc, channels, strides, reg_max), Maps(0, 0)


class Kind(NamedTuple):
    """A module that a description can name."""

    build: Callable[..., Built]
    many: bool = False  # whether the module takes a list of maps
    head: bool = False  # whether it gives predictions: the last layer, and no other


# Every module a description can name. A builder's parameters are the arguments in the description; it says which of
# them are scaled, and returns the module and what it puts out.
MODULES: dict[str, Kind] = {
    "Conv": Kind(_conv),
    "C3k2": Kind(_c3k2),
    "SPPF": Kind(_sppf),
    "C2PSA": Kind(_c2psa),
    "nn.Upsample": Kind(_upsample),
    "Concat": Kind(_concat, many=True),
    "Detect": Kind(_detect, many=True, head=True),
}


def build_layers(description: dict[str, Any]) -> list[Layer]:
    """The layers of a description, backbone then head; the last one is a detection head. Raises ConfigError."""
    check_description(description)
    name, scale = description.get("name", "model description"), description["scale"]
    depth, width, most_channels = description["scales"][scale]
    rows = [*description["backbone"], *description["head"]]
    layers: list[Layer] = []
    outputs: list[Maps] = []
    for index, (source, repeats, module, arguments) in enumerate(rows):
        place = f"{name}: layer {index}"
        if module not in MODULES:
            raise ConfigError(f"{place}: {module!r} is not a module.{did_you_mean(module, MODULES)}")
        kind = MODULES[module]
        if kind.head != (index == len(rows) - 1):
            heads = ", ".join(name for name, one in MODULES.items() if one.head)
            raise ConfigError(f"{place}: {module}: the last layer, and no other, is a head ({heads})")
        sources = _sources(place, source, index)
        site = Site(
            place=place,
            inputs=tuple(outputs[i] if i >= 0 else Maps(3, 1) for i in sources),
            written=repeats,
            repeats=max(round(repeats * depth), 1) if repeats > 1 else 1,
            nc=description["nc"],
            scale=scale,
            width=width,
            most_channels=most_channels,
        )
        built, maps = kind.build(site, *_arguments(site, module, arguments))
        layers.append(Layer(built, sources, kind.many))
        outputs.append(maps)
    return layers


def _sources(place: str, source: int | list[int], index: int) -> tuple[int, ...]:
    """The `from` of layer `index` as layer numbers; negative ones count back from the layer."""
    sources = tuple(i + index if i < 0 else i for i in (source if isinstance(source, list) else [source]))
    for i in sources:
        if not (0 <= i < index or (index == 0 and i == -1)):
            rule = f"0 to {index - 1}, or -1 to {-index} counted back" if index else "-1, the image"
            raise ConfigError(f"{place}: from {source} is not an earlier layer ({rule})")
    return sources


def _arguments(site: Site, module: str, arguments: list[Any]) -> list[Any]:
    """A layer's arguments with `nc` and `None` read as what they mean, checked against the builder's parameters."""
    words = {"nc": site.nc, "None": None}
    values = [words.get(value, value) if isinstance(value, str) else value for value in arguments]
    parameters = list(inspect.signature(MODULES[module].build).parameters.values())[1:]
    wanted = ", ".join(str(p).replace(": None", "=None") for p in parameters)
    needed = sum(p.default is p.empty for p in parameters)
    if not needed <= len(values) <= len(parameters):
        raise site.fail(f"{module} takes ({wanted}), not the {len(values)} arguments {arguments}")
    for value, parameter in zip(values, parameters, strict=False):
        if not _fits(value, parameter.annotation):
            raise site.fail(f"{module} takes ({wanted}): {parameter.name} cannot be {value!r}")
    return values


def _fits(value: object, kind: type | None) -> bool:
    """Whether a value can be an argument of that type; all numbers are sizes and above 0."""
    if kind is None or value is None:
        return kind is None and value is None
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and value > 0
    return isinstance(value, kind) and (not isinstance(value, int) or value > 0)
