"""Random changes of a training image and its boxes: pure functions of their arguments and a generator.

Images are (H, W, C) uint8, boxes (N, 4) float64 xyxy in continuous pixels (pixel i covers i..i+1), classes (N,)
int64. Only where it is said does a function write to what it is given.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
from numpy.random import Generator

from detector.data.image import PADDING

MIXUP_BETA = 32.0
CUTMIX_TRIES = 3
CUTMIX_MIN_AREA = 0.1  # share of a partner's box that must lie inside the pasted rectangle
GREY = (PADDING, PADDING, PADDING, PADDING)  # of up to four channels, as many as a warp takes at once


@dataclass(frozen=True)
class Augmentation:
    """Strengths of the augmentations, with the names and defaults that YOLO users know."""

    hsv_h: float = 0.015  # largest change of hue, as a share of the circle
    hsv_s: float = 0.7  # of saturation, as a factor
    hsv_v: float = 0.4  # of brightness, as a factor
    degrees: float = 0.0  # largest rotation
    translate: float = 0.1  # largest shift, as a share of the size
    scale: float = 0.5  # largest change of size, as a factor
    shear: float = 0.0  # largest shear angle, degrees
    perspective: float = 0.0  # largest entry of the perspective row, 1 / pixels
    flipud: float = 0.0  # probability of an up-down flip
    fliplr: float = 0.5  # probability of a left-right flip
    mosaic: float = 1.0  # probability of a mosaic
    mixup: float = 0.0  # probability of a mixup
    cutmix: float = 0.0  # probability of a cutmix
    copy_paste: float = 0.0  # probability of an object with a polygon to be pasted a second time


class Example(NamedTuple):
    """An image with its boxes."""

    image: np.ndarray  # (H, W, C) uint8
    boxes_xyxy: np.ndarray  # (N, 4) float64 pixels
    classes: np.ndarray  # (N,) int64
    polygons: tuple[np.ndarray | None, ...] = ()  # of N boxes, (P, 2) pixels, None where a box has none; (): none has


def clipped_boxes(boxes_xyxy: np.ndarray, window_xyxy: tuple[float, float, float, float]) -> np.ndarray:
    """(N, 4) the parts of the boxes inside a window; those outside end up without area."""
    left, top, right, bottom = window_xyxy
    return np.clip(boxes_xyxy, (left, top, left, top), (right, bottom, right, bottom))


def areas(boxes_xyxy: np.ndarray) -> np.ndarray:
    """(N,) areas of (N, 4) boxes."""
    return (boxes_xyxy[:, 2] - boxes_xyxy[:, 0]) * (boxes_xyxy[:, 3] - boxes_xyxy[:, 1])


def perspective_matrix(
    height: int, width: int, size: int, strengths: Augmentation, generator: Generator
) -> tuple[np.ndarray, float]:
    """(3, 3) float64 map of an image's continuous pixels to those of a size x size window, and its scale.

    M = T S R P C: C moves the centre to 0, P is the perspective, R rotates and scales, S shears, T moves to the window.
    """
    centre = np.eye(3)
    centre[:2, 2] = -width / 2, -height / 2
    tilt = np.eye(3)
    tilt[2, :2] = generator.uniform(-strengths.perspective, strengths.perspective, 2)
    angle = np.deg2rad(generator.uniform(-strengths.degrees, strengths.degrees))
    scale = generator.uniform(1 - strengths.scale, 1 + strengths.scale)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    turn = np.array(((cos, sin, 0), (-sin, cos, 0), (0, 0, 1)))
    slant = np.eye(3)
    slant[0, 1], slant[1, 0] = np.tan(np.deg2rad(generator.uniform(-strengths.shear, strengths.shear, 2)))
    move = np.eye(3)
    move[:2, 2] = size * generator.uniform(0.5 - strengths.translate, 0.5 + strengths.translate, 2)
    return move @ slant @ turn @ tilt @ centre, scale


def warp(image: np.ndarray, matrix: np.ndarray, size: int) -> np.ndarray:
    """(size, size, C) the image under a map of continuous pixels, bilinear, grey where there is none."""
    if image.shape[2] > len(GREY):
        parts = [image[..., first : first + len(GREY)] for first in range(0, image.shape[2], len(GREY))]
        return np.concatenate([warp(np.ascontiguousarray(part), matrix, size) for part in parts], axis=2)
    # OpenCV's coordinates are 0 at the centre of pixel 0, ours at its edge: half a pixel there and back
    half = np.array(((1, 0, 0.5), (0, 1, 0.5), (0, 0, 1)))
    shifted = np.linalg.inv(half) @ matrix @ half
    if np.any(matrix[2, :2]):
        warped = cv2.warpPerspective(image, shifted, (size, size), flags=cv2.INTER_LINEAR, borderValue=GREY)
    else:
        warped = cv2.warpAffine(image, shifted[:2], (size, size), flags=cv2.INTER_LINEAR, borderValue=GREY)
    return warped.reshape(size, size, -1)  # OpenCV drops the axis of a single channel


def warped_boxes(boxes_xyxy: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """(N, 4) boxes around the moved corners of (N, 4) boxes, not clipped.

    With perspective, a corner behind the viewer has no place in the image; its box becomes NaN.
    """
    corners = boxes_xyxy[:, (0, 1, 2, 1, 2, 3, 0, 3)].reshape(-1, 2)
    moved = np.concatenate((corners, np.ones((len(corners), 1))), axis=1) @ matrix.T
    depth = np.where(moved[:, 2:] > 0, moved[:, 2:], np.nan)
    points = (moved[:, :2] / depth).reshape(-1, 4, 2)
    return np.concatenate((points.min(axis=1), points.max(axis=1)), axis=1)


def mixup(example: Example, partner: Example, generator: Generator) -> Example:
    """Both images blended, r of the first and 1 - r of the second with r ~ Beta(32, 32); the boxes of both.

    Zhang et al., "mixup: Beyond empirical risk minimization" (2017). Written to the first image.
    """
    ratio = generator.beta(MIXUP_BETA, MIXUP_BETA)
    cv2.addWeighted(example.image, ratio, partner.image, 1 - ratio, 0.0, dst=example.image)
    return Example(
        example.image,
        np.concatenate((example.boxes_xyxy, partner.boxes_xyxy)),
        np.concatenate((example.classes, partner.classes)),
    )


def cutmix(example: Example, partner: Example, generator: Generator) -> Example:
    """A rectangle of the partner, of the same size, pasted where it covers no box; nothing if none of three fits.

    The rectangle's sides are sqrt(1 - lam) of the image's, lam ~ Beta(1, 1). The partner's boxes with at least 0.1 of
    their area in the rectangle are kept, clipped. Yun et al., "CutMix" (2019).
    Written to the first image.
    """
    height, width = example.image.shape[:2]
    for _ in range(CUTMIX_TRIES):
        window = _random_window(height, width, generator)
        if areas(window[None])[0] > 0 and not np.any(_overlaps(example.boxes_xyxy, window)):
            break
    else:
        return example
    left, top, right, bottom = window
    image = example.image
    image[top:bottom, left:right] = partner.image[top:bottom, left:right]
    inside_xyxy = clipped_boxes(partner.boxes_xyxy, (left, top, right, bottom))
    inside = areas(inside_xyxy)
    kept = (inside > 0) & (inside >= CUTMIX_MIN_AREA * areas(partner.boxes_xyxy))
    return Example(
        image,
        np.concatenate((example.boxes_xyxy, inside_xyxy[kept])),
        np.concatenate((example.classes, partner.classes[kept])),
    )


def _random_window(height: int, width: int, generator: Generator) -> np.ndarray:
    """(4,) int64 xyxy: a rectangle around a random point, cut off at the image."""
    share = np.sqrt(1 - generator.beta(1.0, 1.0))
    limit = np.array((width, height))
    centre = generator.uniform(0, limit)
    low, high = centre - limit * share / 2, centre + limit * share / 2
    return np.clip(np.concatenate((low, high)), 0, np.tile(limit, 2)).astype(np.int64)


def _overlaps(boxes_xyxy: np.ndarray, window: np.ndarray) -> np.ndarray:
    low, high = np.maximum(boxes_xyxy[:, :2], window[:2]), np.minimum(boxes_xyxy[:, 2:], window[2:])
    return np.all(high > low, axis=1)


def random_flips(example: Example, strengths: Augmentation, generator: Generator) -> Example:
    """Mirrored up-down with probability flipud and left-right with probability fliplr; the image where it lies."""
    up_down, left_right = generator.random(2) < (strengths.flipud, strengths.fliplr)
    image, boxes_xyxy = example.image, example.boxes_xyxy
    height, width = image.shape[:2]
    if up_down:
        cv2.flip(image, 0, dst=image)
        boxes_xyxy = boxes_xyxy[:, (0, 3, 2, 1)] * (1, -1, 1, -1) + (0, height, 0, height)
    if left_right:
        cv2.flip(image, 1, dst=image)
        boxes_xyxy = boxes_xyxy[:, (2, 1, 0, 3)] * (-1, 1, -1, 1) + (width, 0, width, 0)
    return Example(image, boxes_xyxy, example.classes)
