"""A network: the layers of a model description, run in order; building it, and fusing conv + bn for inference."""

import copy
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from detector.model.blocks import Conv
from detector.model.description import load_description
from detector.model.head import Detect, Predictions
from detector.model.layers import build_layers
from detector.model.recompute import has_weights, is_block, rerun
from detector.rng import Purpose, generator

__all__ = ["Network", "build_network", "fused", "load_description", "network_from_description"]


class Network(nn.Module):
    """A detector for RGB images in 0..1 whose height and width are multiples of the largest stride.

    `description` is plain data from which `network_from_description` builds the same network again. The state dict has
    the names of the public checkpoints: model.<layer>.<member>...
    """

    def __init__(self, description: dict[str, Any]):
        super().__init__()
        layers = build_layers(description)
        self.description = description
        self.model = nn.ModuleList(layer.module for layer in layers)
        self._plan = [(layer.sources, layer.many) for layer in layers]
        # The layer after which a map is read no more, so that inference frees it; training needs it for the gradient.
        last = {source: index for index, layer in enumerate(layers) for source in layer.sources}
        self._free = [[s for s in set(layer.sources) if last[s] == i] for i, layer in enumerate(layers)]
        self.nc: int = self.head.nc
        self._rerun: frozenset[int] = frozenset()  # layers whose activations are computed again, see `set_checkpoint`

    @property
    def head(self) -> Detect:
        """The last layer, which says how its predictions are decoded, selected and trained."""
        return self.model[-1]

    def forward(self, images: Tensor) -> Predictions:
        """(B, 3, H, W) images to raw predictions."""
        maps: dict[int, Any] = {-1: images}
        for index, (layer, (sources, many)) in enumerate(zip(self.model, self._plan, strict=True)):
            if self.training and index in self._rerun:
                maps[index] = rerun(layer, maps[sources[0]])
            else:
                maps[index] = layer([maps[s] for s in sources] if many else maps[sources[0]])
            for source in self._free[index]:
                del maps[source]
        return maps[len(self.model) - 1]

    def set_checkpoint(self, which: Literal["off", "stages", "all"]) -> None:
        """Activation checkpointing: what training computes again instead of keeping it; changes no bit of a result.

        `stages`: inside the blocks and the head's branches; `all`: inside every layer that has weights.
        """
        rule = {"off": lambda layer: False, "stages": is_block, "all": has_weights}[which]
        # The head reads several maps and runs its branches one by one, so that no two are held at once.
        self._rerun = frozenset(index for index, layer in enumerate(self.model[:-1]) if rule(layer))
        self.head.rerun = which != "off"

    def branches(self) -> list[list[nn.Parameter]]:
        """The trainable parameters that each branch of the loss reaches; this network has one branch."""
        return [[p for p in self.parameters() if p.requires_grad]]

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        """Sets all weights and buffers to a fresh start, drawing from `rng` only.

        Convolutions: uniform in +-1/sqrt(fan in), torch's own start. BatchNorm: 1 and 0. Head: see there.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                bound = 1 / math.sqrt(module.weight[0].numel())
                module.weight.uniform_(-bound, bound, generator=rng)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        self.head.reset()


def build_network(name_or_path: str | Path, nc: int, seed: int = 0) -> Network:
    """A new network with `nc` classes; one seed always gives the same weights. Raises ConfigError."""
    return network_from_description({**load_description(name_or_path), "nc": nc}, seed)


def network_from_description(description: dict[str, Any], seed: int | None = 0) -> Network:
    """The network of a resolved description. Raises ConfigError.

    seed None: its weights are whatever memory held, for those of a checkpoint to take their place.
    """
    with torch.device("meta"):  # the layers' own start would draw from the global generator
        network = Network(copy.deepcopy(description))
    network.to_empty(device="cpu")
    if seed is None:
        return network
    rng = torch.Generator().manual_seed(int(generator(seed, Purpose.WEIGHTS).integers(2**63)))
    network.reset(rng)
    return network


@torch.no_grad()
def fused(network: Network) -> Network:
    """A copy for inference with conv + bn fused: every BatchNorm is folded into its convolution; eval mode.

    The original stays as it is.
    """
    copied = copy.deepcopy(network).eval()
    for module in copied.modules():
        if isinstance(module, Conv) and isinstance(module.bn, (nn.BatchNorm2d, nn.SyncBatchNorm)):
            module.conv = nn.utils.fusion.fuse_conv_bn_eval(module.conv, module.bn)
            module.bn = nn.Identity()
    return copied.requires_grad_(False)
