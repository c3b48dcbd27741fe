"""The blocks that networks are built of. All take and return (B, channels, height, width).

Members carry the names of the public checkpoints (`conv`, `bn`, `cv1`, `m`, ...): weights are exchanged by name.
Every block works in either memory format; none copies a channels_last input to rearrange it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv(nn.Module):
    """Convolution without bias, batch normalisation and, with `act`, SiLU; a side becomes ceil(side / stride)."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        if not self.act:
            return x
        # Autograd clones the input of an in-place SiLU for the backward pass: in place saves where nothing is kept.
        return F.silu(x, inplace=not x.requires_grad)


class DWConv(Conv):
    """A Conv with as many groups as its channels allow: depthwise where inputs and outputs are equal."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, act: bool = True):
        super().__init__(inputs, outputs, kernel, stride, math.gcd(inputs, outputs), act)


class Bottleneck(nn.Module):
    """Two convolutions over `expansion` of the output channels, added to the input where the channels allow it."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        shortcut: bool = True,
        kernels: tuple[int, int] = (3, 3),
        expansion: float = 0.5,
    ):
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden, kernels[0])
        self.cv2 = Conv(hidden, outputs, kernels[1])
        self.add = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.cv2(self.cv1(x))
        return x + out if self.add else out


class C3k(nn.Module):
    """A cross-stage block: `repeats` Bottlenecks on one half of the output channels, a 1x1 convolution on the other."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 2):
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.cv3 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, expansion=1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), dim=1))


class C3k2(nn.Module):
    """A dense cross-stage block: 1x1 to two parts, units chained from the second, 1x1 over both parts and every unit.

    The units are C3k blocks with `c3k`, else Bottlenecks; a part has `expansion` of the output channels.
    """

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, c3k: bool = False, expansion: float = 0.5):
        super().__init__()
        part = int(outputs * expansion)
        self.cv1 = Conv(inputs, 2 * part)
        self.cv2 = Conv((2 + repeats) * part, outputs)
        self.m = nn.ModuleList(C3k(part, part) if c3k else Bottleneck(part, part) for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, dim=1))
        for unit in self.m:
            parts.append(unit(parts[-1]))
        return self.cv2(torch.cat(parts, dim=1))


class SPPF(nn.Module):
    """Spatial pyramid pooling, fast: a chain of three max-pools, whose windows grow to 3 * kernel - 2."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 5):
        super().__init__()
        hidden = inputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(4 * hidden, outputs)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.cv1(x)]
        for _ in range(3):
            levels.append(F.max_pool2d(levels[-1], self.kernel, stride=1, padding=self.kernel // 2))
        return self.cv2(torch.cat(levels, dim=1))


class Attention(nn.Module):
    """Self-attention over the cells of a map, plus a depthwise convolution of the values as position encoding.

    Keys and queries have half the channels of the values. `heads` must divide `channels`.
    """

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.value = channels // heads  # channels of a head's values
        self.key = self.value // 2  # channels of a head's queries and keys
        self.qkv = Conv(channels, channels + 2 * self.key * heads, act=False)
        self.proj = Conv(channels, channels, act=False)
        self.pe = DWConv(channels, channels, 3, act=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        # (B, heads, cells, channels of a head): views in both memory formats
        qkv = self.qkv(x).flatten(2).view(batch, self.heads, -1, height * width).transpose(2, 3)
        query, key, value = qkv.split((self.key, self.key, self.value), dim=3)
        seen = F.scaled_dot_product_attention(query, key, value)  # scaled by key ** -0.5

        def to_map(cells: Tensor) -> Tensor:
            return cells.transpose(1, 2).reshape(batch, height, width, channels).permute(0, 3, 1, 2)

        return self.proj(to_map(seen) + self.pe(to_map(value)))


class PSABlock(nn.Module):
    """Attention and a two-layer feed-forward network of 1x1 convolutions, each added to its input."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.attn = Attention(channels, heads)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, act=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class C2PSA(nn.Module):
    """Attention on half of the channels: 1x1, split, `repeats` PSABlocks on one half, 1x1 over both."""

    def __init__(self, channels: int, repeats: int = 1):
        super().__init__()
        half = channels // 2
        self.cv1 = Conv(channels, 2 * half)
        self.cv2 = Conv(2 * half, channels)
        self.m = nn.Sequential(*(PSABlock(half, self.heads(channels)) for _ in range(repeats)))

    @staticmethod
    def heads(channels: int) -> int:
        """Attention heads of a block with that many channels: one for every 64 of its half, at least one."""
        return max(channels // 2 // 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).chunk(2, dim=1)
        return self.cv2(torch.cat((a, self.m(b)), dim=1))


class Concat(nn.Module):
    """Joins maps of one size along their channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.cat(maps, dim=1)
