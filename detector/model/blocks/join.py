"""What joins maps: several layers in, one map out, and the layer that prepares for it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Concat(nn.Module):
    """Joins maps of one size along their channels."""

    def __init__(self, dimension: int = 1):
        super().__init__()
        if dimension != 1:
            raise ValueError(f"joins maps along dimension 1, their channels, not {dimension}")

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(maps), dim=1)


class CBLinear(nn.Module):
    """A 1x1 convolution with bias whose output is split into several maps."""

    def __init__(self, inputs: int, parts: Sequence[int]):
        super().__init__()
        self.parts = tuple(parts)
        self.conv = nn.Conv2d(inputs, sum(parts), 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.conv(x).split(self.parts, dim=1)


class CBFuse(nn.Module):
    """The last of its inputs plus one map of each CBLinear before it, brought to its size by nearest neighbours."""

    def __init__(self, chosen: list[int]):
        super().__init__()
        self.chosen = tuple(chosen)

    def forward(self, inputs: Sequence[Tensor | tuple[Tensor, ...]]) -> Tensor:
        *split, last = inputs
        for maps, index in zip(split, self.chosen, strict=True):
            last = last + F.interpolate(maps[index], size=last.shape[2:], mode="nearest")
        return last
