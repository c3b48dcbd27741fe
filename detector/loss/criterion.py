"""The criterion: a network's raw output and the ground truth in, sums and target weights out."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from detector.boxes import anchor_points, ltrb_to_xyxy, xyxy_to_ltrb
from detector.loss.assign import assign, cells_inside
from detector.loss.terms import box_sum, class_sum, dfl_sum, l1_sum, ltrb_of


class Rule(NamedTuple):
    """How the boxes of one branch are assigned; see `assign`."""

    topk: int
    topk2: int | None


ONE_TO_MANY = Rule(10, None)  # of a network's first branch
ONE_TO_ONE = Rule(7, 1)  # of its second: one anchor a box, so that detections need no non-maximum suppression


def branch_shares(branches: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The weights of a network's branches in the loss, in the first epoch of a run and in the last.

    From epoch to epoch they move evenly: the branch with many positives a box teaches first, and the one that is used
    in the end comes to the fore (progressive loss balancing).
    """
    return ((1.0,), (1.0,)) if branches == 1 else ((0.8, 0.2), (0.1, 0.9))


class Head(Protocol):
    """What the loss needs to know of a network's head (`detector.model.head.Detect`)."""

    terms: tuple[str, ...]  # names of its loss terms
    reg_max: int  # bins of a side's distance distribution; 1: a side is a plain distance
    strides: tuple[int, ...]  # pixels of the network input per cell, level by level


class RawOutput(Protocol):
    """What a network returns (`detector.model.head.Predictions`)."""

    boxes: Tensor  # (B, 4 * R, A) logits over R bins for each side, or with R = 1 its distance in grid units
    logits: Tensor  # (B, C, A)
    shapes: tuple[tuple[int, int], ...]  # (height, width) of each level's grid
    one2one: "RawOutput | None"  # of the second branch; None: there is one alone


class Targets(Protocol):
    """The ground truth of a micro-batch (`detector.data.batch.Batch`)."""

    boxes_xyxy: Tensor  # (N, 4) pixels of the network input
    classes: Tensor  # (N,) int64
    image_index: Tensor  # (N,) int64

    @property
    def host_boxes_xyxy(self) -> Tensor:
        """`boxes_xyxy` in the host's memory, where shapes that follow from them are known without waiting."""


class BranchLoss(NamedTuple):
    """The loss of one branch of a network over one micro-batch: sums, not yet divided by anything."""

    terms: Tensor  # (T,) with gradient: the head's terms, in its order
    weight: Tensor  # scalar without gradient: the sum of target scores, what a window's sums are divided by


class DetectionLoss:
    """Sums of the head's terms and the target weight, branch by branch.

    The terms: 1 - CIoU (box), binary cross-entropy (cls), and for the sides of a box distribution focal loss (dfl) or,
    where they are plain distances, their absolute difference (l1).

    Adding up sums and weights over micro-batches gives exactly those of the joined batch, because images are assigned
    one by one and nothing here is a mean. Always computed in at least fp32, outside autocast.

    class_weights (C,): factors on the class term of each class, constants of the run. The target weight is without
    them: it also divides box and dfl, and what a class weighs shall not depend on the company that it has in a window.
    """

    def __init__(self, head: Head, class_weights: Tensor | None = None):
        self.terms = head.terms
        self.reg_max = head.reg_max
        self.strides = head.strides
        self.class_weights = class_weights

    def __call__(self, predictions: RawOutput, targets: Targets) -> tuple[BranchLoss, ...]:
        """One BranchLoss per branch of the network, in the order of the network's `branches()`."""
        with torch.autocast(predictions.logits.device.type, enabled=False):
            cells = self.cells(predictions, targets)
            branches = [self.branch(predictions, targets, cells, ONE_TO_MANY)]
            if predictions.one2one is not None:
                branches.append(self.branch(predictions.one2one, targets, cells, ONE_TO_ONE))
        return tuple(branches)

    def cells(self, predictions: RawOutput, targets: Targets) -> tuple[Tensor, Tensor]:
        """`cells_inside` the boxes, found on the host and sent to where the predictions are."""
        logits = predictions.logits
        boxes_xyxy = targets.host_boxes_xyxy.to(torch.promote_types(logits.dtype, torch.float32))
        box, anchor = cells_inside(boxes_xyxy, predictions.shapes, self.strides)
        return sent(box, logits.device), sent(anchor, logits.device)

    def branch(self, predictions: RawOutput, targets: Targets, cells: tuple[Tensor, Tensor], rule: Rule) -> BranchLoss:
        """Where a decoded box is not finite, neither is the weight: no anchor would be given to a box for it."""
        logits, boxes = at_least_fp32(predictions.logits), at_least_fp32(predictions.boxes)
        points, strides = anchor_points(predictions.shapes, self.strides, logits.device, logits.dtype)
        raw = boxes.permute(0, 2, 1).unflatten(-1, (4, self.reg_max))  # (B, A, 4, R)
        with torch.no_grad():
            decoded_xyxy = ltrb_to_xyxy(ltrb_of(raw), points) * strides[:, None]
        gt_xyxy = targets.boxes_xyxy.to(logits.dtype)
        truth = gt_xyxy, targets.classes, targets.image_index
        given = assign(logits, decoded_xyxy, cells, *truth, *rule)

        goal, place = torch.zeros_like(logits), (given.image, targets.classes[given.box], given.anchor)
        goal.index_put_(place, given.score, accumulate=True)  # left-over places add 0
        picked = raw[given.image, given.anchor]  # (P, 4, R)
        at, stride = points[given.anchor], strides[given.anchor, None]
        target_xyxy = gt_xyxy[given.box] / stride  # grid units
        target_ltrb, ltrb = xyxy_to_ltrb(target_xyxy, at), ltrb_of(picked)
        sums = {
            "box": box_sum(ltrb_to_xyxy(ltrb, at), target_xyxy, given.score),
            "cls": class_sum(logits, goal, None if self.class_weights is None else self.class_weights.to(logits)),
        }
        if self.reg_max > 1:
            sums["dfl"] = dfl_sum(picked, target_ltrb, given.score)
        else:
            height, width = (side * self.strides[0] for side in predictions.shapes[0])  # of the network input
            unit = stride / torch.stack([logits.new_full((), side) for side in (width, height, width, height)])
            sums["l1"] = l1_sum(ltrb, target_ltrb, unit, given.score)
        weight = torch.where(decoded_xyxy.isfinite().all(), given.score.sum(), torch.nan)
        return BranchLoss(torch.stack([sums[name] for name in self.terms]), weight)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precisions to fp32; fp32 and fp64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
