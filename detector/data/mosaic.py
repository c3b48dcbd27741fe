"""Mosaic: four images that meet at a random point, as in Bochkovskiy et al., "YOLOv4" (2020)."""

from collections.abc import Sequence

from numpy.random import Generator

from detector.data.augment import Example
from detector.data.compose import Part, Plane


def mosaic_centre(size: int, generator: Generator) -> tuple[int, int]:
    """x, y of the point where the tiles meet, each ~ U(size / 2, 3 size / 2), whole pixels of the canvas."""
    x, y = generator.uniform(size / 2, 3 * size / 2, 2)
    return int(x), int(y)


def mosaic(tiles: Sequence[Example], size: int, centre: tuple[int, int]) -> Plane:
    """A plane of 2 size x 2 size pixels with four tiles around `centre`: top left, top right, bottom left, right.

    The tiles are not resized but cut off by the plane's edges.
    """
    x, y = centre
    parts = []
    for position, tile in enumerate(tiles):
        height, width = tile.image.shape[:2]
        left = x if position % 2 else x - width
        top = y if position // 2 else y - height
        parts.append(Part(tile, left, top))
    return Plane(2 * size, 2 * size, tuple(parts))
