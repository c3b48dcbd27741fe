"""A network: the layers of a model description, run in order; building it, and fusing conv + bn for inference."""

import copy
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from detector.errors import ConfigError
from detector.model.activation import activation, set_activation
from detector.model.blocks.attention import ABlock
from detector.model.blocks.psa import A2C2f
from detector.model.description import load_description
from detector.model.head import Detect, Predictions
from detector.model.layers import build_layers
from detector.model.recompute import has_weights, is_block, rerun
from detector.rng import Purpose, generator
from detector.values import nearest_multiple

__all__ = ["Network", "build_network", "fused", "load_description", "network_from_description"]


class Network(nn.Module):
    """A detector for images in 0..1, RGB or of other channels, whose height and width are multiples of `stride`.

    `description` is plain data from which `network_from_description` builds the same network again. The state dict has
    the names of the public checkpoints: model.<layer>.<member>...
    """

    def __init__(self, description: dict[str, Any]):
        super().__init__()
        layers = build_layers(description)
        self.description = description
        self.model = nn.ModuleList(layer.module for layer in layers)
        if text := description.get("activation"):
            set_activation(self, activation(text, f"{description.get('name', 'model description')}: activation"))
        self._plan = [(layer.sources, layer.many) for layer in layers]
        self._strides = [layer.stride for layer in layers]
        # The layer after which a map is read no more, so that inference frees it; training needs it for the gradient.
        self._last = {source: index for index, layer in enumerate(layers) for source in layer.sources}
        self._free = [[s for s in set(layer.sources) if self._last[s] == i] for i, layer in enumerate(layers)]
        self.nc: int = self.head.nc
        self._rerun: frozenset[int] = frozenset()  # layers whose activations are computed again, see `set_checkpoint`

    @property
    def head(self) -> Detect:
        """The last layer, which says how its predictions are decoded, selected and trained."""
        return self.model[-1]

    @property
    def channels(self) -> int:
        """Of the images it takes."""
        return self.description.get("channels", 3)

    @property
    def value_range(self) -> tuple[float, float] | None:
        """What became 0 and 255 in files of more than 8 bits, of the images it was trained with."""
        limits = self.description.get("range")
        return None if limits is None else tuple(limits)

    @property
    def stride(self) -> int:
        """Sides of an input are multiples of it, in pixels."""
        return max(32, *self.head.strides)

    def forward(self, images: Tensor) -> Predictions:
        """(B, channels, H, W) images to raw predictions."""
        return self.run_layers({-1: images}, 0, len(self.model))[len(self.model) - 1]

    def run_layers(self, maps: dict[int, Any], start: int, stop: int) -> dict[int, Any]:
        """Run the layers from `start` to before `stop`.

        `maps` are those that they and later ones read, by the layers that made them; -1 are the images. Returns those
        that the layers from `stop` on read, or after the last layer its output.
        """
        for index in range(start, stop):
            layer, (sources, many) = self.model[index], self._plan[index]
            if self.training and index in self._rerun:
                maps[index] = rerun(layer, maps[sources[0]])
            else:
                maps[index] = layer([maps[s] for s in sources] if many else maps[sources[0]])
            for source in self._free[index]:
                del maps[source]
        end = len(self.model)
        return {index: made for index, made in maps.items() if stop == end or self._last.get(index, 0) >= stop}

    def set_checkpoint(self, which: Literal["off", "stages", "all"]) -> None:
        """Activation checkpointing: what training computes again instead of keeping it; changes no bit of a result.

        `stages`: inside the blocks and the head's branches; `all`: inside every layer that has weights.
        """
        rule = {"off": lambda layer: False, "stages": is_block, "all": has_weights}[which]
        # The head reads several maps and runs its branches one by one, so that no two are held at once.
        self._rerun = frozenset(index for index, layer in enumerate(self.model[:-1]) if rule(layer))
        self.head.rerun = which != "off"

    def branches(self) -> list[list[nn.Parameter]]:
        """The trainable parameters that each branch of the loss reaches: one-to-many, then one-to-one if there."""
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if not self.head.end2end:
            return [[p for _, p in trained]]
        own = [".one2one_" in name for name, _ in trained]
        return [[p for (_, p), one in zip(trained, own, strict=True) if one is wanted] for wanted in (False, True)]

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        """Sets all weights and buffers to a fresh start, drawing from `rng` only.

        Convolutions: uniform in +-1/sqrt(fan in), torch's own start, and no bias. BatchNorm: 1 and 0. Some blocks and
        the head have a start of their own.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                bound = 1 / math.sqrt(module.weight[0].numel())
                module.weight.uniform_(-bound, bound, generator=rng)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, ABlock | A2C2f):
                module.reset(rng)
        self.head.reset()


def build_network(name_or_path: str | Path, nc: int, seed: int = 0) -> Network:
    """A new network with `nc` classes; one seed always gives the same weights. Raises ConfigError."""
    return new_network({**load_description(name_or_path), "nc": nc}, seed)


def new_network(description: dict[str, Any], seed: int = 0) -> Network:
    """A new network of a resolved description, whose maps meet. Raises ConfigError."""
    network = network_from_description(description, seed)
    if Path(description.get("name", "")).suffix:  # a file of the user's
        check_maps(network)
    return network


def check_side(network: Network, imgsz: int) -> None:
    """Raise ConfigError unless a square of that side is an input of the network."""
    if imgsz % network.stride:
        raise ConfigError(
            f"imgsz={imgsz}: must be a multiple of {network.stride}, the largest stride of this model; the nearest is "
            f"{nearest_multiple(imgsz, network.stride)}"
        )


@torch.no_grad()
def check_maps(network: Network) -> None:
    """Run a small image through the layers. ConfigError names the one where maps do not meet, and the first odd one."""
    place = network.description.get("name", "model description")
    side = 2 * network.stride
    maps: dict[int, Any] = {-1: torch.zeros(1, network.channels, side, side)}
    odd = ""  # the first layer whose map has not the size that its stride says
    rows = [*network.description["backbone"], *network.description["head"]]
    was_training = network.training
    network.eval()
    for index, (layer, (sources, many)) in enumerate(zip(network.model, network._plan, strict=True)):
        inputs = [maps[source] for source in sources]
        sizes = [tuple(one.shape[2:]) for one in inputs if isinstance(one, Tensor)]
        try:
            if layer is network.head and sizes != [(side // stride, side // stride) for stride in layer.strides]:
                raise RuntimeError(f"reads maps of {sizes} cells from an image of {side} x {side}")
            maps[index] = out = layer(inputs if many else inputs[0])
        except RuntimeError as error:
            raise ConfigError(f"{place}: layer {index}: {rows[index][2]}: {str(error).splitlines()[0]}{odd}") from None
        wanted = side / network._strides[index]
        if isinstance(out, Tensor) and not odd and out.shape[2] != wanted:
            _, _, module, arguments = rows[index]
            odd = f"; layer {index}, {module} {arguments}, puts out {out.shape[2]} cells a side, not {float(wanted):g}"
    network.train(was_training)


def network_from_description(description: dict[str, Any], seed: int | None = 0) -> Network:
    """The network of a resolved description. Raises ConfigError.

    seed None: its weights are whatever memory held, for those of a checkpoint to take their place.
    """
    with torch.device("meta"):  # the layers' own start would draw from the global generator
        network = Network(copy.deepcopy(description))
    # Module.to_empty would import torch's compiler, which takes seconds.
    empty = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in network.state_dict().items()}
    network.load_state_dict(empty, assign=True)
    if seed is None:
        return network
    rng = torch.Generator().manual_seed(int(generator(seed, Purpose.WEIGHTS).integers(2**63)))
    network.reset(rng)
    return network


@torch.no_grad()
def fused(network: Network) -> Network:
    """A copy for inference with conv + bn fused: every BatchNorm is folded into its convolution; eval mode.

    Of two heads it has the chosen one. The original stays as it is.
    """
    copied = copy.deepcopy(network).eval()
    copied.head.keep_chosen()
    for module in list(copied.modules()):
        if hasattr(module, "fold"):
            module.fold()
    return copied.requires_grad_(False)
