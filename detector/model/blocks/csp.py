"""Cross-stage blocks: part of the channels goes through a stack of units, the rest around it.

Wang et al., "CSPNet" (2020). Two shells, C3 (two branches) and C2f (every unit's output is kept), hold different units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.model.blocks.attention import PSABlock, heads_of
from detector.model.blocks.conv import Conv, DWConv, GhostConv, Kernel, RepConv, RepVGGDW, norm

# --- units


class Bottleneck(nn.Module):
    """Two convolutions over `expansion` of the output channels, added to the input where the channels allow it."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        shortcut: bool = True,
        groups: int = 1,
        kernels: tuple[Kernel, Kernel] = (3, 3),
        expansion: float = 0.5,
    ):
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden, kernels[0])
        self.cv2 = Conv(hidden, outputs, kernels[1], groups=groups)
        self.add = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.cv2(self.cv1(x))
        return x + out if self.add else out


class GhostBottleneck(nn.Module):
    """Two GhostConvs, with a depthwise convolution between them where the map is halved, added to the input."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1):
        super().__init__()
        half, down = outputs // 2, stride == 2
        self.conv = nn.Sequential(
            GhostConv(inputs, half),
            DWConv(half, half, kernel, stride, act=False) if down else nn.Identity(),
            GhostConv(half, outputs, act=False),
        )
        self.shortcut = (
            nn.Sequential(DWConv(inputs, inputs, kernel, stride, act=False), Conv(inputs, outputs, act=False))
            if down
            else nn.Identity()
        )
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.shortcut(x)


class CIB(nn.Module):
    """Depthwise and 1x1 convolutions in turn, added to the input; `lk`: the middle one is 7x7. "YOLOv10" (2024)."""

    def __init__(self, inputs: int, outputs: int, shortcut: bool = True, expansion: float = 0.5, lk: bool = False):
        super().__init__()
        wide = 2 * int(outputs * expansion)
        self.cv1 = nn.Sequential(
            Conv(inputs, inputs, 3, groups=inputs),
            Conv(inputs, wide),
            RepVGGDW(wide) if lk else Conv(wide, wide, 3, groups=wide),
            Conv(wide, outputs),
            Conv(outputs, outputs, 3, groups=outputs),
        )
        self.add = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv1(x) if self.add else self.cv1(x)


# --- the shell of two branches


class C3(nn.Module):
    """`repeats` units on one 1x1 convolution of the input, another beside them, a 1x1 over both.

    Here the units are Bottlenecks of a 1x1 and a 3x3 convolution.
    """

    kernels: tuple[Kernel, Kernel] = (1, 3)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
    ):
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.cv3 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(self.unit(hidden, shortcut, groups) for _ in range(repeats)))

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        return Bottleneck(channels, channels, shortcut, groups, self.kernels, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), dim=1))


class C3k(C3):
    """C3 whose units are of two 3x3 convolutions."""

    kernels = (3, 3)


class C3x(C3):
    """C3 whose units are of a 1x3 and a 3x1 convolution."""

    kernels = ((1, 3), (3, 1))


class C3Ghost(C3):
    """C3 of GhostBottlenecks."""

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        return GhostBottleneck(channels, channels)


class RepCSP(C3):
    """C3 whose units begin with a RepConv."""

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        unit = Bottleneck(channels, channels, shortcut, groups, (3, 3), 1.0)
        unit.cv1 = RepConv(channels, channels)
        return unit


class RepC3(nn.Module):
    """`repeats` RepConvs on one 1x1 convolution of the input, added to another; a 1x1 where the channels change."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 3, expansion: float = 1.0):
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.m = nn.Sequential(*(RepConv(hidden, hidden) for _ in range(repeats)))
        self.cv3 = Conv(hidden, outputs) if hidden != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(self.m(self.cv1(x)) + self.cv2(x))


class BottleneckCSP(nn.Module):
    """The first cross-stage block: its branches meet in one normalisation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
    ):
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = nn.Conv2d(inputs, hidden, 1, bias=False)
        self.cv3 = nn.Conv2d(hidden, hidden, 1, bias=False)
        self.cv4 = Conv(2 * hidden, outputs)
        self.bn = norm(2 * hidden)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, groups, (3, 3), 1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat((self.cv3(self.m(self.cv1(x))), self.cv2(x)), dim=1)
        return self.cv4(F.silu(self.bn(both)))


class C1(nn.Module):
    """A 1x1 convolution, and `repeats` 3x3 convolutions of it added to it."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1):
        super().__init__()
        self.cv1 = Conv(inputs, outputs)
        self.m = nn.Sequential(*(Conv(outputs, outputs, 3) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return x + self.m(x)


# --- the shell that keeps every unit's output


class C2f(nn.Module):
    """1x1 to two parts, `repeats` units chained from the second, 1x1 over both parts and every unit.

    A part has `expansion` of the output channels. Here the units are Bottlenecks of two 3x3 convolutions.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        shortcut: bool = False,
        groups: int = 1,
        expansion: float = 0.5,
    ):
        super().__init__()
        part = int(outputs * expansion)
        self.cv1 = Conv(inputs, 2 * part)
        self.cv2 = Conv((2 + repeats) * part, outputs)
        self.m = nn.ModuleList(self.unit(part, shortcut, groups) for _ in range(repeats))

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        return Bottleneck(channels, channels, shortcut, groups, (3, 3), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, dim=1))
        for unit in self.m:
            parts.append(unit(parts[-1]))
        return self.cv2(torch.cat(parts, dim=1))


class C3k2(C2f):
    """C2f of C3k blocks with `c3k`, else of narrow Bottlenecks; with `attn` of a Bottleneck and attention each."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        c3k: bool = False,
        expansion: float = 0.5,
        attn: bool = False,
        groups: int = 1,
        shortcut: bool = True,
    ):
        self.kind = "attn" if attn else "c3k" if c3k else "plain"
        super().__init__(inputs, outputs, repeats, shortcut, groups, expansion)

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        if self.kind == "c3k":
            return C3k(channels, channels, 2, shortcut, groups)
        unit = Bottleneck(channels, channels, shortcut, groups)
        return nn.Sequential(unit, PSABlock(channels, heads_of(channels))) if self.kind == "attn" else unit


class C2fCIB(C2f):
    """C2f of CIB units."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        shortcut: bool = False,
        lk: bool = False,
        groups: int = 1,
        expansion: float = 0.5,
    ):
        self.lk = lk
        super().__init__(inputs, outputs, repeats, shortcut, groups, expansion)

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        return CIB(channels, channels, shortcut, 1.0, self.lk)


# --- two parts, of which one goes through the units


class C2(nn.Module):
    """1x1 to two parts, `repeats` units on the first, 1x1 over both. Here the units are Bottlenecks of 3x3s."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
    ):
        super().__init__()
        part = int(outputs * expansion)
        self.cv1 = Conv(inputs, 2 * part)
        self.cv2 = Conv(2 * part, outputs)
        self.m = nn.Sequential(*(Bottleneck(part, part, shortcut, groups, (3, 3), 1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).chunk(2, dim=1)
        return self.cv2(torch.cat((self.m(a), b), dim=1))
