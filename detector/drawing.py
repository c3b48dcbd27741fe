"""Images with boxes, labels and titles: arrays in, arrays out, (H, W, 3) uint8 RGB."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw

from detector.errors import DataError
from detector.fonts import drawable, font

Colour = tuple[int, int, int]

READABLE = 512  # pixels of the long side below which an image is enlarged before text is put on it
PAPER: Colour = (250, 250, 248)
INK: Colour = (38, 42, 48)
# Told apart by eye on photographs, also next to each other; further classes walk round the colour wheel.
PALETTE: tuple[Colour, ...] = (
    (230, 57, 70),
    (42, 122, 226),
    (46, 160, 90),
    (255, 159, 28),
    (142, 68, 200),
    (0, 176, 190),
    (236, 94, 167),
    (150, 190, 30),
    (150, 95, 60),
    (90, 110, 240),
)


def class_colour(c: int) -> Colour:
    """The fixed colour of class c, RGB."""
    if c < len(PALETTE):
        return PALETTE[c]
    hue = (c * 0.61803398875) % 1  # golden ratio: neighbours lie far apart
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.55 + 0.4 * (c % 2), 0.95 - 0.25 * (c % 3) / 2)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: NDArray[np.uint8],
    boxes_xyxy: ArrayLike,
    classes: ArrayLike,
    names: Sequence[str],
    scores: ArrayLike | None = None,
    long_side: int | None = None,
    ids: ArrayLike | None = None,
    colours: Sequence[Colour] | None = None,
) -> NDArray[np.uint8]:
    """A copy of the image, of any channels, with (N, 4) boxes in its pixels, labelled with the class's name and score.

    ids: the numbers of objects that are tracked, which are written, too; -1: none. colours: of the boxes, in place of
    those of their classes.

    The picture's long side is `long_side` pixels; if it is not given, small images are enlarged by a whole number so
    that text can be read on them, and others keep their size. A label for which there is no room beside the labels
    before it, or that would hide another box, is left out; its box is still drawn.
    """
    boxes = np.asarray(boxes_xyxy, dtype=np.float64).reshape(-1, 4)
    labels = np.asarray(classes, dtype=np.int64).reshape(-1).tolist()
    confidences = None if scores is None else np.asarray(scores, dtype=np.float64).reshape(-1)
    picture = _resized(in_colours(image), _factor(image, long_side))
    boxes = boxes * np.array((picture.shape[1] / image.shape[1], picture.shape[0] / image.shape[0]) * 2)
    line, text_size = _pen_sizes(picture.shape[:2], boxes)
    rooms = _Rooms(picture.shape[:2], boxes)
    written: list[tuple[Label, tuple[int, int]]] = []
    for i, box in enumerate(boxes.tolist()):
        colour = class_colour(labels[i]) if colours is None else colours[i]
        _outline(picture, box, colour, line)
        text = _label(
            shown_name(names, labels[i]), None if confidences is None else confidences[i], -1 if ids is None else ids[i]
        )
        label = label_picture(text, text_size, colour)
        place = rooms.take(i, label.size)
        if place is not None:
            written.append((label, place))
    for label, place in written:  # after all boxes, so that no line runs through a label
        _paste(picture, label, place)
    return picture


class Label(NamedTuple):
    """A label as it is drawn: all the same wherever it stands."""

    pixels: NDArray[np.uint8]  # (h, w, 3)
    drawn: NDArray[np.bool_]  # (h, w, 3), what of them is drawn: the corners are round
    size: tuple[int, int]  # width and height of what must be free for it


@lru_cache(maxsize=512)  # of one class there are about a hundred, by the score; a large one takes 100 kB
def label_picture(text: str, text_size: int, colour: Colour) -> Label:
    """Text and some air around it on a plate of that colour."""
    text_font = font(text_size, text)
    width = math.ceil(text_font.getlength(text) + text_font.size * 0.6)
    height = math.ceil(text_font.size * 1.35)
    plate = Image.new("L", (width, height))
    ImageDraw.Draw(plate).rounded_rectangle((0, 0, width - 1, height - 1), radius=height // 5, fill=255)
    canvas = Image.new("RGB", plate.size, colour)
    ImageDraw.Draw(canvas).text((width / 2, height / 2), text, fill=_contrast(colour), font=text_font, anchor="mm")
    drawn = np.repeat(
        np.asarray(plate)[..., None] > 0, 3, axis=2
    )  # numpy is a hundred times slower with one of (h, w, 1)
    return Label(np.asarray(canvas), drawn, (width, height))


def _outline(picture: NDArray[np.uint8], box: Sequence[float], colour: Colour, line: int) -> None:
    """Draw a box's lines, inside of it; at least one pixel."""
    height, width = picture.shape[:2]
    x1, y1, x2, y2 = (
        int(min(max(side, -line - 1), most + line + 1)) for side, most in zip(box, (width, height) * 2, strict=True)
    )
    x2, y2 = max(x1, x2 - 1), max(y1, y2 - 1)
    across, down = min(line, x2 - x1 + 1) - 1, min(line, y2 - y1 + 1) - 1
    for corners in (
        ((x1, y1), (x2, y1 + down)),
        ((x1, y2 - down), (x2, y2)),
        ((x1, y1), (x1 + across, y2)),
        ((x2 - across, y1), (x2, y2)),
    ):
        cv2.rectangle(picture, *corners, colour, cv2.FILLED)


def _paste(picture: NDArray[np.uint8], label: Label, place: tuple[int, int]) -> None:
    """Draw a label whose corner is at (x, y); what of it is outside of the picture is not drawn."""
    x, y = place
    there = picture[y : y + label.pixels.shape[0], x : x + label.pixels.shape[1]]
    height, width = there.shape[:2]
    np.copyto(there, label.pixels[:height, :width], where=label.drawn[:height, :width])


def shown_name(names: Sequence[str], c: int) -> str:
    """The name of class c, or its number where no font here has its letters."""
    return names[c] if drawable(names[c]) else str(c)


def undrawable(names: Sequence[str]) -> list[str]:
    """Those names for whose letters there is no font here."""
    return [name for name in names if not drawable(name)]


def _label(name: str, score: float | None, number: int) -> str:
    """For example 'dog 0.91', or 'dog #4 0.91' of an object that is tracked."""
    parts = [name, f"#{number}" if number >= 0 else "", "" if score is None else f"{score:.2f}"]
    return " ".join(part for part in parts if part)


def in_colours(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W, 3) of an image of C channels: one as grey, and of more than three the first three; of two the first."""
    channels = image.shape[2]
    return image[:, :, :3] if channels >= 3 else np.repeat(image[:, :, :1], 3, axis=2)


def titled(image: NDArray[np.uint8], title: str) -> NDArray[np.uint8]:
    """The image under a strip with a title, cut with an ellipsis where it is too long."""
    height, width = image.shape[:2]
    size = max(13, round(max(height, width) / 36))
    strip = Image.new("RGB", (width, size * 2), PAPER)
    pen = ImageDraw.Draw(strip)
    shown = title
    text_font = font(size, title)
    while len(shown) > 1 and pen.textlength(shown, font=text_font) > width - size:
        shown = shown.rstrip("…")[:-1] + "…"
    pen.text((size / 2, size), shown, fill=INK, font=text_font, anchor="lm")
    return np.concatenate((np.asarray(strip), image))


def grid(
    images: Sequence[NDArray[np.uint8]], columns: int, titles: Sequence[str] | None = None, gap: int = 6
) -> NDArray[np.uint8]:
    """Images side by side, row by row, each centred in a cell of the largest height and width, with optional titles."""
    assert images
    assert columns > 0
    tiles = list(images) if titles is None else [titled(*pair) for pair in zip(images, titles, strict=True)]
    height = max(tile.shape[0] for tile in tiles)
    width = max(tile.shape[1] for tile in tiles)
    columns = min(columns, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    page = np.empty((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), dtype=np.uint8)
    page[:] = PAPER
    for i, tile in enumerate(tiles):
        top = gap + (i // columns) * (height + gap) + (height - tile.shape[0]) // 2
        left = gap + (i % columns) * (width + gap) + (width - tile.shape[1]) // 2
        page[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    return page


def save_image(path: str | Path, rgb: NDArray[np.uint8]) -> None:
    """Writes (H, W, 3) RGB as the JPEG or PNG that the path's suffix says; any path the system can name."""
    path = Path(path)
    flags = {".jpg": [cv2.IMWRITE_JPEG_QUALITY, 92], ".jpeg": [cv2.IMWRITE_JPEG_QUALITY, 92], ".png": []}
    suffix = path.suffix.lower()
    if suffix not in flags:
        raise DataError(f"{path}: '{path.suffix}' is not a kind of picture written here; use .jpg or .png")
    # Encoded in memory: cv2.imwrite takes no paths with letters outside the system's code page.
    done, data = cv2.imencode(suffix, np.ascontiguousarray(rgb[..., ::-1]), flags[suffix])
    assert done
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.tobytes())


def _factor(image: NDArray[np.uint8], long_side: int | None) -> float:
    """How much to enlarge an image before drawing on it."""
    longest = max(image.shape[:2])
    if long_side is not None:
        return long_side / longest
    return 1 if longest >= READABLE else math.ceil(READABLE / longest)


def _pen_sizes(shape: tuple[int, int], boxes_xyxy: NDArray[np.float64]) -> tuple[int, int]:
    """Line width and text height in pixels: by the picture's size, finer where the boxes are small."""
    extent = math.sqrt(shape[0] * shape[1])
    line, text = extent / 400, extent / 40
    if len(boxes_xyxy):
        typical = float(np.median((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(min=0).min(axis=1)))
        line, text = min(line, typical / 10), min(text, typical / 4)
    return max(2, round(line)), max(12, round(text))


def _resized(image: NDArray[np.uint8], factor: float) -> NDArray[np.uint8]:
    """A copy of the image, enlarged smoothly or shrunk by area."""
    if factor == 1:
        return np.array(image, order="C")
    size = max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor))
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
    return cv2.resize(np.ascontiguousarray(image), size, interpolation=method)


class _Rooms:
    """Where labels can stand, and those that stand already."""

    def __init__(self, shape: tuple[int, int], boxes_xyxy: NDArray[np.float64]) -> None:
        self._height, self._width = shape
        self._boxes = boxes_xyxy
        self._half = 0.5 * (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(min=0).prod(axis=1).clip(min=1)
        self._taken = np.zeros_like(boxes_xyxy)
        self._count = 0

    def take(self, i: int, size: tuple[int, int]) -> tuple[int, int] | None:
        """(x, y) of a label of `size` above, in or below box i, which is taken then, or None where there is no room:
        within the picture, off the labels placed before, and not over half of another box or more.
        """
        left, top, right, bottom = self._boxes[i].tolist()
        width, height = size
        x = min(max(0.0, left), max(0.0, self._width - width))
        x_right = min(max(0.0, right - width), max(0.0, self._width - width))
        tried = ((x, top - height), (x, top), (x, bottom), (x_right, top - height), (x_right, bottom - height))
        inside = [(int(x), int(y)) for x, y in tried if y >= 0 and y + height <= self._height]
        places = np.array([(x, y, x + width, y + height) for x, y in inside]).reshape(-1, 4)
        free = ~(_covered(self._taken[: self._count], places) > 0).any(axis=1)
        hidden = _covered(self._boxes, places) >= self._half
        hidden[:, i] = False  # a label may hide its own box
        free &= ~hidden.any(axis=1)
        if not free.any():
            return None
        first = int(free.argmax())
        self._taken[self._count] = places[first]
        self._count += 1
        return inside[first]


def _covered(boxes_xyxy: NDArray[np.float64], places_xyxy: NDArray[np.float64]) -> NDArray[np.float64]:
    """(P, N) the area of each box under each rectangle, in square pixels."""
    low = np.maximum(boxes_xyxy[:, :2], places_xyxy[:, None, :2])
    high = np.minimum(boxes_xyxy[:, 2:], places_xyxy[:, None, 2:])
    sides = np.maximum(high - low, 0)  # `clip` takes three times as long
    return sides[..., 0] * sides[..., 1]


def _contrast(colour: Colour) -> Colour:
    """White or near black, whichever reads better on the colour (ITU-R BT.601 luma)."""
    luma = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return (20, 20, 20) if luma > 150 else (255, 255, 255)
