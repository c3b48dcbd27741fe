"""The detection head: from feature maps to raw predictions, and from those to boxes, scores and detections.

A head owns what belongs to its kind: the names of its loss terms, how its output is decoded, how detections are
selected (by non-maximum suppression or without), and which of its layers depend on the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from detector.boxes import anchor_points, ltrb_to_xyxy
from detector.errors import ConfigError
from detector.model.blocks.conv import Conv, DWConv
from detector.model.recompute import rerun
from detector.model.selection import Detections, best_candidates, non_max_suppression


class Predictions(NamedTuple):
    """Raw output of a network, in training and in inference. Anchors: level by level (P3, P4, P5), each row-major."""

    boxes: Tensor  # (B, 4 * reg_max, A) logits of the distances left, top, right, bottom; reg_max 1: the distances
    logits: Tensor  # (B, C, A)
    shapes: tuple[tuple[int, int], ...]  # (height, width) of each level's grid
    one2one: Predictions | None = None  # of the one-to-one branch, where there are two and both are trained


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
        weight = self.conv.weight
        if not weight.is_meta:  # an arange there would import torch's compiler, which takes seconds
            bins = torch.arange(self.conv.in_channels, dtype=weight.dtype, device=weight.device)
            weight.copy_(bins.view(1, -1, 1, 1))


class Detect(nn.Module):
    """The decoupled, anchor-free head: a box branch (`cv2`) and a class branch (`cv3`) for each level.

    Each level has its channels and its stride, in pixels of the network input per cell. A side of a box is a
    distribution over `reg_max` bins, 0 .. reg_max - 1 cells (distribution focal loss), or with reg_max 1 the distance
    itself, in cells. `separable` class branches have depthwise convolutions.

    Detections are selected by class-aware non-maximum suppression. A head with `end2end` has each branch twice: trained
    one-to-many, as above, and one-to-one, whose output needs no suppression. The latter reads the maps without passing
    a gradient on, so that it trains itself alone. `nms` says which one is used for inference. Wang et al., "YOLOv10:
    Real-time end-to-end object detection" (2024).
    """

    def __init__(
        self,
        nc: int,
        channels: Sequence[int],
        strides: Sequence[int],
        reg_max: int = 16,
        end2end: bool = False,
        separable: bool = True,
        class_channels: int | None = None,
    ):
        super().__init__()
        self.nc = nc
        self.reg_max = reg_max
        self.strides = tuple(strides)
        self.end2end = end2end
        self.nms = True  # whether inference takes the one-to-many branches and suppresses, see `choose`
        self.rerun = False  # whether branches compute their activations again, see `Network.set_checkpoint`
        box = max(16, channels[0] // 4, 4 * reg_max)
        # A network keeps the width that it was first trained with, though its classes are others by now.
        hidden = self.class_channels = class_channels or max(channels[0], min(nc, 100))
        before = _separable if separable else _full

        def boxes() -> nn.ModuleList:
            branches = (
                nn.Sequential(Conv(c, box, 3), Conv(box, box, 3), nn.Conv2d(box, 4 * reg_max, 1)) for c in channels
            )
            return nn.ModuleList(branches)

        def classes() -> nn.ModuleList:
            return nn.ModuleList(
                nn.Sequential(before(c, hidden), before(hidden, hidden), nn.Conv2d(hidden, nc, 1)) for c in channels
            )

        self.cv2, self.cv3 = boxes(), classes()
        if reg_max > 1:
            self.dfl = DFL(reg_max)
        if end2end:  # not copies: fake tensors, which memory is estimated with, cannot be copied
            self.one2one_cv2, self.one2one_cv3 = boxes(), classes()

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of its loss terms, in the criterion's order."""
        return ("box", "cls", "dfl") if self.reg_max > 1 else ("box", "cls", "l1")

    gains = ("box", "cls", "dfl")  # the settings that hold the terms' gains

    @property
    def class_branches(self) -> tuple[str, ...]:
        """Members that are built for a number of classes."""
        return tuple(name for name in ("cv3", "one2one_cv3") if hasattr(self, name))

    @property
    def class_outputs(self) -> list[nn.Conv2d]:
        """The layers whose output channels are the classes."""
        return [branch[-1] for name in self.class_branches for branch in getattr(self, name)]

    @torch.no_grad()
    def reset(self) -> None:
        """Sets what has a start of its own: the bins, and the biases of the last layers.

        Classes start rare: the class bias is the logit of about 5 objects in an image of 640 x 640. Both branches of
        two start alike.
        """
        if self.reg_max > 1:
            self.dfl.reset()
        for box, classes, stride in zip(self.cv2, self.cv3, self.strides, strict=True):
            box[-1].bias.fill_(2.0)
            classes[-1].bias.fill_(math.log(5 / self.nc / (640 / stride) ** 2))
        if self.end2end:
            self.one2one_cv2.load_state_dict(self.cv2.state_dict())
            self.one2one_cv3.load_state_dict(self.cv3.state_dict())

    def choose(self, nms: bool | Literal["auto"]) -> None:
        """Select the branches for inference, with suppression or without; auto: with.

        ConfigError where there is no such branch.
        """
        if nms not in (True, False, "auto"):
            raise ConfigError(f"nms={nms!r}: should be true, false or auto")
        chosen = nms == "auto" or bool(nms)
        if not chosen and not self.end2end:
            raise ConfigError("nms=false: this model has no branch whose boxes need no suppression (v26 and v10 have)")
        self.nms = chosen

    def keep_chosen(self) -> None:
        """Drop the branches that inference does not take."""
        if not self.end2end:
            return
        if not self.nms:
            self.cv2, self.cv3 = self.one2one_cv2, self.one2one_cv3
        del self.one2one_cv2, self.one2one_cv3
        self.end2end = False

    def forward(self, maps: list[Tensor]) -> Predictions:
        if not self.end2end:
            return self._branch(maps, self.cv2, self.cv3)
        if not self.training:
            chosen = (self.cv2, self.cv3) if self.nms else (self.one2one_cv2, self.one2one_cv3)
            return self._branch(maps, *chosen)
        one2many = self._branch(maps, self.cv2, self.cv3)
        one2one = self._branch([x.detach() for x in maps], self.one2one_cv2, self.one2one_cv3)
        return one2many._replace(one2one=one2one)

    def _branch(self, maps: list[Tensor], box: nn.ModuleList, classes: nn.ModuleList) -> Predictions:
        again = self.training and self.rerun
        boxes = [_cells(rerun(one, x) if again else one(x)) for one, x in zip(box, maps, strict=True)]
        logits = [_cells(rerun(one, x) if again else one(x)) for one, x in zip(classes, maps, strict=True)]
        shapes = tuple((x.shape[2], x.shape[3]) for x in maps)
        return Predictions(torch.cat(boxes, 1).transpose(1, 2), torch.cat(logits, 1).transpose(1, 2), shapes)

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """(B, A, 4) boxes xyxy in pixels of the network input and (B, A, C) scores in 0..1, both fp32.

        A side's distance is the expectation of its distribution over the bins 0 .. reg_max - 1 grid units, or itself.
        """
        boxes = predictions.boxes.transpose(1, 2)
        boxes = boxes.reshape(*boxes.shape[:2], 4, self.reg_max).float()
        if self.reg_max > 1:
            bins = torch.arange(self.reg_max, device=boxes.device, dtype=boxes.dtype)
            ltrb = (boxes.softmax(dim=-1) * bins).sum(dim=-1)  # (B, A, 4) grid units; no matmul: autocast would round
        else:
            ltrb = boxes.squeeze(-1)
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
        """Detections of each image from what `decode` returned; for the arguments see `non_max_suppression`.

        `iou` means nothing where nothing is suppressed.
        """
        if self.nms:
            return non_max_suppression(boxes_xyxy, scores, conf, iou, max_det, multi_label)
        return best_candidates(boxes_xyxy, scores, conf, max_det, multi_label)


def _full(inputs: int, outputs: int) -> nn.Module:
    return Conv(inputs, outputs, 3)


def _separable(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(DWConv(inputs, inputs, 3), Conv(inputs, outputs))


def _cells(x: Tensor) -> Tensor:
    """(B, channels, height, width) to (B, height * width, channels): a view of channels_last memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
