"""Images on a plane, and the window that training sees of it: a random perspective of one image or of a mosaic.

Most of the plane is thrown away again, so it is never drawn: without rotation, shear and perspective each image is
cropped and resized straight into its part of the window.
"""

from math import ceil
from typing import NamedTuple

import cv2
import numpy as np
from numpy.random import Generator

from detector.data.augment import Augmentation, Example, areas, clipped_boxes, perspective_matrix, warp, warped_boxes
from detector.data.image import PADDING
from detector.data.polygons import box_around, clipped_polygon, moved_polygon

MIN_SIDE = 2.0  # pixels a box must exceed after a warp
MIN_AREA = 0.10  # share of its scaled area that must stay inside
MIN_POLYGON_AREA = 0.01  # the same of a box with a polygon
MAX_ASPECT = 100.0


class Part(NamedTuple):
    """An image on a plane."""

    example: Example
    left: int  # where its corner lies, pixels of the plane
    top: int


class Plane(NamedTuple):
    """A grey plane with images on it that do not overlap, cut off at its edges."""

    height: int
    width: int
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, example: Example) -> "Plane":
        """One image alone."""
        return cls(*example.image.shape[:2], (Part(example, 0, 0),))


class _Strip(NamedTuple):
    """Along one axis, which pixels of an image become which of the window."""

    source: slice
    target: slice
    gain: float  # coordinate in the window = gain * coordinate in the plane + offset
    offset: float


def random_perspective(plane: Plane, out: np.ndarray, strengths: Augmentation, generator: Generator) -> Example:
    """A random view of a plane, grey where nothing is, in `out`, (size, size, C); see `perspective_matrix`.

    A box becomes the box around its moved corners, or around its polygon, clipped; it stays if its sides exceed 2
    pixels, if 0.10 of its scaled area is left (0.01 with a polygon) and if its aspect is under 100.
    """
    size = len(out)
    window = 0, 0, size, size
    matrix, scale = perspective_matrix(plane.height, plane.width, size, strengths, generator)
    boxes_xyxy, classes, counts = boxes_of(plane)
    polygons = polygons_of(plane)
    if matrix[0, 1] == matrix[1, 0] == 0 and not np.any(matrix[2, :2]):
        gains, offsets = np.repeat(_resized(plane, matrix, out), counts, axis=1)
        moved_xyxy = boxes_xyxy * gains + offsets
        moved = {n: polygon * gains[n, :2] + offsets[n, :2] for n, polygon in polygons.items()}
    else:
        out[:] = warp(drawn(plane), matrix, size)
        moved_xyxy = warped_boxes(boxes_xyxy, matrix)
        moved = {n: moved_polygon(polygon, matrix) for n, polygon in polygons.items()}
    moved_xyxy = clipped_boxes(moved_xyxy, window)
    least = np.full(len(classes), MIN_AREA)
    for n, polygon in moved.items():
        moved_xyxy[n], least[n] = box_around(clipped_polygon(polygon, window)), MIN_POLYGON_AREA
    kept = keeps(boxes_xyxy, moved_xyxy, scale, least)
    return Example(out, moved_xyxy[kept], classes[kept])


def keeps(before_xyxy: np.ndarray, after_xyxy: np.ndarray, scale: float, least: np.ndarray) -> np.ndarray:
    """(N,) bool: which boxes stay after a warp that scales, given as they were and as they are, clipped.

    `least`: (N,) the share of its scaled area that must be left of each.
    """
    width, height = after_xyxy[:, 2] - after_xyxy[:, 0], after_xyxy[:, 3] - after_xyxy[:, 1]
    kept = (width > MIN_SIDE) & (height > MIN_SIDE)  # False for NaN
    kept &= width * height > least * scale**2 * areas(before_xyxy)
    return kept & (np.maximum(width, height) < MAX_ASPECT * np.minimum(width, height))


def drawn(plane: Plane) -> np.ndarray:
    """(H, W, C) uint8, the whole plane."""
    canvas = np.full((plane.height, plane.width, plane.parts[0].example.image.shape[2]), PADDING, dtype=np.uint8)
    for (image, *_), left, top in plane.parts:
        low_x, low_y = max(left, 0), max(top, 0)
        shown = image[low_y - top : plane.height - top, low_x - left : plane.width - left]
        canvas[low_y : low_y + shown.shape[0], low_x : low_x + shown.shape[1]] = shown
    return canvas


def boxes_of(plane: Plane) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(N, 4) boxes in pixels of the plane, cut off at its edges, (N,) classes, and how many each image has."""
    counts = [len(part.example.classes) for part in plane.parts]
    corners = np.repeat([(left, top, left, top) for _, left, top in plane.parts], counts, axis=0)
    boxes_xyxy = np.concatenate([part.example.boxes_xyxy for part in plane.parts]) + corners
    classes = np.concatenate([part.example.classes for part in plane.parts])
    return clipped_boxes(boxes_xyxy, (0, 0, plane.width, plane.height)), classes, counts


def polygons_of(plane: Plane) -> dict[int, np.ndarray]:
    """The polygons of those of the N boxes that have one, in pixels of the plane, cut off at its edges."""
    found, first = {}, 0
    for example, left, top in plane.parts:
        for number, polygon in enumerate(example.polygons):
            if polygon is not None:
                moved = polygon + np.array((left, top))
                found[first + number] = clipped_polygon(moved, (0, 0, plane.width, plane.height))
        first += len(example.classes)
    return found


def _resized(plane: Plane, matrix: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Fill the window under a map without rotation, shear and perspective.

    Returns (2, parts, 4): gains and offsets of each part's boxes, xyxy. They are the map's to half a pixel: parts begin
    and end at whole pixels, and boxes follow them.
    """
    size = len(out)
    out.fill(PADDING)
    (gain_x, _, offset_x), (_, gain_y, offset_y), _ = matrix.tolist()
    maps = []
    for (image, *_), left, top in plane.parts:
        across = _strip(left, image.shape[1], plane.width, gain_x, offset_x, size)
        down = _strip(top, image.shape[0], plane.height, gain_y, offset_y, size)
        maps.append(((across.gain, down.gain) * 2, (across.offset, down.offset) * 2))
        target = out[down.target, across.target]
        if target.size:
            shape = target.shape[1], target.shape[0]
            cv2.resize(image[down.source, across.source], shape, dst=target, interpolation=cv2.INTER_LINEAR)
    return np.array(maps).transpose(1, 0, 2)


def _strip(start: int, length: int, limit: int, gain: float, offset: float, size: int) -> _Strip:
    """Of an image that begins at `start` on a plane that ends at `limit`, what a window sees.

    Where the image ends inside the window, its end is rounded to a whole pixel of the window; where the window cuts it
    off, the cut is rounded to a whole pixel of the image.
    """
    low, high = max(start, 0), min(start + length, limit)
    first, last = _rounded(gain * low + offset), _rounded(gain * high + offset)
    if min(last, size) <= max(first, 0):
        return _Strip(slice(0), slice(0), gain, offset)
    if first < 0:
        first, low = 0, min(max(_rounded(-offset / gain), low), high - 1)
    if last > size:
        last, high = size, min(max(_rounded((size - offset) / gain), low + 1), high)
    gain = (last - first) / (high - low)
    return _Strip(slice(low - start, high - start), slice(first, last), gain, first - gain * low)


def _rounded(coordinate: float) -> int:
    """To the nearest whole number, halves down: the odd pixel of a letterbox goes to the right."""
    return ceil(coordinate - 0.5)
