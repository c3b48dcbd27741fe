"""Task-aligned assignment of ground-truth boxes to anchors, without a table over (images, boxes, anchors).

The usual implementation fills such a table for every anchor, though a box can only take anchors whose centres lie
inside it. On a feature map those are a rectangle of cells, so they are enumerated outright: memory and time follow the
area that boxes cover, not images x boxes x anchors, and a crowded image costs no more than its boxes.

Rule: Feng et al., "TOOD: Task-aligned one-stage object detection" (2021), with a minimum size for small boxes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detector.boxes import ciou

ALPHA = 0.5  # exponent of the class score in the alignment
BETA = 6.0  # exponent of the overlap
MIN_SIDE = 16.0  # pixels: a shorter side is grown to this for the inside test, so that tiny boxes find anchors
EPS = 1e-9


class Assignment(NamedTuple):
    """The P anchors that were given a box; every (image, anchor) occurs at most once."""

    image: Tensor  # (P,) int64
    anchor: Tensor  # (P,) int64
    box: Tensor  # (P,) int64 index into the batch's boxes
    score: Tensor  # (P,) soft target of the box's class, in 0..1


def cells_inside(gt_xyxy: Tensor, shapes: Sequence[tuple[int, int]], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All (box, anchor) pairs where the anchor's centre lies strictly inside the box.

    gt_xyxy (N, 4) in pixels; shapes (height, width) of each level's grid. Returns two (P,) int64 tensors: the box and
    the anchor of each pair. Sides shorter than MIN_SIDE are grown about their centre first.
    """
    centre = (gt_xyxy[:, :2] + gt_xyxy[:, 2:]) / 2
    half = (gt_xyxy[:, 2:] - gt_xyxy[:, :2]).clamp(min=MIN_SIDE) / 2
    grown = (gt_xyxy[:, 2:] - gt_xyxy[:, :2]) < MIN_SIDE
    low = torch.where(grown, centre - half, gt_xyxy[:, :2])
    high = torch.where(grown, centre + half, gt_xyxy[:, 2:])

    boxes, anchors, offset = [], [], 0
    for (height, width), stride in zip(shapes, strides, strict=True):
        limit = gt_xyxy.new_tensor((width, height))
        first = ((low / stride - 0.5).floor() + 1).clamp(min=0)  # (N, 2) column, row of the first cell inside
        last = torch.minimum((high / stride - 0.5).ceil() - 1, limit - 1)
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
    """Indices of the `topk` pairs of each box with the highest value; among equals the earlier pair wins.

    box (P,) int64 in 0..boxes-1, value (P,). Returns (Q,) int64, grouped by box, falling value within a box.
    """
    order = value.argsort(descending=True, stable=True)
    order = order[box[order].argsort(stable=True)]
    grouped = box[order]
    per_box = torch.bincount(box, minlength=boxes)
    start = per_box.cumsum(0) - per_box
    rank = torch.arange(len(order), device=order.device) - start[grouped]
    return order[rank < topk]


@torch.no_grad()
def assign(
    logits: Tensor,
    boxes_xyxy: Tensor,
    shapes: Sequence[tuple[int, int]],
    strides: Sequence[int],
    gt_xyxy: Tensor,
    gt_classes: Tensor,
    gt_image: Tensor,
    topk: int = 10,
) -> Assignment:
    """Give anchors to boxes, image by image: the result of an image does not depend on the others in the batch.

    logits (B, C, A) and boxes_xyxy (B, A, 4) in pixels are the network's; gt_xyxy (N, 4) in pixels, gt_classes (N,),
    gt_image (N,) the ground truth. Every box takes its `topk` best aligned anchors among those inside it; an anchor
    that several boxes took goes to the one it overlaps most (the first of equals).
    """
    images, anchors, boxes = boxes_xyxy.shape[0], boxes_xyxy.shape[1], len(gt_xyxy)
    box, anchor = cells_inside(gt_xyxy, shapes, strides)
    image = gt_image[box]
    overlap = ciou(gt_xyxy[box], boxes_xyxy[image, anchor]).clamp(min=0)
    align = logits[image, gt_classes[box], anchor].sigmoid().pow(ALPHA) * overlap.pow(BETA)

    taken = best_of_each_box(box, align, boxes, topk)
    box, anchor, image, overlap, align = box[taken], anchor[taken], image[taken], overlap[taken], align[taken]

    place = image * anchors + anchor  # one number per (image, anchor)
    best = torch.full((images * anchors,), -1.0, dtype=overlap.dtype, device=overlap.device)
    best = best.scatter_reduce(0, place, overlap, "amax")
    first = torch.full((images * anchors,), boxes, dtype=torch.int64, device=box.device)
    claim = torch.where(overlap == best[place], box, boxes)
    first = first.scatter_reduce(0, place, claim, "amin")
    won = first[place] == box
    box, anchor, image, overlap, align = box[won], anchor[won], image[won], overlap[won], align[won]

    # A box's best aligned anchor is worth its best overlap; the others in proportion.
    top_align = align.new_zeros(boxes).scatter_reduce(0, box, align, "amax")
    top_overlap = overlap.new_zeros(boxes).scatter_reduce(0, box, overlap, "amax")
    score = align * top_overlap[box] / (top_align[box] + EPS)
    return Assignment(image, anchor, box, score)
