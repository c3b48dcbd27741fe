"""The criterion: a network's raw output and the ground truth in, sums and target weights out."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from detector.boxes import anchor_points, ltrb_to_xyxy, xyxy_to_ltrb
from detector.loss.assign import assign
from detector.loss.terms import box_sum, class_sum, dfl_sum, expected_ltrb


class Head(Protocol):
    """What the loss needs to know of a network's head (`detector.model.head.Detect`)."""

    terms: tuple[str, ...]  # names of its loss terms
    reg_max: int  # bins of a side's distance distribution
    strides: tuple[int, ...]  # pixels of the network input per cell, level by level


class RawOutput(Protocol):
    """What a network returns (`detector.model.head.Predictions`)."""

    boxes: Tensor  # (B, 4 * R, A) logits over R bins for each side
    logits: Tensor  # (B, C, A)
    shapes: tuple[tuple[int, int], ...]  # (height, width) of each level's grid


class Targets(Protocol):
    """The ground truth of a micro-batch (`detector.data.batch.Batch`)."""

    boxes_xyxy: Tensor  # (N, 4) pixels of the network input
    classes: Tensor  # (N,) int64
    image_index: Tensor  # (N,) int64


class BranchLoss(NamedTuple):
    """The loss of one branch of a network over one micro-batch: sums, not yet divided by anything."""

    terms: Tensor  # (T,) with gradient: the head's terms, in its order
    weight: Tensor  # scalar without gradient: the sum of target scores, what a window's sums are divided by


class DetectionLoss:
    """Sums of 1 - CIoU (box), binary cross-entropy (cls) and distribution focal loss (dfl), and the target weight.

    Adding up sums and weights over micro-batches gives exactly those of the joined batch, because images are assigned
    one by one and nothing here is a mean. Always computed in at least fp32, outside autocast.
    """

    def __init__(self, head: Head):
        self.terms = head.terms
        self.reg_max = head.reg_max
        self.strides = head.strides

    def __call__(self, predictions: RawOutput, targets: Targets) -> tuple[BranchLoss, ...]:
        """One BranchLoss per branch of the network, in the order of the network's `branches()`."""
        with torch.autocast(predictions.logits.device.type, enabled=False):
            return (self.branch(predictions, targets),)

    def branch(self, predictions: RawOutput, targets: Targets) -> BranchLoss:
        logits, boxes = at_least_fp32(predictions.logits), at_least_fp32(predictions.boxes)
        points, strides = anchor_points(predictions.shapes, self.strides, logits.device, logits.dtype)
        distribution = boxes.permute(0, 2, 1).unflatten(-1, (4, self.reg_max))  # (B, A, 4, R)
        with torch.no_grad():
            decoded_xyxy = ltrb_to_xyxy(expected_ltrb(distribution), points) * strides[:, None]
        gt_xyxy = targets.boxes_xyxy.to(logits.dtype)
        given = assign(
            logits, decoded_xyxy, predictions.shapes, self.strides, gt_xyxy, targets.classes, targets.image_index
        )

        goal = torch.zeros_like(logits)
        goal[given.image, targets.classes[given.box], given.anchor] = given.score
        picked = distribution[given.image, given.anchor]  # (P, 4, R)
        at = points[given.anchor]
        target_xyxy = gt_xyxy[given.box] / strides[given.anchor, None]  # grid units
        predicted_xyxy = ltrb_to_xyxy(expected_ltrb(picked), at)
        sums = {
            "box": box_sum(predicted_xyxy, target_xyxy, given.score),
            "cls": class_sum(logits, goal),
            "dfl": dfl_sum(picked, xyxy_to_ltrb(target_xyxy, at), given.score),
        }
        return BranchLoss(torch.stack([sums[name] for name in self.terms]), given.score.sum())


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precisions to fp32; fp32 and fp64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
