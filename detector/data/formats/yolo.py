"""YOLO labels: a text file an image, one object a line, `class cx cy w h` or `class x1 y1 x2 y2 x3 y3 ...`.

Coordinates are fractions of the image's width and height. The labels of `.../images/a/b.jpg` are in
`.../labels/a/b.txt`, for the last `images` of the path; without one they lie beside the image.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.data.formats.listing import annotation_files, annotation_path, listed_images
from detector.data.labels import BACKGROUND, NO_LABELS, ROUNDING, Box, Labels, usable

COLUMNS = ("x", "y", "width", "height")
NO_LABEL_FILES = ("classes.txt", "notes.txt", "readme.txt", "labels.txt", "predefined_classes.txt")  # beside labels


class _RowError(Exception):
    """Why a row cannot be used."""


def label_path(image: str | Path) -> Path:
    """Where the labels of an image lie: in `labels/` for the last `images/` of its path, else beside it."""
    return Path(annotation_path(str(image), label_folder, ".txt"))


def label_folder(folder: str) -> str:
    """The folder of the labels of the images in a folder."""
    parts = folder.split(os.sep)
    for position in range(len(parts) - 1, -1, -1):
        if parts[position] == "images":
            return os.sep.join([*parts[:position], "labels", *parts[position + 1 :]])
    return folder


class YoloLabels:
    """The labels of a split; see `formats.Annotations`."""

    def __init__(self, description: DataDescription, split: str, polygons: bool = False) -> None:
        self.paths, self.findings = listed_images(description, split)
        self.names, self._keypoints, self._polygons = description.names, description.keypoints, polygons
        self.files, orphans = annotation_files(self.paths, label_folder, ".txt")
        orphans = [path for path in orphans if os.path.basename(path).lower() not in NO_LABEL_FILES]
        self.findings += [Finding("no picture", path) for path in orphans]

    def expected(self, i: int) -> str:
        """Where the labels of image i are looked for."""
        return annotation_path(self.paths[i], label_folder, ".txt")

    def read(self, numbers: Sequence[int], sizes: Sequence[tuple[int, int] | None]) -> list[Labels]:
        """The labels of these images; all plain files among them in one go."""
        read: dict[int, Labels] = {}
        plain: dict[int, list[list[bytes]]] = {}
        for i in numbers:
            if (file := self.files[i]) is None:
                read[i] = NO_LABELS
                continue
            try:
                content = self._content(i)
            except FileNotFoundError:
                read[i] = NO_LABELS
            except OSError as error:
                read[i] = _unreadable(file, error, self.paths[i])
            else:
                rows = [line.split() for line in content.rstrip().splitlines()]
                if not rows:
                    read[i] = BACKGROUND
                elif all(len(words) == 5 for words in rows):  # and no line is blank
                    plain[i] = rows
                else:
                    read[i] = self._slowly(content, i)
        read |= self._at_once(plain)
        return [read[i] for i in numbers]

    def _at_once(self, plain: dict[int, list[list[bytes]]]) -> dict[int, Labels]:
        """The labels of files of rows of five words; those in which nothing is to be noticed without a look at a row.

        Most files are such, and a loop over the rows takes ten times as long.
        """
        numbers, counts = list(plain), [len(rows) for rows in plain.values()]
        words = [word for rows in plain.values() for row in rows for word in row]
        try:
            table = np.array(words, dtype="S").astype(np.float64).reshape(-1, 5)
        except ValueError:  # some word is no number
            return {i: self._slowly(self._content(i), i) for i in numbers}
        classes, boxes_xywh = table[:, 0], table[:, 1:]
        half = boxes_xywh[:, 2:] / 2
        good = (
            (boxes_xywh[:, 2:] > 0).all(axis=1)
            & (boxes_xywh[:, :2] >= half).all(axis=1)
            & (boxes_xywh[:, :2] + half <= 1).all(axis=1)
            & (classes >= 0)
            & (classes < len(self.names))
            & (classes == np.floor(classes))
        )
        ends = np.cumsum(counts)
        labels = {}
        for i, count, end in zip(numbers, counts, ends.tolist(), strict=True):
            rows = slice(end - count, end)
            if not good[rows].all() or (count > 1 and len(set(map(tuple, table[rows].tolist()))) < count):
                labels[i] = self._slowly(self._content(i), i)
                continue
            labels[i] = Labels(
                classes=classes[rows].astype(np.int32),
                boxes_xywh=boxes_xywh[rows],
                rows=np.arange(1, count + 1, dtype=np.int32),
                ignored=np.zeros(count, dtype=bool),
                areas=np.full(count, np.nan, dtype=np.float32),
                polygons=(),
            )
        return labels

    def _content(self, i: int) -> bytes:
        with open(self.files[i], "rb") as opened:
            return opened.read()

    def _slowly(self, content: bytes, i: int) -> Labels:
        file, image = self.files[i], self.paths[i]
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return _unreadable(file, error, self.paths[i])
        return parse_labels(text, file, len(self.names), image, self._keypoints, self._polygons)


def _unreadable(file: str, error: Exception, image: str) -> Labels:
    text = f"cannot be read as text ({error}); write `class cx cy w h` on each line"
    return BACKGROUND._replace(findings=(Finding("bad file", file, text, image),))


def parse_labels(
    text: str, file: str, class_count: int, image: str = "", keypoints: int = 0, polygons: bool = False
) -> Labels:
    """The labels in `text`; `file` names it in messages. Rows with a problem are findings, never guessed.

    keypoints: numbers that follow each box in a set of keypoints; they are left out.
    """
    boxes, findings = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.split()):
            continue
        try:
            label = _class(words[0], class_count)
            xywh, polygon = _box(words[1:], keypoints)
        except _RowError as reason:
            findings.append(Finding("bad row", f"{file}:{number}", str(reason), image, number))
            continue
        boxes.append(Box(label, xywh, number, polygon=polygon if polygons else None))
    return usable(boxes, f"{file}:", image, findings)


def _class(word: str, class_count: int) -> int:
    value = _number(word, "class")
    if not value.is_integer():
        raise _RowError(f"class {word} is not a whole number; the first column is the class's number in `names`")
    if not 0 <= value < class_count:
        raise _RowError(f"class {word} is outside 0..{class_count - 1}; add it to `names` or mend the label")
    return int(value)


def _box(words: list[str], keypoints: int) -> tuple[tuple[float, float, float, float], np.ndarray | None]:
    """(cx, cy, w, h) as written, of a row with or without keypoints; or around a polygon of three or more points."""
    if len(words) == 4 or (keypoints and len(words) == 4 + keypoints):
        x, y, width, height = (_fraction(word, name) for word, name in zip(words[:4], COLUMNS, strict=True))
        return (x, y, width, height), None
    if keypoints:
        raise _RowError(
            f"has {len(words) + 1} columns; with kpt_shape as in the description there are {5 + keypoints}, or 5"
        )
    if len(words) < 6 or len(words) % 2:
        raise _RowError(
            f"has {len(words) + 1} columns; write `class cx cy w h`, or a class and the x y of three or more points"
        )
    points = np.array([_fraction(word, "xy"[i % 2]) for i, word in enumerate(words)]).reshape(-1, 2)
    (left, top), (right, bottom) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    return ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), points


def _number(word: str, name: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _RowError(f"{name} {word!r} is not a number; write `class cx cy w h`, separated by blanks")
    return value


def _fraction(word: str, name: str) -> float:
    """A number from 0 to 1 but for rounding. A size may be below 0: then the box is flat."""
    value = _number(word, name)
    if not -ROUNDING <= value <= 1 + ROUNDING and not (name in ("width", "height") and value < 0):
        side = "width" if name in ("x", "width") else "height"
        raise _RowError(f"{name} {value:g} is outside 0..1 (fractions of the image's {side}; divide pixels by it)")
    return value
