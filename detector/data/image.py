"""Reads images and puts them into a size.

Coordinates are continuous: pixel i covers i..i+1, so a box of a whole image is (0, 0, width, height) and resizing by a
factor multiplies boxes by it.
"""

import io
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from detector.errors import DataError

PADDING = 114  # the grey around images

# Of a JPEG: what its markers, after a byte 0xff, mean.
START, END, SCAN = b"\xff\xd8", b"\xff\xd9", 0xDA
WITHOUT_LENGTH = (0x00, 0x01, *range(0xD0, 0xD9))


class DamagedImageError(DataError):
    """An image whose file can be read, but whose pixels cannot be had from it."""


class Letterbox(NamedTuple):
    """How an original image was put into the network input: x_net = x_orig * ratio_x + left."""

    height: int  # of the original image, pixels
    width: int
    ratio_x: float
    ratio_y: float
    left: int  # pixels of padding
    top: int


def read_rgb(path: str | Path, size: tuple[int, int] | None = None) -> np.ndarray:
    """(H, W, 3) uint8 RGB, turned as its EXIF orientation says; `size` is the (height, width) that its header tells.

    Raises DataError when the file cannot be read, DamagedImageError when it cannot be decoded, is cut short or is of
    another size, and MemoryError when there is no memory for it, which says nothing about the image.
    """
    try:
        content = Path(path).read_bytes()  # OpenCV's own file access fails on non-ASCII paths on some systems
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); put the image back") from None
    if (image := _decoded(content)) is None:
        raise DamagedImageError(
            f"{path}: cannot be decoded ({_complaint(content)}); replace it or take it out of the set"
        )
    if size not in (None, image.shape[:2]):
        raise DamagedImageError(
            f"{path}: decodes to {image.shape[1]} x {image.shape[0]} pixels but its header says {size[1]} x {size[0]}; "
            "save it anew without EXIF orientation"
        )
    return image


def _decoded(content: bytes) -> np.ndarray | None:
    """The image in a file's content; None where it is damaged, as far as its decoder can tell."""
    if not content or not _has_end(content):
        return None
    try:
        return cv2.imdecode(np.frombuffer(content, dtype=np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(str(error)) from None
        return None


def _has_end(content: bytes) -> bool:
    """Whether a JPEG's pixels are followed by its end marker; True for other formats.

    Where they are not, some releases of OpenCV fail, and others (4.11) return what memory held in place of the missing
    rows. The markers before the pixels are walked through because a thumbnail among them has an end of its own.
    """
    if not content.startswith(START):
        return True
    position = len(START)
    while 0 <= (position := content.find(b"\xff", position)) < len(content) - 3:
        marker = content[position + 1]
        if marker == SCAN:
            return content.rfind(END, position) >= 0
        if marker == 0xFF:
            position += 1
        elif marker in WITHOUT_LENGTH:
            position += 2
        else:
            position += 2 + int.from_bytes(content[position + 2 : position + 4], "big")
    return False


def _complaint(content: bytes) -> str:
    """What a second decoder says of a file that the first could not decode.

    OpenCV tells a failed allocation inside a decoder as it tells damage. Pillow does not: it raises MemoryError.
    """
    if not content:
        return "the file is empty"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content)) as image:
                image.load()
    except MemoryError:
        raise
    except UnidentifiedImageError:
        return "it is no image, or damaged at its beginning"
    except Exception as error:  # a damaged file makes Pillow's readers raise nearly anything
        return str(error)
    return "its end is missing or damaged"


def fitted_size(height: int, width: int, imgsz: int) -> tuple[int, int]:
    """(height, width) once the long side is imgsz, each at least one pixel."""
    ratio = imgsz / max(height, width)
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def fit_long_side(image: np.ndarray, imgsz: int) -> np.ndarray:
    """The image with its long side resized to imgsz: averaged over areas when it shrinks, bilinear when it grows."""
    height, width = image.shape[:2]
    new_height, new_width = fitted_size(height, width, imgsz)
    if (new_height, new_width) == (height, width):
        return image
    method = cv2.INTER_AREA if imgsz < max(height, width) else cv2.INTER_LINEAR
    return cv2.resize(image, (new_width, new_height), interpolation=method)


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
    out = np.full((*shape, 3), PADDING, dtype=np.uint8)
    out[mapping.top : mapping.top + resized[0], mapping.left : mapping.left + resized[1]] = image
    return out, mapping
