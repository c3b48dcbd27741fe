"""The proof of an export: the same images through checkpoint and file, and whether the same boxes come out.

Both go through the same letterbox and the same selection, each as a `Runtime`, so that what differs is the export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detector.data.image import letterbox
from detector.inference.infer import Limits, NetworkRuntime, Runtime
from detector.inference.runtimes.exported import ExportedRuntime
from detector.inference.runtimes.facts import Facts
from detector.model.selection import Detections

FLOOR = 0.05  # the least score of a box that must be found by both
MOST = 1000  # of an image, that many of the best


class Tolerance(NamedTuple):
    """By how much a box of the export may differ from the checkpoint's."""

    pixels: float  # a side, in pixels of the network input
    score: float
    alone: float  # share of boxes that the other one need not have at all


EXACT = Tolerance(0.5, 1e-3, 0.0)
HALF = Tolerance(2.0, 0.02, 0.02)  # float16 has three digits


@dataclass(frozen=True)
class Row:
    """The comparison of all images at one size and in one batch."""

    imgsz: int
    batch: int
    boxes: int  # of the checkpoint and of the export together
    alone: int  # of those, without a partner within the tolerance
    pixels: float  # the largest difference of a side
    score: float  # the largest difference of a score

    def passes(self, tolerance: Tolerance) -> bool:
        return self.boxes > 0 and self.alone <= tolerance.alone * self.boxes


@dataclass(frozen=True)
class Parity:
    rows: list[Row]
    tolerance: Tolerance
    floor: float  # the least score of the boxes that were compared

    @property
    def passed(self) -> bool:
        return all(row.passes(self.tolerance) for row in self.rows)

    def lines(self) -> list[str]:
        """The table, for the terminal."""
        lines = [f"parity    {'imgsz':>5} {'batch':>5} {'boxes':>6} {'unlike':>6} {'most px':>9} {'most score':>10}"]
        for row in self.rows:
            mark = "" if row.passes(self.tolerance) else "  FAILED"
            lines.append(
                f"          {row.imgsz:5} {row.batch:5} {row.boxes:6} {row.alone:6} {row.pixels:9.2g} {row.score:10.2g}"
                f"{mark}"
            )
        allowed = f"; {self.tolerance.alone:.0%} may be unlike" if self.tolerance.alone else ""
        lines.append(
            f"          boxes of both with a score of {self.floor:g} and more; alike: within {self.tolerance.pixels:g} "
            f"px and {self.tolerance.score:g}{allowed}"
        )
        return lines


def compare(checkpoint: NetworkRuntime, exported: ExportedRuntime, images: Sequence[NDArray[np.uint8]]) -> Parity:
    """The comparison at two sizes and in two batches, or at those that the export is bound to.

    The floor is 0.05, or what lies above the boxes of a network that is surer of none.
    """
    tolerance = HALF if exported.facts.half else EXACT
    rows: list[Row] = []
    for floor in (FLOOR, 1e-3, 0.0):
        floor = max(floor, exported.facts.conf)
        rows = [
            _row(checkpoint, exported, images, size, batch, floor, tolerance) for size, batch in cuts(exported.facts)
        ]
        if all(row.boxes for row in rows):
            break
    return Parity(rows, tolerance, floor)


def cuts(facts: Facts) -> list[tuple[int, int]]:
    """(imgsz, batch) of each comparison."""
    if not facts.dynamic:
        return [(facts.imgsz, facts.batch or 1)]
    other = max(facts.stride, facts.imgsz // 2 // facts.stride * facts.stride)
    other = other if other != facts.imgsz else 2 * facts.imgsz
    return [(size, batch) for size in (facts.imgsz, other) for batch in (1, 4)]


def _row(
    checkpoint: Runtime,
    exported: ExportedRuntime,
    images: Sequence[NDArray[np.uint8]],
    imgsz: int,
    batch: int,
    floor: float,
    tolerance: Tolerance,
) -> Row:
    facts = exported.facts
    # A box just above the floor may be just below it in the other one, which is therefore asked for a little more.
    # Rows of the head without suppression may hold an anchor twice, with two classes: both are to.
    limits = Limits(max(floor - tolerance.score, facts.conf), facts.iou, facts.max_det, facts.nms == "none")
    if facts.output == "raw":  # all candidates: which of two that are nearly equal is suppressed, a rounding decides
        limits = limits._replace(iou=1.0, max_det=2 * MOST)
    boxes = alone = 0
    pixels = score = 0.0
    for group in _groups(images, imgsz, facts, batch):
        pairs = zip(checkpoint.find(group, limits), exported.find(group, limits), strict=True)
        for one, other in ((a, b) for first, second in pairs for a, b in ((first, second), (second, first))):
            far, off = differences(_first(one.above(floor)), other, tolerance)
            boxes, alone = boxes + len(far), alone + int(((far > tolerance.pixels) | (off > tolerance.score)).sum())
            pixels, score = max(pixels, far.max(initial=0)), max(score, off.max(initial=0))
    return Row(imgsz, batch, boxes, alone, float(pixels), float(score))


def _first(detections: Detections) -> Detections:
    """The best of them. Of the other runtime there are twice as many, so that the last of these has its partner."""
    return Detections(*(field[:MOST] for field in detections))


def differences(
    these: Detections, those: Detections, tolerance: Tolerance = EXACT
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N,) by how many pixels, and by what score, that one of those of its class differs from each of these which does
    so the least, in tolerances. Infinite where there is none of its class.
    """
    if not len(these.scores) or not len(those.scores):
        return np.full(len(these.scores), np.inf), np.full(len(these.scores), np.inf)
    pixels = (these.boxes_xyxy[:, None] - those.boxes_xyxy[None]).abs().amax(dim=2).double()
    score = (these.scores[:, None] - those.scores[None]).abs().double()
    other = these.classes[:, None] != those.classes[None]
    pixels[other] = score[other] = torch.inf
    nearest = torch.maximum(pixels / tolerance.pixels, score / tolerance.score).argmin(dim=1, keepdim=True)
    return pixels.gather(1, nearest)[:, 0].numpy(), score.gather(1, nearest)[:, 0].numpy()


def _groups(images: Sequence[NDArray[np.uint8]], imgsz: int, facts: Facts, batch: int) -> Iterator[torch.Tensor]:
    """(B, H, W, C) letterboxed images of one shape each, at most `batch` of them."""
    by_shape: dict[tuple[int, ...], list[NDArray[np.uint8]]] = {}
    for image in images:
        fitted, _ = letterbox(image, imgsz, facts.stride, rect=facts.dynamic)
        by_shape.setdefault(fitted.shape, []).append(fitted)
    for alike in by_shape.values():
        for start in range(0, len(alike), batch):
            yield torch.from_numpy(np.stack(alike[start : start + batch]))
