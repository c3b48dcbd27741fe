"""Sliced inference: a large image is looked at in tiles, and what they find is put together.

Akyon et al., "Slicing aided hyper inference and fine-tuning for small object detection" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOUCHING = 0.01  # of a tile's side: a box that ends so near to its inner border is taken for cut


class Tile(NamedTuple):
    """A part of an image, pixels."""

    left: int
    top: int
    right: int
    bottom: int


def tiles_of(height: int, width: int, side: int, overlap: float) -> list[Tile]:
    """Squares of `side` pixels that cover an image, row by row, and then the whole image, where that is larger.

    Neighbours share at least `overlap` of their side. Of an image that a square holds there is but one tile, itself.
    """
    tiles = [
        Tile(left, top, min(left + side, width), min(top + side, height))
        for top in _starts(height, side, overlap)
        for left in _starts(width, side, overlap)
    ]
    return tiles if len(tiles) == 1 else [*tiles, Tile(0, 0, width, height)]


def _starts(length: int, side: int, overlap: float) -> Iterator[int]:
    """Where tiles begin along a side of the image: as evenly spread as they go, the last one flush with its end."""
    if length <= side:
        return iter((0,))
    step = max(1, math.floor(side * (1 - overlap)))
    count = math.ceil((length - side) / step) + 1
    return (round(number * (length - side) / (count - 1)) for number in range(count))


def cut_by(boxes_xyxy: NDArray[np.float32], tile: Tile, height: int, width: int) -> NDArray[np.bool_]:
    """(N,) whether boxes, in pixels of the image, end at a border of their tile that is none of the image."""
    near_x, near_y = TOUCHING * (tile.right - tile.left), TOUCHING * (tile.bottom - tile.top)
    return (
        ((boxes_xyxy[:, 0] <= tile.left + near_x) & (tile.left > 0))
        | ((boxes_xyxy[:, 1] <= tile.top + near_y) & (tile.top > 0))
        | ((boxes_xyxy[:, 2] >= tile.right - near_x) & (tile.right < width))
        | ((boxes_xyxy[:, 3] >= tile.bottom - near_y) & (tile.bottom < height))
    )


def taken_of_whole(boxes_xyxy: NDArray[np.float32], side: int, overlap: float) -> NDArray[np.bool_]:
    """(N,) which boxes of the look at the whole image count: those that are larger than what neighbours share.

    Any other object is whole in one tile at least, which shows it better.
    """
    return (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).max(axis=1) > overlap * side


def merged(
    boxes_xyxy: NDArray[np.float32],
    scores: NDArray[np.float32],
    classes: NDArray[np.int64],
    cut: NDArray[np.bool_],
    iou: float,
    max_det: int,
) -> NDArray[np.int64]:
    """Which of the boxes of all tiles are kept, best first, at most `max_det`.

    Greedy NMS per class, in the order of the scores, whole boxes before those that a tile cut. A box goes whose IoU
    with a kept one of its class exceeds `iou`; a cut one goes also where more than `iou` of its own area lies in a kept
    one: it is a part of an object that another tile, or the whole image, shows better.
    """
    areas = _areas(boxes_xyxy)
    near = _Near(boxes_xyxy, classes)
    gone = np.zeros(len(boxes_xyxy), dtype=bool)  # or kept already
    kept: list[int] = []
    for i in np.lexsort((-scores, cut)):
        if gone[i]:
            continue
        kept.append(int(i))
        gone[i] = True
        rest = near.of(i)
        rest = rest[~gone[rest]]
        low = np.maximum(boxes_xyxy[rest, :2], boxes_xyxy[i, :2])
        high = np.minimum(boxes_xyxy[rest, 2:], boxes_xyxy[i, 2:])
        shared = (high - low).clip(min=0).prod(axis=1)
        union = areas[rest] + areas[i] - shared
        gone[rest[(shared > iou * union) | (cut[rest] & (shared > iou * areas[rest]))]] = True
    best = np.array(kept, dtype=np.int64)
    return best[np.argsort(-scores[best], kind="stable")][:max_det]


class _Near:
    """Which boxes of the same class may overlap a box: those that begin left of its right side, and not further left of
    its left side than they are wide. They are sought among boxes of about one width each: of 30,000 boxes, which are
    those of a hundred tiles in validation, a comparison of all with all takes half a minute.
    """

    def __init__(self, boxes_xyxy: NDArray[np.float32], classes: NDArray[np.int64]) -> None:
        self._left, self._right = boxes_xyxy[:, ::2].astype(np.float64).T  # differences are exact
        self._classes = classes
        _, exponents = np.frexp(self._right - self._left)  # widths below 2 ** exponent
        self._groups: dict[int, list[tuple[NDArray[np.int64], NDArray[np.float64], float]]] = {}
        for label in np.unique(classes):
            groups = self._groups[int(label)] = []
            for exponent in np.unique(exponents[classes == label]):
                members = np.flatnonzero((classes == label) & (exponents == exponent))
                members = members[np.argsort(self._left[members], kind="stable")]
                groups.append((members, self._left[members], 2.0**exponent))

    def of(self, i: int) -> NDArray[np.int64]:
        """Their numbers, that of box i among them."""
        found = []
        for members, lefts, widest in self._groups[int(self._classes[i])]:
            first = np.searchsorted(lefts, self._left[i] - widest)
            found.append(members[first : np.searchsorted(lefts, self._right[i], side="right")])
        return np.concatenate(found)


def _areas(boxes_xyxy: NDArray[np.float32]) -> NDArray[np.float32]:
    return (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(min=0).prod(axis=1)
