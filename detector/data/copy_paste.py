"""Copy-paste: objects cut out along their polygons and pasted, after Ghiasi et al., "Simple Copy-Paste" (2021)."""

import cv2
import numpy as np
from numpy.random import Generator

from detector.data.augment import Example, areas
from detector.data.compose import Part, Plane, boxes_of, drawn, polygons_of
from detector.data.polygons import box_around

MOST_COVERED = 0.30  # share of a box that a pasted object's box may cover


def copy_paste(plane: Plane, share: float, generator: Generator) -> Plane:
    """A plane on which objects lie a second time, mirrored left-right at the plane's middle; each with a probability.

    Only objects with a polygon, and only where their box covers no more than 0.30 of any other, pasted ones included.
    The plane itself where nothing is pasted.
    """
    boxes_xyxy, classes, _ = boxes_of(plane)
    polygons = polygons_of(plane)
    chosen = np.flatnonzero(generator.random(len(classes)) < share)
    image, mirrored = None, None
    for number in chosen.tolist():
        if not len(polygons.get(number, ())):
            continue
        polygon = polygons[number] * (-1, 1) + np.array((plane.width, 0))
        box_xyxy = box_around(polygon)
        if np.any(_covered(boxes_xyxy, box_xyxy) > MOST_COVERED):
            continue
        if image is None:
            image = drawn(plane)
            mirrored = image[:, ::-1].copy()
        _paste(image, mirrored, polygon)
        boxes_xyxy, classes = np.vstack((boxes_xyxy, box_xyxy)), np.append(classes, classes[number])
        polygons[len(classes) - 1] = polygon
    if image is None:
        return plane
    shapes = tuple(polygons.get(number) for number in range(len(classes)))
    return Plane(plane.height, plane.width, (Part(Example(image, boxes_xyxy, classes, shapes), 0, 0),))


def _covered(boxes_xyxy: np.ndarray, box_xyxy: np.ndarray) -> np.ndarray:
    """(N,) the share of each box that lies in one."""
    low, high = np.maximum(boxes_xyxy[:, :2], box_xyxy[:2]), np.minimum(boxes_xyxy[:, 2:], box_xyxy[2:])
    return np.clip(high - low, 0, None).prod(axis=1) / np.maximum(areas(boxes_xyxy), 1e-9)


def _paste(image: np.ndarray, source: np.ndarray, polygon: np.ndarray) -> None:
    """Copy the pixels of a polygon from one image to another of the same size."""
    mask = np.zeros(image.shape[:2], dtype=np.uint8)
    # OpenCV's coordinates are 0 at the centre of pixel 0, ours at its edge.
    cv2.fillPoly(mask, [np.rint(polygon - 0.5).astype(np.int32)], 1)
    inside = mask.astype(bool)
    image[inside] = source[inside]
