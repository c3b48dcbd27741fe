"""What an annotation says of one image, in whatever format: boxes as fractions of the image, and what was noticed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from detector.data.findings import Finding

ROUNDING = 1e-3  # how far outside 0..1 a written fraction is taken for rounding and clipped
FOUR_DECIMALS = 1e-4  # how far a side may lie outside before it is worth a finding: what writing 4 decimals does


class Box(NamedTuple):
    """One object of an annotation, as it is written there."""

    label: int
    xywh: tuple[float, float, float, float]  # centre and size, fractions of the image's width and height
    row: int  # the line or object, from 1
    ignored: bool = False  # a crowd or a difficult object: not to be learnt, and no fault of a detection
    area: float = np.nan  # square pixels, where it is another than the box's
    polygon: np.ndarray | None = None  # (P, 2) fractions


class Labels(NamedTuple):
    """The N objects of one image that can be used, inside it."""

    classes: np.ndarray  # (N,) int32
    boxes_xywh: np.ndarray  # (N, 4) float64 centre and size, fractions of the image's width and height
    rows: np.ndarray  # (N,) int32 the line or object in the annotation, from 1
    ignored: np.ndarray  # (N,) bool
    areas: np.ndarray  # (N,) float32 square pixels, NaN where it is the box's
    polygons: tuple[np.ndarray | None, ...]  # N times (P, 2) fractions, or empty where there is none
    findings: tuple[Finding, ...] = ()
    found: bool = True  # whether there is an annotation of this image


def packed(boxes: Sequence[Box], findings: Sequence[Finding] = (), found: bool = True) -> Labels:
    return Labels(
        classes=np.array([box.label for box in boxes], dtype=np.int32),
        boxes_xywh=np.array([box.xywh for box in boxes], dtype=np.float64).reshape(-1, 4),
        rows=np.array([box.row for box in boxes], dtype=np.int32),
        ignored=np.array([box.ignored for box in boxes], dtype=bool),
        areas=np.array([box.area for box in boxes], dtype=np.float32),
        polygons=tuple(box.polygon for box in boxes) if any(box.polygon is not None for box in boxes) else (),
        findings=tuple(findings),
        found=found,
    )


NO_LABELS = packed((), found=False)
BACKGROUND = packed(())


def usable(boxes: Sequence[Box], place: str, image: str, findings: Sequence[Finding] = ()) -> Labels:
    """The boxes that have an area inside the image, clipped to it, each once; what is not so becomes a finding.

    `place` is the annotation's as far as a box's number, as `labels/a.txt:`.
    """
    kept: dict[tuple[object, ...], Box] = {}
    noticed = list(findings)
    for box in boxes:
        inside, excess = clipped(box.xywh)
        kind = ""
        if box.xywh[2] <= 0 or box.xywh[3] <= 0:
            kind = "flat box"
        elif inside[2] <= 0 or inside[3] <= 0:
            kind = "outside box"
        elif (identity := (box.label, inside, box.ignored)) in kept:
            kind = "repeated box"
        else:
            kept[identity] = box._replace(xywh=inside)
            if excess > FOUR_DECIMALS:
                noticed.append(Finding("clipped box", f"{place}{box.row}", "", image, box.row))
        if kind:
            noticed.append(Finding(kind, f"{place}{box.row}", "", image, box.row))
    return packed(list(kept.values()), noticed)


def clipped(
    xywh: tuple[float, float, float, float],
) -> tuple[tuple[float, float, float, float], float]:
    """The part of a box inside 0..1, and how far the box reaches out, at most, on any side."""
    x, y, width, height = xywh
    left, right, top, bottom = x - width / 2, x + width / 2, y - height / 2, y + height / 2
    excess = max(-left, -top, right - 1, bottom - 1)
    if excess <= 0:
        return xywh, excess
    left, right, top, bottom = max(left, 0.0), min(right, 1.0), max(top, 0.0), min(bottom, 1.0)
    return ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), excess
