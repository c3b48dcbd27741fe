"""Mosaic: four images that meet at a random point, as in Bochkovskiy et al., "YOLOv4" (2020)."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from detector.data.augment import Example, areas, clipped_boxes
from detector.data.image import PADDING


def mosaic_centre(size: int, generator: Generator) -> tuple[int, int]:
    """x, y of the point where the tiles meet, each ~ U(size / 2, 3 size / 2), whole pixels of the canvas."""
    x, y = generator.uniform(size / 2, 3 * size / 2, 2)
    return int(x), int(y)


def mosaic(tiles: Sequence[Example], size: int, centre: tuple[int, int]) -> Example:
    """A grey canvas of 2 size x 2 size pixels with four tiles around `centre`: top left, top right, bottom left, right.

    The tiles are not resized but cropped by the canvas. Boxes move along and are clipped, empty ones are dropped.
    """
    side, (x, y) = 2 * size, centre
    canvas = np.full((side, side, 3), PADDING, dtype=np.uint8)
    boxes, classes = [], []
    for position, tile in enumerate(tiles):
        height, width = tile.image.shape[:2]
        left = x if position % 2 else x - width
        top = y if position // 2 else y - height
        low_x, low_y, high_x, high_y = max(left, 0), max(top, 0), min(left + width, side), min(top + height, side)
        canvas[low_y:high_y, low_x:high_x] = tile.image[low_y - top : high_y - top, low_x - left : high_x - left]
        shift = np.array((left, top, left, top))
        moved_xyxy = clipped_boxes(tile.boxes_xyxy + shift, (low_x, low_y, high_x, high_y))
        kept = areas(moved_xyxy) > 0
        boxes.append(moved_xyxy[kept])
        classes.append(tile.classes[kept])
    return Example(canvas, np.concatenate(boxes), np.concatenate(classes))
