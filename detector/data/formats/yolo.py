"""Parses YOLO label text: one object a line, `class cx cy w h` or `class x1 y1 x2 y2 x3 y3 ...`.

Coordinates are fractions of the image's width and height.
"""

import math
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-3  # how far outside 0..1 a fraction is taken for rounding and clipped
FOUR_DECIMALS = 1e-4  # how far a side may lie outside before it is worth a warning: what writing 4 decimals does
COLUMNS = ("x", "y", "width", "height")


class ParsedLabels(NamedTuple):
    """The objects of one image and what was noticed about them.

    `problems` are messages about rows that the user has to mend; the tuples after it are places `file:line` of rows
    that have been dealt with.
    """

    classes: np.ndarray  # (N,) int64
    boxes_xywh: np.ndarray  # (N, 4) float64 centre and size, fractions of the image's width and height
    problems: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()  # reached outside the image and was cut off
    flat: tuple[str, ...] = ()  # without width or height, dropped
    duplicates: tuple[str, ...] = ()  # the same row again, dropped


class _RowError(Exception):
    """Why a row cannot be used."""


def no_labels() -> ParsedLabels:
    """The labels of a background image."""
    return ParsedLabels(np.zeros(0, np.int64), np.zeros((0, 4)))


def parse_labels(text: str, file: str, class_count: int) -> ParsedLabels:
    """The labels in `text`; `file` names it in messages. Rows with a problem are reported, never guessed."""
    rows: dict[tuple[float, ...], None] = {}
    problems, clipped, flat, duplicates = [], [], [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.split()):
            continue
        place = f"{file}:{number}"
        try:
            label = _class(words[0], class_count)
            box_xywh = _box(words[1:])
        except _RowError as reason:
            problems.append(f"{place}: {reason}")
            continue
        if box_xywh[2] <= 0 or box_xywh[3] <= 0:
            flat.append(place)
            continue
        try:
            inside_xywh, was_clipped = _inside(box_xywh)
        except _RowError as reason:
            problems.append(f"{place}: {reason}")
            continue
        if was_clipped:
            clipped.append(place)
        row = (label, *inside_xywh)
        if row in rows:
            duplicates.append(place)
        rows[row] = None
    table = np.array(list(rows), dtype=np.float64).reshape(-1, 5)
    return ParsedLabels(
        table[:, 0].astype(np.int64), table[:, 1:], tuple(problems), tuple(clipped), tuple(flat), tuple(duplicates)
    )


def _class(word: str, class_count: int) -> int:
    value = _number(word, "class")
    if not value.is_integer():
        raise _RowError(f"class {word} is not a whole number; the first column is the class's number in `names`")
    if not 0 <= value < class_count:
        raise _RowError(f"class {word} is outside 0..{class_count - 1}; add it to `names` or mend the label")
    return int(value)


def _box(words: list[str]) -> tuple[float, float, float, float]:
    """(cx, cy, w, h) as written, or around a polygon of three or more points."""
    if len(words) == 4:
        x, y, width, height = (_number(word, name) for word, name in zip(words, COLUMNS, strict=True))
        return x, y, width, height
    if len(words) < 6 or len(words) % 2:
        raise _RowError(
            f"has {len(words) + 1} columns; write `class cx cy w h`, or a class and the x y of three or more points"
        )
    points = [_number(word, "xy"[i % 2]) for i, word in enumerate(words)]
    for i, value in enumerate(points):
        _fraction(value, "xy"[i % 2])
    left, right = min(points[::2]), max(points[::2])
    top, bottom = min(points[1::2]), max(points[1::2])
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def _inside(box_xywh: tuple[float, float, float, float]) -> tuple[tuple[float, ...], bool]:
    """The part of a box inside the image, and whether more than FOUR_DECIMALS was cut off."""
    x, y, width, height = (_fraction(value, name) for value, name in zip(box_xywh, COLUMNS, strict=True))
    left, right, top, bottom = x - width / 2, x + width / 2, y - height / 2, y + height / 2
    excess = max(-left, -top, right - 1, bottom - 1)
    was_clipped = (x, y, width, height) != box_xywh or excess > FOUR_DECIMALS
    if excess <= 0:
        return (x, y, width, height), was_clipped
    left, right, top, bottom = max(left, 0.0), min(right, 1.0), max(top, 0.0), min(bottom, 1.0)
    return ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), was_clipped


def _number(word: str, name: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _RowError(f"{name} {word!r} is not a number; write `class cx cy w h`, separated by blanks")
    return value


def _fraction(value: float, name: str) -> float:
    """`value` clipped to 0..1 when no more than rounding lies outside."""
    if not -ROUNDING <= value <= 1 + ROUNDING:
        side = "width" if name in ("x", "width") else "height"
        raise _RowError(f"{name} {value:g} is outside 0..1 (fractions of the image's {side}; divide pixels by it)")
    return min(max(value, 0.0), 1.0)
