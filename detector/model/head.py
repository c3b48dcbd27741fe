"""Detection heads: from feature maps to raw predictions, and from those to boxes, scores and detections.

A head owns what belongs to its kind: the names of its loss terms, how its output is decoded, how detections are
selected (by non-maximum suppression or without), and which of its layers depend on the number of classes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from detector.boxes import anchor_points, ltrb_to_xyxy
from detector.model.blocks import Conv, DWConv
from detector.model.recompute import rerun
from detector.model.selection import Detections, non_max_suppression


class Predictions(NamedTuple):
    """Raw output of a network, in training and in inference. Anchors: level by level (P3, P4, P5), each row-major."""

    boxes: Tensor  # (B, 4 * reg_max, A) logits of the distances left, top, right, bottom
    logits: Tensor  # (B, C, A)
    shapes: tuple[tuple[int, int], ...]  # (height, width) of each level's grid


class DFL(nn.Module):
    """Holds the bins of a side's distance distribution as a frozen 1x1 convolution, as public checkpoints do.

    `Detect.decode` takes the expectation over the same bins; the weight is there so that state dicts fit. Distribution
    focal loss: Li et al., "Generalized Focal Loss" (2020).
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
    """The decoupled, anchor-free head: a box branch (`cv2`) and a class branch (`cv3`) for each level.

    Each level has its channels and its stride, in pixels of the network input per cell. A side of a box is a
    distribution over `reg_max` bins, 0 .. reg_max - 1 cells (distribution focal loss). Detections are selected by
    class-aware non-maximum suppression.
    """

    terms = ("box", "cls", "dfl")  # of its loss, by the names of their gains in the settings
    class_branches = ("cv3",)  # members that are built for a number of classes

    def __init__(self, nc: int, channels: Sequence[int], strides: Sequence[int], reg_max: int):
        super().__init__()
        self.nc = nc
        self.reg_max = reg_max
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

    @property
    def class_outputs(self) -> list[nn.Conv2d]:
        """The layers whose output channels are the classes."""
        return [branch[-1] for branch in self.cv3]

    @torch.no_grad()
    def reset(self) -> None:
        """Sets what has a start of its own: the bins, and the biases of the last layers.

        Classes start rare: the class bias is the logit of about 5 objects in an image of 640 x 640.
        """
        self.dfl.reset()
        for box, classes, stride in zip(self.cv2, self.cv3, self.strides, strict=True):
            box[-1].bias.fill_(2.0)
            classes[-1].bias.fill_(math.log(5 / self.nc / (640 / stride) ** 2))

    def forward(self, maps: list[Tensor]) -> Predictions:
        again = self.training and self.rerun
        boxes = [_cells(rerun(one, x) if again else one(x)) for one, x in zip(self.cv2, maps, strict=True)]
        logits = [_cells(rerun(one, x) if again else one(x)) for one, x in zip(self.cv3, maps, strict=True)]
        shapes = tuple((x.shape[2], x.shape[3]) for x in maps)
        return Predictions(torch.cat(boxes, 1).transpose(1, 2), torch.cat(logits, 1).transpose(1, 2), shapes)

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """(B, A, 4) boxes xyxy in pixels of the network input and (B, A, C) scores in 0..1, both fp32.

        A side's distance is the expectation of its distribution over the bins 0 .. reg_max - 1 grid units.
        """
        boxes = predictions.boxes.transpose(1, 2)
        boxes = boxes.reshape(*boxes.shape[:2], 4, self.reg_max).float()
        bins = torch.arange(self.reg_max, device=boxes.device, dtype=boxes.dtype)
        ltrb = (boxes.softmax(dim=-1) * bins).sum(dim=-1)  # (B, A, 4) grid units; no matmul: autocast would round it
        points, scales = anchor_points(predictions.shapes, self.strides, boxes.device, boxes.dtype)
        return ltrb_to_xyxy(ltrb, points) * scales[:, None], predictions.logits.transpose(1, 2).float().sigmoid()

    def select(
        self,
        boxes_xyxy: Tensor,
        scores: Tensor,
        conf: float,
        iou: float,
        max_det: int = 300,
        multi_label: bool = True,
    ) -> list[Detections]:
        """Detections of each image from what `decode` returned; for the arguments see `non_max_suppression`."""
        return non_max_suppression(boxes_xyxy, scores, conf, iou, max_det, multi_label)


def _cells(x: Tensor) -> Tensor:
    """(B, channels, height, width) to (B, height * width, channels): a view of channels_last memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
