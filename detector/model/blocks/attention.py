"""Self-attention over the cells of a map, and the residual blocks around it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.model.blocks.conv import Conv, DWConv


class Attention(nn.Module):
    """Self-attention over the cells of a map, plus a depthwise convolution of the values as position encoding.

    Keys and queries have half the channels of the values. `heads` must divide `channels`.
    """

    def __init__(self, channels: int, heads: int):
        super().__init__()
        if channels % heads:
            raise ValueError(f"has {channels} channels, which cannot be shared by {heads} attention heads")
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


def heads_of(channels: int) -> int:
    """Attention heads over that many channels: one for every 64, at least one."""
    return max(channels // 64, 1)


class PSABlock(nn.Module):
    """Attention and a two-layer feed-forward network of 1x1 convolutions, each added to its input."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.attn = Attention(channels, heads)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, act=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class AreaAttention(nn.Module):
    """Self-attention in which the cells, row by row, are cut into `area` equal runs that see themselves alone.

    Tian et al., "YOLOv12: Attention-centric real-time object detectors" (2025). The cells must be divisible by `area`.
    """

    def __init__(self, channels: int, heads: int, area: int = 1):
        super().__init__()
        if channels % heads:
            raise ValueError(f"has {channels} channels, which cannot be shared by {heads} attention heads")
        self.heads, self.area = heads, area
        self.qkv = Conv(channels, 3 * channels, act=False)
        self.proj = Conv(channels, channels, act=False)
        self.pe = Conv(channels, channels, 7, groups=channels, act=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        each = channels // self.heads
        # (B, cells, 3 * channels): a view of channels_last memory; then (B * area, heads, cells of a run, 3 * each)
        cells = self.qkv(x).flatten(2).transpose(1, 2)
        runs = cells.reshape(batch * self.area, -1, self.heads, 3 * each).transpose(1, 2)
        query, key, value = runs.split(each, dim=3)
        seen = F.scaled_dot_product_attention(query, key, value)

        def to_map(runs: Tensor) -> Tensor:
            return runs.transpose(1, 2).reshape(batch, height, width, channels).permute(0, 3, 1, 2)

        return self.proj(to_map(seen) + self.pe(to_map(value)))


class ABlock(nn.Module):
    """Area attention and a two-layer network of 1x1 convolutions, each added to its input."""

    def __init__(self, channels: int, heads: int, mlp_ratio: float = 1.2, area: int = 1):
        super().__init__()
        hidden = int(channels * mlp_ratio)
        self.attn = AreaAttention(channels, heads, area)
        self.mlp = nn.Sequential(Conv(channels, hidden), Conv(hidden, channels, act=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        """Its convolutions start from a normal distribution of deviation 0.02, cut off at 2."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02, generator=rng)
