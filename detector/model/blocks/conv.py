"""Convolutions with normalisation and activation, and those that are made of several for training and one later."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

Kernel = int | tuple[int, int]  # of a side, or (height, width)


class Conv(nn.Module):
    """Convolution without bias, batch normalisation and, with `act`, SiLU; a side becomes ceil(side / stride).

    padding None: what keeps the size of a map at stride 1.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Kernel = 1,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        dilation: int = 1,
        act: bool = True,
    ):
        super().__init__()
        around = padding if padding is not None else _same(kernel, dilation)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, around, dilation, groups, bias=False)
        self.bn: nn.Module = norm(outputs)
        self.stride = stride
        self.activation: Callable[..., Tensor] | None = F.silu if act else None  # takes `inplace`

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        if self.activation is None:
            return x
        # Autograd clones the input of an in-place SiLU for the backward pass: in place saves where nothing is kept.
        return self.activation(x, inplace=not x.requires_grad)

    def fold(self) -> None:
        """Put the normalisation into the convolution, which gets a bias; for inference."""
        if isinstance(self.bn, nn.BatchNorm2d | nn.SyncBatchNorm):
            norm = (self.bn.running_mean, self.bn.running_var, self.bn.eps, self.bn.weight, self.bn.bias)
            self.conv.weight, self.conv.bias = fuse_conv_bn_weights(self.conv.weight, self.conv.bias, *norm)
            self.bn = nn.Identity()


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation as every block has it."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)


def _same(kernel: Kernel, dilation: int) -> Kernel:
    """The padding that keeps the size of a map, or with an even kernel adds a cell."""
    if isinstance(kernel, tuple):
        return _same(kernel[0], dilation), _same(kernel[1], dilation)
    return (dilation * (kernel - 1) + 1) // 2


class DWConv(Conv):
    """A Conv with as many groups as its channels allow: depthwise where inputs and outputs are equal."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Kernel = 1, stride: int = 1, dilation: int = 1, act: bool = True
    ):
        super().__init__(inputs, outputs, kernel, stride, groups=math.gcd(inputs, outputs), dilation=dilation, act=act)


class ConvTranspose(nn.Module):
    """Transposed convolution, batch normalisation and SiLU: a map becomes `stride` times as large."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 2, stride: int = 2, padding: int | None = 0, act: bool = True
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding or 0, bias=False)
        self.bn = norm(outputs)
        self.stride = stride
        self.activation: Callable[..., Tensor] | None = F.silu if act else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv_transpose(x))
        return x if self.activation is None else self.activation(x)


class Focus(nn.Module):
    """Every second pixel of four shifted copies, joined along the channels, through a Conv; a side is halved."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        act: bool = True,
    ):
        super().__init__()
        self.conv = Conv(4 * inputs, outputs, kernel, stride, padding, groups, act=act)
        self.stride = 2 * stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1))


class GhostConv(nn.Module):
    """Half of the output channels by a Conv, the other half by a depthwise 5x5 of those. Han et al., "GhostNet"."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True):
        super().__init__()
        half = outputs // 2
        self.cv1 = Conv(inputs, half, kernel, stride, groups=groups, act=act)
        self.cv2 = Conv(half, half, 5, groups=half, act=act)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv1(x)
        return torch.cat((y, self.cv2(y)), dim=1)


class RepConv(nn.Module):
    """SiLU of a 3x3 and a 1x1 convolution's sum; folded they are one 3x3. Ding et al., "RepVGG"."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1):
        super().__init__()
        self.conv1 = Conv(inputs, outputs, kernel, stride, act=False)
        self.conv2 = Conv(inputs, outputs, 1, stride, act=False)
        self.stride = stride
        self.activation: Callable[..., Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.conv1(x) if self.conv2 is None else self.conv1(x) + self.conv2(x))

    def fold(self) -> None:
        self.conv1, self.conv2 = added(self.conv1, self.conv2), None


class RepVGGDW(nn.Module):
    """SiLU of a depthwise 7x7 and a depthwise 3x3 convolution's sum; folded they are one 7x7."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv(channels, channels, 7, groups=channels, act=False)
        self.conv1 = Conv(channels, channels, 3, groups=channels, act=False)
        self.activation: Callable[..., Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.conv(x) if self.conv1 is None else self.conv(x) + self.conv1(x))

    def fold(self) -> None:
        self.conv, self.conv1 = added(self.conv, self.conv1), None


def added(large: Conv, small: Conv) -> Conv:
    """Two convolutions of one map as one: the smaller kernel, padded, is added to the larger."""
    large.fold()
    small.fold()
    margin = (large.conv.kernel_size[0] - small.conv.kernel_size[0]) // 2
    large.conv.weight.data += F.pad(small.conv.weight.data, (margin,) * 4)
    large.conv.bias.data += small.conv.bias.data
    return large
