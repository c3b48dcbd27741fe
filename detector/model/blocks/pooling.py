"""Blocks that pool: spatial pyramids, which see far, and those that make maps smaller."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.model.blocks.conv import Conv


def pooled(x: Tensor, kernel: int) -> Tensor:
    """The largest value around each cell; the size stays."""
    return F.max_pool2d(x, kernel, stride=1, padding=kernel // 2)


def chain(x: Tensor, kernel: int, times: int) -> Tensor:
    """x and what is pooled of it once, twice, ... joined along the channels; windows grow by kernel - 1."""
    levels = [x]
    for _ in range(times):
        levels.append(pooled(levels[-1], kernel))
    return torch.cat(levels, dim=1)


class SPP(nn.Module):
    """Spatial pyramid pooling: max-pools of several sizes, side by side."""

    def __init__(self, inputs: int, outputs: int, kernels: Sequence[int] = (5, 9, 13)):
        super().__init__()
        hidden = inputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv((len(kernels) + 1) * hidden, outputs)
        self.kernels = tuple(kernels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat([x, *(pooled(x, kernel) for kernel in self.kernels)], dim=1))


class SPPF(nn.Module):
    """Spatial pyramid pooling, fast: a chain of max-pools, whose windows grow.

    Whether the first convolution has an activation differs between nets of one layer list and is in no tensor, so
    `act` can say it; None: as public layer lists mean it, only a row that ends before `pools` has one.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 5,
        pools: int | None = None,
        shortcut: bool = False,
        act: bool | None = None,
    ):
        super().__init__()
        hidden = inputs // 2
        self.pools = 3 if pools is None else pools
        self.cv1 = Conv(inputs, hidden, act=pools is None if act is None else act)
        self.cv2 = Conv((self.pools + 1) * hidden, outputs)
        self.kernel = kernel
        self.add = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.cv2(chain(self.cv1(x), self.kernel, self.pools))
        return x + out if self.add else out


class SPPELAN(nn.Module):
    """A chain of three max-pools over `hidden` channels."""

    def __init__(self, inputs: int, outputs: int, hidden: int, kernel: int = 5):
        super().__init__()
        self.cv1 = Conv(inputs, hidden)
        self.cv5 = Conv(4 * hidden, outputs)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return self.cv5(chain(self.cv1(x), self.kernel, 3))


class AConv(nn.Module):
    """The mean of 2x2 cells, then a 3x3 convolution that halves the sides."""

    stride = 2

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.cv1 = Conv(inputs, outputs, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv1(F.avg_pool2d(x, 2, 1))


class ADown(nn.Module):
    """The mean of 2x2 cells; then half of the channels halved by a convolution, the other half by a max-pool."""

    stride = 2

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.cv1 = Conv(inputs // 2, outputs // 2, 3, 2)
        self.cv2 = Conv(inputs // 2, outputs // 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.avg_pool2d(x, 2, 1).chunk(2, dim=1)
        return torch.cat((self.cv1(a), self.cv2(F.max_pool2d(b, 3, 2, 1))), dim=1)


class SCDown(nn.Module):
    """A 1x1 convolution, then a depthwise one that makes the map smaller. Wang et al., "YOLOv10" (2024)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int):
        super().__init__()
        self.cv1 = Conv(inputs, outputs)
        self.cv2 = Conv(outputs, outputs, kernel, stride, groups=outputs, act=False)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return self.cv2(self.cv1(x))
