"""Reads images and puts them into a size.

Coordinates are continuous: pixel i covers i..i+1, so a box of a whole image is (0, 0, width, height) and resizing by a
factor multiplies boxes by it.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from detector.data.decoding import START, has_end, pages_of, pixels_of
from detector.data.faults import DamagedError, RefusedError, decoded_by_opencv
from detector.data.header import Range, header_of
from detector.data.orientation import upright
from detector.errors import DataError

PADDING = 114  # the grey around images


SHIFT = 0.25  # pixels of the resized image by which its edge may be off
# OpenCV's flags of reduced decoding in RGB, which has no names of its own: those of grey without what makes it grey.
REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | cv2.IMREAD_COLOR_RGB,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | cv2.IMREAD_COLOR_RGB,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_COLOR_RGB,
}


class DamagedImageError(DataError):
    """An image whose file can be read, but whose pixels cannot be had from it, or are not wanted."""


class Letterbox(NamedTuple):
    """How an original image was put into the network input: x_net = x_orig * ratio_x + left."""

    height: int  # of the original image, pixels
    width: int
    ratio_x: float
    ratio_y: float
    left: int  # pixels of padding
    top: int


def read_image(
    path: str | Path, channels: int = 3, size: tuple[int, int] | None = None, value_range: Range | None = None
) -> np.ndarray:
    """`decode` of a file. Raises DataError when the file cannot be read, too."""
    return decode(content_of(path), str(path), channels, size, value_range)


def content_of(path: str | Path) -> bytes:
    """What is in a file. Raises DataError when it cannot be read."""
    try:
        return Path(path).read_bytes()  # OpenCV's own file access fails on non-ASCII paths on some systems
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); put the image back") from None


def decode(
    content: bytes,
    place: str,
    channels: int = 3,
    size: tuple[int, int] | None = None,
    value_range: Range | None = None,
) -> np.ndarray:
    """(H, W, channels) uint8 of an image file's content, turned as its EXIF orientation says.

    1 channel is grey, 3 are RGB, and any other number is what the file has. `place` is what messages call it, `size`
    the (height, width) that it had when the data set was read, `value_range` the values that become 0 and 255 in files
    of more than 8 bits, see `decoding.scaled`.

    Raises DamagedImageError when it cannot be decoded, is cut short, is of a kind or size that is not read or of
    another size than it was, and MemoryError when there is no memory for it, which says nothing about the image.
    """
    with _told(place):
        image = pixels_of(content, channels, value_range)
    if size not in (None, image.shape[:2]):
        raise DamagedImageError(
            f"{place}: is {image.shape[1]} x {image.shape[0]} pixels, and was {size[1]} x {size[0]} when the data set "
            "was read; put the image back, or start again"
        )
    return image


def decode_pages(
    content: bytes, place: str, channels: int = 3, value_range: Range | None = None
) -> Iterator[np.ndarray]:
    """`decode` of each page of a TIFF, one after the other. The error of a page is raised in its place."""
    with _told(place):
        yield from pages_of(content, channels, value_range)


@contextmanager
def _told(place: str) -> Iterator[None]:
    """A context that tells what is wrong with an image file as DamagedImageError."""
    try:
        yield
    except DamagedError as damaged:
        raise DamagedImageError(
            f"{place}: cannot be decoded ({damaged}); replace it or take it out of the set"
        ) from None
    except RefusedError as refused:
        raise DamagedImageError(f"{place}: {refused}") from None


def fitted_size(height: int, width: int, imgsz: int) -> tuple[int, int]:
    """(height, width) once the long side is imgsz, each at least one pixel."""
    ratio = imgsz / max(height, width)
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def fitted_sizes(heights: np.ndarray, widths: np.ndarray, imgsz: int) -> np.ndarray:
    """(n, 2) int64: the same of n images, of which there may be a million."""
    sides = np.stack((heights, widths), axis=1)
    ratios = imgsz / sides.max(axis=1, keepdims=True)
    return np.maximum(1, np.rint(sides * ratios)).astype(np.int64)


def fit_long_side(image: np.ndarray, imgsz: int) -> np.ndarray:
    """The image with its long side resized to imgsz: averaged over areas when it shrinks, bilinear when it grows."""
    height, width = image.shape[:2]
    new_height, new_width = fitted_size(height, width, imgsz)
    if (new_height, new_width) == (height, width):
        return image
    method = cv2.INTER_AREA if imgsz < max(height, width) else cv2.INTER_LINEAR
    return resized(image, new_height, new_width, method)


def resized(image: np.ndarray, height: int, width: int, method: int) -> np.ndarray:
    """(height, width, C) of an image of any channels, of which OpenCV averages no more than four at once."""
    groups = range(0, image.shape[2], 4)
    parts = [np.ascontiguousarray(image[:, :, first : first + 4]) for first in groups]
    done = [cv2.resize(part, (width, height), interpolation=method).reshape(height, width, -1) for part in parts]
    return done[0] if len(done) == 1 else np.concatenate(done, axis=2)


def decode_fitted(
    content: bytes,
    place: str,
    imgsz: int,
    size: tuple[int, int],
    channels: int = 3,
    value_range: Range | None = None,
) -> np.ndarray:
    """(H, W, channels) uint8: `decode` of an image of this (height, width), its long side resized to imgsz.

    A JPEG of twice, four or eight times that size or more is decoded at that fraction of it. Its decoder averages then
    as the resizing would, to about a level, in a third of the time. Errors are those of `decode`.
    """
    factor = max((one for one in REDUCED if max(size) >= one * imgsz and _divides(one, size, imgsz)), default=1)
    image = _reduced(content, factor, size) if factor > 1 and channels == 3 else None
    if image is None:
        return fit_long_side(decode(content, place, channels, size, value_range), imgsz)
    height, width = fitted_size(*size, imgsz)
    return image if image.shape[:2] == (height, width) else resized(image, height, width, cv2.INTER_AREA)


def _divides(factor: int, size: tuple[int, int], imgsz: int) -> bool:
    """Whether what is left over of an image, for which a row or column more is decoded, moves nothing noticeably."""
    fitted = fitted_size(*size, imgsz)
    return all(-side % factor / side * new <= SHIFT for side, new in zip(size, fitted, strict=True))


def _reduced(content: bytes, factor: int, size: tuple[int, int]) -> np.ndarray | None:
    """A JPEG at 1 / factor of its size, rounded up; None where it is none or is not what it should be."""
    if not content.startswith(START) or not has_end(content):
        return None
    try:
        orientation = header_of(io.BytesIO(content)).orientation
    except (DamagedError, RefusedError):
        return None
    image = decoded_by_opencv(content, REDUCED[factor] | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        return None
    image = upright(image, orientation)
    return image if image.shape[:2] == tuple(-(-side // factor) for side in size) else None


def letterbox_geometry(
    height: int, width: int, imgsz: int, stride: int = 32, rect: bool = True
) -> tuple[tuple[int, int], tuple[int, int], Letterbox]:
    """How an image of this size is letterboxed: (height, width) of the result, and of the image in it, and the mapping.

    Depends on the image alone, never on a batch. See `letterbox`.
    """
    new_height, new_width = fitted_size(height, width, imgsz)
    if rect:
        out_height, out_width = (math.ceil(side / stride) * stride for side in (new_height, new_width))
    else:
        out_height = out_width = imgsz
    left, top = (out_width - new_width) // 2, (out_height - new_height) // 2
    mapping = Letterbox(height, width, new_width / width, new_height / height, left, top)
    return (out_height, out_width), (new_height, new_width), mapping


def letterbox(image: np.ndarray, imgsz: int, stride: int = 32, rect: bool = True) -> tuple[np.ndarray, Letterbox]:
    """The image with its long side resized to imgsz, centred on grey; an odd pixel goes right and bottom.

    It is resized by the function that training resizes with, up as well as down. With `rect` the result has the
    smallest multiples of `stride` that hold the image, else it is imgsz x imgsz.
    """
    shape, resized, mapping = letterbox_geometry(*image.shape[:2], imgsz, stride, rect)
    image = fit_long_side(image, imgsz)
    if resized == shape:
        return image, mapping
    out = np.full((*shape, image.shape[2]), PADDING, dtype=np.uint8)
    out[mapping.top : mapping.top + resized[0], mapping.left : mapping.left + resized[1]] = image
    return out, mapping
