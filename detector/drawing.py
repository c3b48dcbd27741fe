"""Images with boxes, labels and titles: arrays in, arrays out, (H, W, 3) uint8 RGB."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from detector.errors import DataError
from detector.fonts import drawable, font

Colour = tuple[int, int, int]
Rectangle = tuple[float, float, float, float]

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
) -> NDArray[np.uint8]:
    """A copy of the image, of any channels, with (N, 4) boxes in its pixels, labelled with the class's name and score.

    ids: the numbers of objects that are tracked, which are written, too; -1: none.

    The picture's long side is `long_side` pixels; if it is not given, small images are enlarged by a whole number so
    that text can be read on them, and others keep their size. A label for which there is no room beside the labels
    before it, or that would hide another box, is left out; its box is still drawn.
    """
    boxes = np.asarray(boxes_xyxy, dtype=np.float64).reshape(-1, 4)
    labels = np.asarray(classes, dtype=np.int64).reshape(-1)
    confidences = None if scores is None else np.asarray(scores, dtype=np.float64).reshape(-1)
    picture = _resized(in_colours(image), _factor(image, long_side))
    scale = np.array((picture.shape[1] / image.shape[1], picture.shape[0] / image.shape[0]) * 2)
    canvas = Image.fromarray(picture)
    pen = ImageDraw.Draw(canvas)
    boxes = boxes * scale
    line, text_size = _pen_sizes(picture.shape[:2], boxes)

    placed: list[Rectangle] = []
    texts: list[tuple[Rectangle, str, Colour, ImageFont.FreeTypeFont]] = []
    for i, box in enumerate(boxes):
        colour = class_colour(int(labels[i]))
        left, top, right, bottom = (float(side) for side in box)
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=line)
        text = _label(
            shown_name(names, labels[i]), None if confidences is None else confidences[i], -1 if ids is None else ids[i]
        )
        text_font = font(text_size, text)
        others = np.delete(boxes, i, axis=0)
        place = _free_place((left, top, right, bottom), _text_size(pen, text, text_font), canvas.size, placed, others)
        if place is not None:
            placed.append(place)
            texts.append((place, text, colour, text_font))
    for place, text, colour, text_font in texts:  # after all boxes, so that no line runs through a label
        pen.rounded_rectangle(place, radius=(place[3] - place[1]) / 5, fill=colour)
        middle = ((place[0] + place[2]) / 2, (place[1] + place[3]) / 2)
        pen.text(middle, text, fill=_contrast(colour), font=text_font, anchor="mm")
    return np.asarray(canvas).copy()


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
    """The image enlarged smoothly or shrunk by area."""
    if factor == 1:
        return np.ascontiguousarray(image)
    size = max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor))
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
    return cv2.resize(np.ascontiguousarray(image), size, interpolation=method)


def _text_size(pen: ImageDraw.ImageDraw, text: str, text_font: ImageFont.FreeTypeFont) -> tuple[float, float]:
    """Width and height of a label: the text and some air around it."""
    return pen.textlength(text, font=text_font) + text_font.size * 0.6, text_font.size * 1.35


def _free_place(
    box: Rectangle,
    size: tuple[float, float],
    canvas: tuple[int, int],
    placed: Sequence[Rectangle],
    others_xyxy: NDArray[np.float64],
) -> Rectangle | None:
    """A place for a label of `size` above, in or below a box: within the canvas, off the labels placed before, and not
    over half of another box or more.
    """
    left, top, right, bottom = box
    width, height = size
    x = min(max(0.0, left), max(0.0, canvas[0] - width))
    x_right = min(max(0.0, right - width), max(0.0, canvas[0] - width))
    other_areas = _areas(others_xyxy)
    for x0, y0 in ((x, top - height), (x, top), (x, bottom), (x_right, top - height), (x_right, bottom - height)):
        place = np.array((x0, y0, x0 + width, y0 + height))
        if y0 < 0 or place[3] > canvas[1]:
            continue
        if _covered(np.array(placed).reshape(-1, 4), place).any():
            continue
        if (_covered(others_xyxy, place) < 0.5 * other_areas.clip(min=1)).all():
            return x0, y0, x0 + width, y0 + height
    return None


def _areas(boxes_xyxy: NDArray[np.float64]) -> NDArray[np.float64]:
    return (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(min=0).prod(axis=1)


def _covered(boxes_xyxy: NDArray[np.float64], place_xyxy: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) the area of each box under a rectangle, in square pixels."""
    low, high = np.maximum(boxes_xyxy[:, :2], place_xyxy[:2]), np.minimum(boxes_xyxy[:, 2:], place_xyxy[2:])
    return (high - low).clip(min=0).prod(axis=1)


def _contrast(colour: Colour) -> Colour:
    """White or near black, whichever reads better on the colour (ITU-R BT.601 luma)."""
    luma = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return (20, 20, 20) if luma > 150 else (255, 255, 255)
