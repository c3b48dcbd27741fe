"""What a network costs: parameters, and floating-point operations by the three counts that are in use.

Published tables differ by up to a tenth because they count different things, so each count has its name here.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from detector.model.blocks.attention import AreaAttention, Attention
from detector.model.network import Network, fused


class Cost(NamedTuple):
    """Of a network at a square input. GFLOPs of one image; a multiply-add is two operations."""

    parameters: int
    fused_parameters: int  # with normalisation folded in, and of two heads one
    files: float  # as public model files state it: convolutions, 8 an element of BatchNorm, upsampling; both heads
    tables: float  # as model tables state it: convolutions and upsampling of the fused network with one head
    trainers: float  # as trainers print it: as `files` without upsampling, and the two products of attention


def cost(network: Network, imgsz: int = 640) -> Cost:
    """Count what an image of `imgsz` x `imgsz` takes. The network may be on the meta device, and stays as it is."""
    folded = fused(network)
    whole, parts = counted(network, imgsz), counted(folded, imgsz)
    return Cost(
        parameters=sum(p.numel() for p in network.parameters()),
        fused_parameters=sum(p.numel() for p in folded.parameters()),
        files=(whole["conv"] + whole["norm"] + whole["upsample"]) / 1e9,
        tables=(parts["conv"] + parts["upsample"]) / 1e9,
        trainers=(whole["conv"] + whole["norm"] + whole["attention"]) / 1e9,
    )


class LayerCost(NamedTuple):
    """Of one layer and one image, in training."""

    operations: int
    kept: int  # elements that its convolutions and norms put out, with which what the backward pass reads grows


def layer_costs(network: Network, imgsz: int) -> list[LayerCost]:
    """What each layer takes."""
    counts = counted_by_layer(network, imgsz)
    return [LayerCost(sum(one.values()) - one["kept"], one["kept"]) for one in counts]


def counted(network: Network, imgsz: int) -> dict[str, int]:
    """Operations by kind of module, in a network that trains (both heads)."""
    layers = counted_by_layer(network, imgsz)
    return {kind: sum(layer[kind] for layer in layers) for kind in layers[0]}


@torch.no_grad()
def counted_by_layer(network: Network, imgsz: int) -> list[dict[str, int]]:
    """The same of each layer, and the elements it puts out, by a run on the meta device."""
    shadow = network_on_meta(network)
    layers = [dict.fromkeys(("conv", "norm", "upsample", "attention", "kept"), 0) for _ in shadow.model]

    def add(
        totals: dict[str, int], kind: str, count: Callable[[nn.Module, Tensor, Tensor], int]
    ) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            totals[kind] += count(module, inputs[0], output)

        return hook

    for layer, totals in zip(shadow.model, layers, strict=True):
        for module in layer.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                module.register_forward_hook(add(totals, "conv", _convolution))
            elif isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(add(totals, "norm", lambda module, x, out: 8 * out.numel()))
            elif isinstance(module, nn.Upsample):
                module.register_forward_hook(add(totals, "upsample", lambda module, x, out: 2 * out.numel()))
            elif isinstance(module, Attention | AreaAttention):
                module.register_forward_hook(add(totals, "attention", _attention))
            if next(module.children(), None) is None:
                module.register_forward_hook(add(totals, "kept", _elements))
    shadow(torch.empty(1, network.channels, imgsz, imgsz, device="meta"))
    return layers


def network_on_meta(network: Network) -> Network:
    """A copy without memory, in training mode."""
    return copy.deepcopy(network).to("meta").train()


def _convolution(module: nn.Module, x: Tensor, out: Tensor) -> int:
    """A transposed convolution multiplies every input cell, a convolution makes every output cell."""
    cells = x.numel() // x.shape[1] if isinstance(module, nn.ConvTranspose2d) else out.numel() // out.shape[1]
    return 2 * cells * module.weight.numel()


def _attention(module: nn.Module, x: Tensor, out: Tensor) -> int:
    """Keys against queries and weights against values, over cells^2 of every area."""
    cells = x.shape[2] * x.shape[3]
    if isinstance(module, Attention):
        return 2 * module.heads * (module.key + module.value) * cells**2
    each = x.shape[1] // module.heads
    return 2 * module.heads * 2 * each * cells**2 // module.area


def _elements(module: nn.Module, x: Any, out: Any) -> int:
    return out.numel() if isinstance(out, Tensor) else 0
