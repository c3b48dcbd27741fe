"""The letterbox of the public trainer's validation, for comparing numbers with it.

There the shape of an image's input depends on the images that are batched with it, and nothing but enlarging and
shrinking by bilinear interpolation is known. Ours (image.py) depends on the image alone.
"""

import math

import cv2
import numpy as np

from detector.data.image import PADDING, Letterbox
from detector.data.image import resized as resized_by


def batch_shapes(heights: np.ndarray, widths: np.ndarray, imgsz: int, batch: int, stride: int = 32) -> np.ndarray:
    """(N, 2) height and width of each image's network input, of N images of these sizes in pixels.

    Images are batched by falling width against height. A batch's short side fits the one that is nearest to a square,
    and every side gets half a stride more before it is rounded up to a multiple of the stride.
    """
    ratios = heights / widths
    order = np.argsort(ratios, kind="stable")
    shapes = np.empty((len(order), 2), dtype=np.int64)
    for start in range(0, len(order), batch):
        these = order[start : start + batch]
        low, high = ratios[these[0]], ratios[these[-1]]
        sides = (high, 1.0) if high < 1 else (1.0, 1 / low) if low > 1 else (1.0, 1.0)
        shapes[these] = [math.ceil(side * imgsz / stride + 0.5) * stride for side in sides]
    return shapes


def resized(height: int, width: int, imgsz: int) -> tuple[int, int]:
    """(height, width) once the long side is imgsz; the short side is rounded up."""
    ratio = imgsz / max(height, width)
    return min(math.ceil(height * ratio), imgsz), min(math.ceil(width * ratio), imgsz)


def public_letterbox(image: np.ndarray, imgsz: int, shape: tuple[int, int]) -> tuple[np.ndarray, Letterbox]:
    """The image with its long side resized to imgsz, centred on grey of that (height, width)."""
    height, width = image.shape[:2]
    new_height, new_width = resized(height, width, imgsz)
    if (new_height, new_width) != (height, width):
        image = resized_by(image, new_height, new_width, cv2.INTER_LINEAR)
    left, top = round((shape[1] - new_width) / 2 - 0.1), round((shape[0] - new_height) / 2 - 0.1)
    out = np.full((*shape, image.shape[2]), PADDING, dtype=np.uint8)
    out[top : top + new_height, left : left + new_width] = image
    return out, Letterbox(height, width, new_width / width, new_height / height, left, top)
