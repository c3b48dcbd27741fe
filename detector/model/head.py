"""The detection head: from the feature maps of three levels to box distributions and class logits per anchor."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from detector.model.blocks import Conv, DWConv
from detector.model.recompute import rerun

REG_MAX = 16  # bins of a side's distance distribution, 0..15 grid units


class Predictions(NamedTuple):
    """Raw output of a network, in training and in inference. Anchors: P3, P4, P5, each row-major."""

    boxes: Tensor  # (B, 4 * reg_max, A) logits of the distances left, top, right, bottom
    logits: Tensor  # (B, C, A)
    shapes: tuple[tuple[int, int], ...]  # (height, width) of each level's grid


class DFL(nn.Module):
    """Holds the bins of a side's distance distribution as a frozen 1x1 convolution, as public checkpoints do.

    `decode` takes the expectation over the same bins; the weight is there so that state dicts fit. Distribution focal
    loss: Li et al., "Generalized Focal Loss" (2020).
    """

    def __init__(self, reg_max: int):
        super().__init__()
        self.conv = nn.Conv2d(reg_max, 1, 1, bias=False).requires_grad_(False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Sets the bins 0, 1, .. reg_max - 1."""
        bins = torch.arange(self.conv.in_channels, dtype=self.conv.weight.dtype, device=self.conv.weight.device)
        self.conv.weight.copy_(bins.view(1, -1, 1, 1))


class Detect(nn.Module):
    """A box branch (`cv2`) and a class branch (`cv3`) for each level, of the given channels and strides."""

    terms = ("box", "cls", "dfl")  # of its loss, by the names of their gains in the settings

    def __init__(self, nc: int, channels: Sequence[int], strides: Sequence[int]):
        super().__init__()
        self.nc = nc
        self.reg_max = REG_MAX
        self.strides = tuple(strides)
        self.rerun = False  # whether branches compute their activations again, see `Network.set_checkpoint`
        box = max(16, channels[0] // 4, 4 * self.reg_max)
        hidden = max(channels[0], min(nc, 100))
        self.cv2 = nn.ModuleList(
            nn.Sequential(Conv(c, box, 3), Conv(box, box, 3), nn.Conv2d(box, 4 * self.reg_max, 1)) for c in channels
        )
        self.cv3 = nn.ModuleList(
            nn.Sequential(
                nn.Sequential(DWConv(c, c, 3), Conv(c, hidden)),
                nn.Sequential(DWConv(hidden, hidden, 3), Conv(hidden, hidden)),
                nn.Conv2d(hidden, nc, 1),
            )
            for c in channels
        )
        self.dfl = DFL(self.reg_max)

    @torch.no_grad()
    def start_biases(self) -> None:
        """Classes start rare: the class bias is the logit of about 5 objects in an image of 640 x 640."""
        for box, classes, stride in zip(self.cv2, self.cv3, self.strides, strict=True):
            box[-1].bias.fill_(2.0)
            classes[-1].bias.fill_(math.log(5 / self.nc / (640 / stride) ** 2))

    def forward(self, maps: list[Tensor]) -> Predictions:
        again = self.training and self.rerun
        boxes = [_cells(rerun(one, x) if again else one(x)) for one, x in zip(self.cv2, maps, strict=True)]
        logits = [_cells(rerun(one, x) if again else one(x)) for one, x in zip(self.cv3, maps, strict=True)]
        shapes = tuple((x.shape[2], x.shape[3]) for x in maps)
        return Predictions(torch.cat(boxes, 1).transpose(1, 2), torch.cat(logits, 1).transpose(1, 2), shapes)


def _cells(x: Tensor) -> Tensor:
    """(B, channels, height, width) to (B, height * width, channels): a view of channels_last memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
