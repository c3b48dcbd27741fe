"""The index of a split: which images there are, how large they are and what is in them, as packed arrays.

Packed arrays (not lists of objects) are shared by forked workers without being copied by reference counts.
"""

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from detector.classes import order_of
from detector.data.description import DataDescription
from detector.data.formats.yolo import ParsedLabels, no_labels, parse_labels
from detector.data.shapes import ensure_generated
from detector.distributed import is_main
from detector.errors import DataError
from detector.files import IMAGES

FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")  # Pillow's names of what OpenCV decodes, too
SHOWN = 10  # problems in an error's message; where there are more, all of them are written to a file
ORIENTATION = 274  # the EXIF tag; 5 to 8 swap height and width


@dataclass(frozen=True, eq=False)
class Index:
    """A split of a data set with n images and m boxes, in the order of the images' paths."""

    paths: np.ndarray  # (bytes,) uint8, all paths one after the other
    path_offsets: np.ndarray  # (n + 1,) int64
    heights: np.ndarray  # (n,) int32 pixels, after EXIF orientation
    widths: np.ndarray  # (n,) int32 pixels, after EXIF orientation
    box_offsets: np.ndarray  # (n + 1,) int64
    boxes_xywh: np.ndarray  # (m, 4) float64 centre and size, fractions of the image
    classes: np.ndarray  # (m,) int64
    names: tuple[str, ...]
    warnings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.heights)

    def path(self, i: int) -> Path:
        """Where image i lies."""
        return Path(os.fsdecode(self.paths[self.path_offsets[i] : self.path_offsets[i + 1]].tobytes()))

    def size(self, i: int) -> tuple[int, int]:
        """(height, width) of image i in pixels, after EXIF orientation, as its header says."""
        return int(self.heights[i]), int(self.widths[i])

    @cached_property
    def digest(self) -> str:
        """A digest of the images' names, in their order; folders do not count, so that a data set may be moved."""
        names = "\n".join(self.path(i).name for i in range(len(self)))
        return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()

    def boxes_xyxy(self, i: int) -> np.ndarray:
        """(N, 4) float64 corners in pixels of the original image i."""
        xywh = self.boxes_xywh[self.box_offsets[i] : self.box_offsets[i + 1]]
        half = xywh[:, 2:] / 2
        corners = np.concatenate((xywh[:, :2] - half, xywh[:, :2] + half), axis=1)
        return corners * np.array((self.widths[i], self.heights[i]) * 2, dtype=np.float64)

    def labels(self, i: int) -> np.ndarray:
        """(N,) int64 classes of the boxes of image i."""
        return self.classes[self.box_offsets[i] : self.box_offsets[i + 1]]

    def with_classes_of(self, names: tuple[str, ...]) -> "Index | None":
        """The same images and boxes with the classes numbered as in `names`; None where those are other classes."""
        order = order_of(self.names, names)
        return None if order is None else replace(self, names=names, classes=np.array(order)[self.classes])


class _Record(NamedTuple):
    """What was found out about one image file."""

    path: Path
    size: tuple[int, int] | None  # height, width; None when unreadable
    reason: str  # why it is unreadable
    labels: ParsedLabels | None  # None when there is no label file


def build_index(description: DataDescription, split: str) -> Index:
    """The index of one split, drawn first if the description says that the project draws it.

    Images that cannot be read and flat, clipped or repeated boxes become `warnings`. Raises DataError when the split or
    its images or labels are missing or when labels break a rule: the first are named, and where there are many, all are
    written to a file of the system's folder for temporary ones.
    """
    if split not in description.splits:
        raise DataError(f"{description.path}: '{split}' is missing; add `{split}: images/{split}`")
    ensure_generated(description)
    listed = [path for entry in description.splits[split] for path in _images(description, split, entry)]
    paths = sorted(set(listed), key=str)
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        records = list(pool.map(lambda path: _record(path, len(description.names)), paths))

    if split != "test" and all(record.labels is None for record in records):
        raise DataError(
            f"{description.path}: {split}: none of the {len(records)} images has a label file; "
            f"looked for {label_path(paths[0])} and its like. Put the labels there"
        )
    _raise_problems(records)
    unreadable = [f"{record.path}: {record.reason}" for record in records if record.size is None]
    readable = [record for record in records if record.size is not None]
    if not readable:
        raise DataError(f"{description.path}: {split}: none of its images can be read (first: {unreadable[0]})")
    labels = [record.labels or no_labels() for record in readable]
    repeated = [str(path) for path, count in Counter(listed).items() if count > 1]
    warnings = (
        _warning(unreadable, "unreadable images were left out"),
        _warning(repeated, "images are listed more than once and count once"),
        _warning(_joined(labels, "flat"), "boxes without width or height were dropped"),
        _warning(_joined(labels, "duplicates"), "rows that repeat another were dropped"),
        _warning(_joined(labels, "clipped"), "boxes reach outside their image and were clipped"),
    )
    return _packed(readable, labels, description.names, tuple(filter(None, warnings)))


def label_path(image: Path) -> Path:
    """Where the labels of an image lie: in `labels/` for the last `images/` of its path, else beside it."""
    parts = list(image.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _images(description: DataDescription, split: str, entry: Path) -> list[Path]:
    """The images of a folder, with its subfolders, or of a text file that lists them."""
    place = f"{description.path}: {split}: {entry}"
    if entry.is_dir():
        found = [
            Path(folder, name)
            for folder, _, names in os.walk(entry, followlinks=True)
            for name in names
            if name.lower().endswith(IMAGES) and not name.startswith(".")
        ]
        if not found:
            raise DataError(f"{place} holds no images ({' '.join(IMAGES)}); put them there or name another folder")
        return found
    if not entry.is_file():
        raise DataError(f"{place} does not exist; paths are relative to {description.root}")
    if entry.suffix.lower() in IMAGES:
        raise DataError(f"{place} is an image; name its folder, or a text file that lists images")
    try:
        lines = [line.strip() for line in entry.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read as a list of images ({error})") from None
    found = [entry.parent / line for line in lines if line]
    if not found:
        raise DataError(f"{place} lists no images; write one path a line")
    return found


def _record(path: Path, class_count: int) -> _Record:
    size, reason = _header(path)
    file = label_path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return _Record(path, size, reason, None)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{file}: cannot be read as text ({error}); write `class cx cy w h` on each line"
        return _Record(path, size, reason, no_labels()._replace(problems=(problem,)))
    return _Record(path, size, reason, parse_labels(text, str(file), class_count))


def _header(path: Path) -> tuple[tuple[int, int] | None, str]:
    """(height, width) after EXIF orientation, read without decoding; or None and the reason."""
    try:
        if path.stat().st_size == 0:
            return None, "is empty"
        with Image.open(path) as image:
            if image.format not in FORMATS:
                return None, f"is {image.format}; save it as JPEG or PNG"
            width, height = image.size
            orientation = 1
            if image.format == "TIFF":  # Pillow releases differ in whether `size` is turned already
                width, height = image.tag_v2[256], image.tag_v2[257]
            if image.format != "PNG" or "exif" in image.info:  # else Pillow would decode a PNG in search of EXIF
                orientation = _orientation(image)
    except FileNotFoundError:
        return None, "does not exist"
    except Exception as error:  # a damaged header makes Pillow's readers raise nearly anything
        return None, f"cannot be read ({type(error).__name__}: {error})"
    if min(height, width) < 1:
        return None, f"is {width} x {height} pixels"
    return ((width, height) if orientation in (5, 6, 7, 8) else (height, width)), ""


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF is ignored by decoders, too
        return 1


def _raise_problems(records: Iterable[_Record]) -> None:
    problems = [problem for record in records if record.labels for problem in record.labels.problems]
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        more = f"\nand {len(problems) - SHOWN:,} more; {_written(problems)}" if len(problems) > SHOWN else ""
        listed = "\n".join(problems[:SHOWN])
        raise DataError(f"{len(problems):,} labels break a rule:\n{listed}{more}")


def _written(problems: Sequence[str]) -> str:
    """Where all the problems can be read, once they are written there. All ranks meet them, and the main one writes."""
    if not is_main():
        return ""
    try:
        file, path = tempfile.mkstemp(prefix="bad_labels_", suffix=".txt")
        with open(file, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.writelines(f"{problem}\n" for problem in problems)
    except OSError as error:
        return f"their list cannot be written ({error.strerror or error})"
    return f"all of them are listed in {path}"


def _joined(labels: Iterable[ParsedLabels], field: str) -> list[str]:
    return [place for parsed in labels for place in getattr(parsed, field)]


def _warning(places: Sequence[str], what: str) -> str:
    return f"{len(places):,} {what} (first: {places[0]})" if places else ""


def _packed(
    records: Sequence[_Record], labels: Sequence[ParsedLabels], names: tuple[str, ...], warnings: tuple[str, ...]
) -> Index:
    encoded = [os.fsencode(record.path) for record in records]
    sizes = np.array([record.size for record in records], dtype=np.int32).reshape(-1, 2)
    return Index(
        paths=np.frombuffer(b"".join(encoded), dtype=np.uint8),
        path_offsets=np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        heights=sizes[:, 0].copy(),
        widths=sizes[:, 1].copy(),
        box_offsets=np.cumsum([0, *(len(parsed.classes) for parsed in labels)], dtype=np.int64),
        boxes_xywh=np.concatenate([parsed.boxes_xywh for parsed in labels]),
        classes=np.concatenate([parsed.classes for parsed in labels]),
        names=names,
        warnings=warnings,
    )
