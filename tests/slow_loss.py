"""The detection loss as its specification says it, one box and one anchor at a time: slow, and sharing no code.

The terms are of torch's fp64 scalars, so that autograd gives the gradients that the fast ones must have.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Scalar = Tensor | float
Box = Sequence[Scalar]  # x1, y1, x2, y2


class Raw(NamedTuple):
    """What a network returns; see `detector.model.head.Predictions`."""

    boxes: Tensor
    logits: Tensor
    shapes: tuple[tuple[int, int], ...]
    one2one: "Raw | None" = None


class Truth(NamedTuple):
    boxes_xyxy: Tensor
    classes: Tensor
    image_index: Tensor

    @property
    def host_boxes_xyxy(self) -> Tensor:
        return self.boxes_xyxy


class Cell(NamedTuple):
    """An anchor: its centre in grid units, its stride in pixels."""

    x: float
    y: float
    stride: int


class Claim(NamedTuple):
    """A box and an anchor whose centre is inside it."""

    box: int
    anchor: int
    overlap: float
    align: float


def cells(shapes: Sequence[tuple[int, int]], strides: Sequence[int]) -> list[Cell]:
    return [
        Cell(column + 0.5, row + 0.5, stride)
        for (height, width), stride in zip(shapes, strides, strict=True)
        for row in range(height)
        for column in range(width)
    ]


def atan(x: Scalar) -> Scalar:
    return torch.atan(x) if isinstance(x, Tensor) else math.atan(x)


def constant(x: Scalar) -> float:
    return x.item() if isinstance(x, Tensor) else x


def ciou(a: Box, b: Box, eps: float = 1e-7) -> Scalar:
    w1, h1, w2, h2 = a[2] - a[0], a[3] - a[1] + eps, b[2] - b[0], b[3] - b[1] + eps
    wide = max(min(a[2], b[2]) - max(a[0], b[0]), a[0] * 0)
    tall = max(min(a[3], b[3]) - max(a[1], b[1]), a[0] * 0)
    iou = wide * tall / (w1 * h1 + w2 * h2 - wide * tall + eps)
    c2 = (max(a[2], b[2]) - min(a[0], b[0])) ** 2 + (max(a[3], b[3]) - min(a[1], b[1])) ** 2 + eps
    rho2 = ((a[0] + a[2] - b[0] - b[2]) ** 2 + (a[1] + a[3] - b[1] - b[3]) ** 2) / 4
    v = 4 / math.pi**2 * (atan(w2 / h2) - atan(w1 / h1)) ** 2
    return iou - (rho2 / c2 + constant(v / (v - iou + 1 + eps)) * v)


def distances(raw: Tensor) -> Tensor:
    """(4, R) raw output of an anchor to (4,) distances in grid units."""
    if raw.shape[1] == 1:
        return raw[:, 0]
    return torch.stack([torch.softmax(side, 0) @ torch.arange(16.0, dtype=side.dtype) for side in raw])


def corners(ltrb: Box, cell: Cell) -> Box:
    """In grid units."""
    return cell.x - ltrb[0], cell.y - ltrb[1], cell.x + ltrb[2], cell.y + ltrb[3]


def is_inside(box: Sequence[float], cell: Cell, least: float) -> bool:
    x, y = cell.x * cell.stride, cell.y * cell.stride
    for low, high, at in ((box[0], box[2], x), (box[1], box[3], y)):
        if high - low < least:
            middle = (low + high) / 2
            low, high = middle - least / 2, middle + least / 2
        if not (at - low > 1e-9 and high - at > 1e-9):
            return False
    return True


def assign_image(
    raw: Tensor,
    scores: Tensor,
    boxes: Tensor,
    classes: Sequence[int],
    anchors: Sequence[Cell],
    least: float,
    topk: int,
    topk2: int | None,
    among_takers: bool = False,
) -> dict[int, tuple[int, float]]:
    """{anchor: (box, soft target)} of an image; raw (A, 4, R), scores (C, A), boxes (N, 4) in pixels."""
    claims: list[Claim] = []
    sides = [corners(distances(one).tolist(), cell) for one, cell in zip(raw, anchors, strict=True)]
    for box, truth in enumerate(boxes.tolist()):
        for anchor, cell in enumerate(anchors):
            if is_inside(truth, cell, least):
                overlap = max(ciou(truth, [side * cell.stride for side in sides[anchor]]), 0.0)
                align = float(scores[classes[box], anchor]) ** 0.5 * overlap**6
                claims.append(Claim(box, anchor, overlap, align))

    def best(claims: list[Claim], count: int) -> list[Claim]:
        return sorted(claims, key=lambda claim: -claim.align)[:count]

    taken = []
    for box in range(len(boxes)):
        taken += [claim for claim in best([one for one in claims if one.box == box], topk) if claim.align > 0]
    given = []
    for anchor in range(len(anchors)):
        takers = [claim for claim in taken if claim.anchor == anchor]
        if len(takers) > 1:
            rivals = takers if among_takers else [claim for claim in claims if claim.anchor == anchor]
            takers = [max(rivals, key=lambda claim: claim.overlap)]
        given += takers
    result = {}
    for box in range(len(boxes)):
        mine = [claim for claim in given if claim.box == box]
        if topk2 is not None:
            mine = best(mine, topk2)
        for claim in mine:
            most = max(one.align for one in mine), max(one.overlap for one in mine)
            result[claim.anchor] = box, claim.align * most[1] / (most[0] + 1e-9)
    return result


def branch(
    output: Raw, truth: Truth, strides: Sequence[int], reg_max: int, topk: int, topk2: int | None
) -> tuple[dict[str, Tensor], float, list[dict[int, tuple[int, float]]]]:
    """The terms of a branch, by name and with gradient, its target weight, and the assignment of each image."""
    anchors = cells(output.shapes, strides)
    width, height = output.shapes[0][1] * strides[0], output.shapes[0][0] * strides[0]
    least = strides[1] if len(strides) > 1 else strides[0]
    zero = output.boxes.sum() * 0
    sides_term = "dfl" if reg_max > 1 else "l1"
    terms, weight, assigned = {"box": zero, "cls": zero, sides_term: zero}, 0.0, []
    for image in range(len(output.logits)):
        mine = truth.image_index == image
        boxes, classes = truth.boxes_xyxy[mine].double(), truth.classes[mine].tolist()
        raw = output.boxes[image].T.reshape(len(anchors), 4, reg_max)
        logits = output.logits[image]
        found = assign_image(raw.detach(), torch.sigmoid(logits.detach()), boxes, classes, anchors, least, topk, topk2)
        assigned.append(found)
        targets = torch.zeros_like(logits)
        for anchor, (box, score) in found.items():
            targets[classes[box], anchor] = score
            weight += score
            cell, ltrb = anchors[anchor], distances(raw[anchor]).unbind()
            goal = [side / cell.stride for side in boxes[box].tolist()]
            terms["box"] = terms["box"] + score * (1 - ciou(corners(ltrb, cell), goal))
            sides = [cell.x - goal[0], cell.y - goal[1], goal[2] - cell.x, goal[3] - cell.y]
            for side in range(4):
                if reg_max > 1:
                    t = min(max(sides[side], 0.0), 14.99)
                    left, log_p = int(t), torch.log_softmax(raw[anchor, side], 0)
                    loss = -((left + 1 - t) * log_p[left] + (t - left) * log_p[left + 1])
                else:
                    loss = abs(ltrb[side] - sides[side]) * cell.stride / (width if side in (0, 2) else height)
                terms[sides_term] = terms[sides_term] + score * loss / 4
        p = torch.sigmoid(logits)
        terms["cls"] = terms["cls"] - (targets * torch.log(p) + (1 - targets) * torch.log(1 - p)).sum()
    return terms, weight, assigned
