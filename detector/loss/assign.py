"""Task-aligned assignment of ground-truth boxes to anchors, without a table over (images, boxes, anchors).

The usual implementation fills such a table for every anchor, though a box can only take anchors whose centres lie
inside it. On a feature map those are a rectangle of cells, so they are enumerated outright: memory and time follow the
area that boxes cover, not images x boxes x anchors, and a crowded image costs no more than its boxes.

Rule: Feng et al., "TOOD: Task-aligned one-stage object detection" (2021), with a least side for small boxes and, for a
head without non-maximum suppression, a second cut after conflicts are settled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detector.boxes import ciou

ALPHA = 0.5  # exponent of the class score in the alignment
BETA = 6.0  # exponent of the overlap
EPS = 1e-9  # pixels that a centre must be inside a box, and what keeps a soft target's denominator from 0


class Assignment(NamedTuple):
    """The anchors that were given a box, in P places that are as many as there could be.

    Every (image, anchor) with a score occurs once. The places that are left over have score 0 and count for nothing.
    """

    image: Tensor  # (P,) int64
    anchor: Tensor  # (P,) int64
    box: Tensor  # (P,) int64 index into the batch's boxes
    score: Tensor  # (P,) soft target of the box's class, in 0..1


def least_side(strides: Sequence[int]) -> int:
    """Pixels to which a shorter side of a box is grown for the inside test, so that tiny boxes find anchors.

    The second stride of a head, and the only one of a head with one level.
    """
    return strides[min(1, len(strides) - 1)]


def cells_inside(gt_xyxy: Tensor, shapes: Sequence[tuple[int, int]], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All (box, anchor) pairs where the anchor's centre lies inside the box, by more than EPS on all four sides.

    gt_xyxy (N, 4) in pixels; shapes (height, width) of each level's grid. Returns two (P,) int64 tensors: the box and
    the anchor of each pair, a box's anchors in rising order. Sides shorter than `least_side` are grown to it first,
    about the box's centre.
    """
    side, centre = gt_xyxy[:, 2:] - gt_xyxy[:, :2], (gt_xyxy[:, :2] + gt_xyxy[:, 2:]) / 2
    least = least_side(strides)
    low = torch.where(side < least, centre - least / 2, gt_xyxy[:, :2])
    high = torch.where(side < least, centre + least / 2, gt_xyxy[:, 2:])

    boxes, anchors, offset = [], [], 0
    for (height, width), stride in zip(shapes, strides, strict=True):
        limit = gt_xyxy.new_tensor((width, height))
        first = ((low / stride - 0.5).floor() + 1).clamp(min=0)  # (N, 2) column, row of the first cell inside
        last = torch.minimum((high / stride - 0.5).ceil() - 1, limit - 1)
        first += ((first + 0.5) * stride - low <= EPS).to(first.dtype)  # on the side, but for rounding
        last -= (high - (last + 0.5) * stride <= EPS).to(last.dtype)
        first, count = first.long(), (last - first + 1).clamp(min=0).long()
        per_box = count[:, 0] * count[:, 1]
        box = torch.repeat_interleave(per_box)
        start = per_box.cumsum(0) - per_box
        cell = torch.arange(len(box), device=box.device) - start[box]
        columns = count[box, 0]
        x = first[box, 0] + cell % columns
        y = first[box, 1] + torch.div(cell, columns, rounding_mode="floor")
        boxes.append(box)
        anchors.append(offset + y * width + x)
        offset += height * width
    return torch.cat(boxes), torch.cat(anchors)


def best_of_each_box(box: Tensor, value: Tensor, boxes: int, topk: int) -> Tensor:
    """(P,) bool: whether a pair is among the `topk` of its box with the highest value; of equals the earlier are.

    box (P,) int64 in 0..boxes-1, value (P,). A pair whose value is 0 is not.
    """
    order = value.argsort(descending=True, stable=True)
    order = order[box[order].argsort(stable=True)]  # by box, and falling within a box
    grouped = box[order]
    per_box = box.new_zeros(boxes).scatter_add_(0, box, torch.ones_like(box))
    start = per_box.cumsum(0) - per_box
    rank = torch.arange(len(order), device=order.device) - start[grouped]
    best = torch.empty_like(box, dtype=torch.bool)
    best[order] = rank < topk
    return best & (value > 0)


@torch.no_grad()
def assign(
    logits: Tensor,
    boxes_xyxy: Tensor,
    cells: tuple[Tensor, Tensor],
    gt_xyxy: Tensor,
    gt_classes: Tensor,
    gt_image: Tensor,
    topk: int = 10,
    topk2: int | None = None,
    among_takers: bool = False,
) -> Assignment:
    """Give anchors to boxes, image by image: the result of an image does not depend on the others in the batch.

    logits (B, C, A) and boxes_xyxy (B, A, 4) in pixels are the network's; cells are the `cells_inside` of gt_xyxy
    (N, 4) in pixels, gt_classes (N,), gt_image (N,), the ground truth.

    Every box takes its `topk` best aligned anchors of those inside it. An anchor that several boxes took goes to the
    one it overlaps most of all boxes it is inside of, be it one that did not take it (`among_takers`: of those that
    did). Then each box keeps the `topk2` best aligned of its anchors, None: all; it may have none left.

    Of equals the lower anchor, and the earlier box, comes first. An anchor that is not aligned at all (0) is not taken:
    its target would be 0, and all it could do is to raise a conflict.

    No shape here follows from what the network says: a GPU is never waited for.
    """
    images, anchors, boxes = boxes_xyxy.shape[0], boxes_xyxy.shape[1], len(gt_xyxy)
    box, anchor = cells
    if not len(box):
        return Assignment(box, anchor, box, logits.new_zeros(0))
    image = gt_image[box]
    overlap = ciou(gt_xyxy[box], boxes_xyxy[image, anchor])
    align = logits[image, gt_classes[box], anchor].sigmoid().pow(ALPHA) * overlap.pow(BETA)
    align = torch.where(overlap > 0, align, 0)

    place = image * anchors + anchor  # one number per (image, anchor)
    given = taken = best_of_each_box(box, align, boxes, topk)
    if not among_takers:
        takers = box.new_zeros(images * anchors).scatter_add_(0, place, taken.long())
        given = taken | ((takers[place] > 1) & (overlap > 0))
    given = wins(given, place, overlap, box, images * anchors, boxes)
    if topk2 is not None:
        given = best_of_each_box(box, torch.where(given, align, 0), boxes, topk2)

    # A box's best aligned anchor is worth its best overlap; the others in proportion.
    align, best = torch.where(given, align, 0), torch.where(given, overlap, 0)
    top_align = align.new_zeros(boxes).scatter_reduce(0, box, align, "amax")
    top_overlap = overlap.new_zeros(boxes).scatter_reduce(0, box, best, "amax")
    score = align * top_overlap[box] / (top_align[box] + EPS)
    return compact(given, min(len(box), boxes * topk), image, anchor, box, score)


def wins(rival: Tensor, place: Tensor, overlap: Tensor, box: Tensor, places: int, boxes: int) -> Tensor:
    """(P,) bool: whether a pair is the one of the rivals at its place with the highest overlap, the first of equals.

    rival (P,) bool, place (P,) int64 in 0..places-1, overlap (P,), box (P,) int64 in 0..boxes-1.
    """
    overlap = torch.where(rival, overlap, -1.0)
    best = overlap.new_full((places,), -1.0).scatter_reduce(0, place, overlap, "amax")
    claim = torch.where(rival & (overlap == best[place]), box, boxes)
    first = torch.full((places,), boxes, dtype=torch.int64, device=box.device).scatter_reduce(0, place, claim, "amin")
    return rival & (first[place] == box)


def compact(given: Tensor, size: int, image: Tensor, anchor: Tensor, box: Tensor, score: Tensor) -> Assignment:
    """The pairs that are given, in their order, in `size` places, of which they need no more; all tensors are (P,)."""
    number, pairs = given.cumsum(0), torch.arange(len(given), device=given.device)
    place = torch.where(given, number - 1, size)  # the last one takes those that are not given
    # What is left over is of pairs that differ: a GPU adds up gradients of one and the same pair one by one.
    index = torch.arange(size + 1, device=given.device).scatter_(0, place, pairs)[:size]
    filled = pairs[:size] < number[-1]
    return Assignment(image[index], anchor[index], box[index], torch.where(filled, score[index], 0))
