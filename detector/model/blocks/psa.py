"""Cross-stage blocks whose units are attention."""

import torch
from torch import Tensor, nn

from detector.model.blocks.attention import ABlock, PSABlock, heads_of
from detector.model.blocks.conv import Conv
from detector.model.blocks.csp import C2f, C3k


def keeps_channels(inputs: int, outputs: int) -> None:
    if inputs != outputs:
        raise ValueError(f"keeps its input's channels: {inputs} come in, {outputs} would go out")


class C2fPSA(C2f):
    """C2f of attention blocks; it keeps its input's channels."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, expansion: float = 0.5):
        keeps_channels(inputs, outputs)
        super().__init__(inputs, outputs, repeats, expansion=expansion)

    def unit(self, channels: int, shortcut: bool, groups: int) -> nn.Module:
        return PSABlock(channels, heads_of(channels))


class C2PSA(nn.Module):
    """Attention on half of the channels: 1x1, split, `repeats` attention blocks on one half, 1x1 over both."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, expansion: float = 0.5):
        super().__init__()
        keeps_channels(inputs, outputs)
        part = int(outputs * expansion)
        self.cv1 = Conv(inputs, 2 * part)
        self.cv2 = Conv(2 * part, outputs)
        self.m = nn.Sequential(*(PSABlock(part, heads_of(part)) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).chunk(2, dim=1)
        return self.cv2(torch.cat((a, self.m(b)), dim=1))


class PSA(PSABlock):
    """C2PSA with one attention block, whose members it has directly."""

    def __init__(self, inputs: int, outputs: int, expansion: float = 0.5):
        keeps_channels(inputs, outputs)
        part = int(outputs * expansion)
        super().__init__(part, heads_of(part))
        self.cv1 = Conv(inputs, 2 * part)
        self.cv2 = Conv(2 * part, outputs)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).chunk(2, dim=1)
        return self.cv2(torch.cat((a, super().forward(b)), dim=1))


class A2C2f(nn.Module):
    """Units chained from a 1x1 convolution, 1x1 over it and every unit; with `residual` scaled and added to the input.

    The units are pairs of area-attention blocks with `a2`, else C3k blocks. `area` means nothing without `a2`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        a2: bool = True,
        area: int | None = 1,
        residual: bool = False,
        mlp_ratio: float = 2.0,
        expansion: float = 0.5,
        groups: int = 1,
        shortcut: bool = True,
    ):
        super().__init__()
        hidden = int(outputs * expansion)
        if hidden % 32:
            raise ValueError(f"{hidden} inner channels ({expansion:g} of {outputs}) are not a multiple of 32")
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv((1 + repeats) * hidden, outputs)
        self.gamma = nn.Parameter(torch.full((outputs,), 0.01)) if a2 and residual else None

        def unit() -> nn.Module:
            if not a2:
                return C3k(hidden, hidden, 2, shortcut, groups)
            return nn.Sequential(*(ABlock(hidden, hidden // 32, mlp_ratio, area or 1) for _ in range(2)))

        self.m = nn.ModuleList(unit() for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cv1(x)]
        for unit in self.m:
            parts.append(unit(parts[-1]))
        out = self.cv2(torch.cat(parts, dim=1))
        return out if self.gamma is None else x + self.gamma.view(-1, 1, 1) * out

    @torch.no_grad()
    def reset(self, rng: torch.Generator) -> None:
        if self.gamma is not None:
            self.gamma.fill_(0.01)
