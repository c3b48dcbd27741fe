"""The index of a split: which images there are, how large they are and what is in them, as packed arrays.

Packed arrays, not lists of objects: a million images with ten boxes each take half a gigabyte, and workers share them,
forked or not, without copying.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np

from detector.classes import order_of
from detector.data import shard
from detector.data.findings import Finding, summaries
from detector.data.header import Range
from detector.data.image import decode, decode_fitted
from detector.data.shared import SharedMemory
from detector.data.storage import is_url
from detector.errors import DataError


@dataclass(frozen=True, eq=False)
class Index:
    """A split of a data set with n images and m boxes, in the order of the images' paths."""

    paths: np.ndarray  # (bytes,) uint8, all paths one after the other, relative to `root` where they lie in it
    path_offsets: np.ndarray  # (n + 1,) int64
    heights: np.ndarray  # (n,) int32 pixels, after EXIF orientation
    widths: np.ndarray  # (n,) int32 pixels, after EXIF orientation
    labelled: np.ndarray  # (n,) bool: whether there is an annotation; without one they are background
    box_offsets: np.ndarray  # (n + 1,) int64
    boxes_xywh: np.ndarray  # (m, 4) float64 centre and size, fractions of the image
    classes: np.ndarray  # (m,) int32
    ignored_boxes: np.ndarray  # (m,) bool: crowds and difficult objects, not learnt and no fault of a detection
    areas: np.ndarray  # (m,) float32 square pixels where an annotation says another than the box's, else NaN
    rows: np.ndarray  # (m,) int32 line or object in the annotation
    points: np.ndarray  # (p, 2) float32 corners of polygons, fractions of the image; none unless asked for
    point_offsets: np.ndarray  # (m + 1,) int64, or (0,) without polygons
    names: tuple[str, ...]
    root: str = ""
    findings: tuple[Finding, ...] = ()
    image_ids: tuple[Any, ...] = ()  # of COCO images, in their file
    category_ids: tuple[Any, ...] = ()  # of the classes, in a COCO file
    channels: int = 3  # of an image once it is decoded
    value_range: Range | None = None  # what becomes 0 and 255 in files of more than 8 bits
    # (n, 2) int64 first byte and size of each image in its shard; (0, 2): they are files of their own
    members: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.heights)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each kind of finding that is not fine."""
        return summaries(self.findings)

    def path(self, i: int) -> Path:
        """Where image i lies; in a shard, as if that were a folder."""
        name = self._name(i).replace(shard.MARK, ".tar/", 1) if len(self.members) else self._name(i)
        return Path(name) if is_url(name) else Path(self.root, name)

    def _name(self, i: int) -> str:
        return os.fsdecode(self.paths[self.path_offsets[i] : self.path_offsets[i + 1]].tobytes())

    def size(self, i: int) -> tuple[int, int]:
        """(height, width) of image i in pixels, after EXIF orientation, as its header says."""
        return int(self.heights[i]), int(self.widths[i])

    def content(self, i: int) -> bytes:
        """The bytes of image i's file. Raises DataError where it cannot be read."""
        if len(self.members):
            return shard.content(self.place(i), *self.members[i].tolist())
        try:
            return self.path(i).read_bytes()
        except OSError as error:
            raise DataError(f"{self.path(i)}: cannot be read ({error.strerror or error}); put the image back") from None

    def image(self, i: int) -> np.ndarray:
        """(H, W, channels) uint8: image i as it is decoded. Errors are those of `content` and `decode`."""
        return decode(self.content(i), self.place(i), self.channels, self.size(i), self.value_range)

    def fitted(self, i: int, imgsz: int) -> np.ndarray:
        """(H, W, channels) uint8: the same with its long side resized to imgsz."""
        return decode_fitted(self.content(i), self.place(i), imgsz, self.size(i), self.channels, self.value_range)

    def place(self, i: int) -> str:
        """Image i, in messages: its path, or train-000.tar:000001.jpg in a shard."""
        name = self._name(i)
        return name if is_url(name) else os.path.join(self.root, name)

    @cached_property
    def digest(self) -> str:
        """A digest of the images' names, in their order; folders do not count, so that a data set may be moved."""
        names = "\n".join(os.path.basename(shard.member_of(self._name(i))) for i in range(len(self)))
        return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()

    def _boxes(self, i: int) -> slice:
        return slice(self.box_offsets[i], self.box_offsets[i + 1])

    def boxes_xyxy(self, i: int) -> np.ndarray:
        """(N, 4) float64 corners in pixels of the original image i."""
        xywh = self.boxes_xywh[self._boxes(i)]
        half = xywh[:, 2:] / 2
        corners = np.concatenate((xywh[:, :2] - half, xywh[:, :2] + half), axis=1)
        return corners * np.array((self.widths[i], self.heights[i]) * 2, dtype=np.float64)

    def labels(self, i: int) -> np.ndarray:
        """(N,) int64 classes of the boxes of image i."""
        return self.classes[self._boxes(i)].astype(np.int64)

    def ignored(self, i: int) -> np.ndarray:
        """(N,) bool: boxes that are not learnt, and no fault of a detection."""
        return self.ignored_boxes[self._boxes(i)]

    def polygons(self, i: int) -> list[np.ndarray | None]:
        """For each box of image i (P, 2) float64 corners in pixels, None where it has no polygon."""
        size = np.array((self.widths[i], self.heights[i]), dtype=np.float64)
        start, stop = self.box_offsets[i : i + 2]
        if not len(self.point_offsets):
            return [None] * int(stop - start)
        ends = self.point_offsets[start : stop + 1].tolist()
        return [self.points[a:b] * size if b > a else None for a, b in pairwise(ends)]

    def with_classes_of(self, names: tuple[str, ...]) -> "Index | None":
        """The same images and boxes with the classes numbered as in `names`; None where those are other classes."""
        order = order_of(self.names, names)
        if order is None:
            return None
        ids = self.category_ids and tuple(self.category_ids[order.index(i)] for i in range(len(names)))
        classes = np.array(order, dtype=self.classes.dtype)[self.classes]
        return replace(self, names=names, classes=classes, category_ids=ids)

    def take(self, numbers: np.ndarray) -> "Index":
        """The images with these numbers, in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        boxes, box_offsets = _ragged(self.box_offsets, numbers)
        names, path_offsets = _ragged(self.path_offsets, numbers)
        return replace(
            self,
            paths=self.paths[names],
            path_offsets=path_offsets,
            heights=self.heights[numbers],
            widths=self.widths[numbers],
            labelled=self.labelled[numbers],
            box_offsets=box_offsets,
            image_ids=tuple(self.image_ids[i] for i in numbers.tolist()) if self.image_ids else (),
            members=self.members[numbers] if len(self.members) else self.members,
            **self._of_boxes(boxes),
        )

    @classmethod
    def joined(cls, parts: Sequence["Index"]) -> "Index":
        """The images of one or more indices with the same classes and root, one after the other."""
        arrays = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls) if f.name not in _NO_ARRAYS}
        columns = {name: np.concatenate(several) for name, several in arrays.items() if not name.endswith("offsets")}
        for name, several in arrays.items():
            if name.endswith("offsets") and len(several[0]):
                columns[name] = _offsets(np.concatenate([np.diff(offsets) for offsets in several]))
            elif name.endswith("offsets"):
                columns[name] = several[0]
        return replace(
            parts[0],
            **columns,
            findings=tuple(finding for part in parts for finding in part.findings),
            image_ids=tuple(number for part in parts for number in part.image_ids),
        )

    def keep(self, boxes: np.ndarray) -> "Index":
        """All images, with the boxes for which the (m,) mask is true."""
        counts = np.bincount(self.image_of_box[boxes], minlength=len(self))
        kept = np.flatnonzero(boxes)
        return replace(self, box_offsets=_offsets(counts), **self._of_boxes(kept))

    @property
    def image_of_box(self) -> np.ndarray:
        """(m,) int64 the image that each box is in."""
        return np.repeat(np.arange(len(self)), np.diff(self.box_offsets))

    def _of_boxes(self, boxes: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of boxes with these numbers."""
        names = ("boxes_xywh", "classes", "ignored_boxes", "areas", "rows")
        columns = {name: getattr(self, name)[boxes] for name in names}
        if len(self.point_offsets):
            points, columns["point_offsets"] = _ragged(self.point_offsets, boxes)
            columns["points"] = self.points[points]
        return columns

    def shared(self) -> "Index":
        """The same in memory that workers share, however they are started."""
        if "_memory" in self.__dict__:
            return self
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_ARRAYS}
        layout, size = _layout(arrays)
        memory = SharedMemory(size)
        index = replace(self, **_views(memory, layout))
        for name, array in arrays.items():
            getattr(index, name)[...] = array
        object.__setattr__(index, "_memory", (memory, layout))
        return index

    def memory_file(self) -> int | None:
        """The number of the file that its memory is (inode), if it is shared: the same in each process that has it."""
        memory, _ = self.__dict__.get("_memory", (None, None))
        return memory.inode() if memory else None

    def __reduce__(self) -> tuple[Callable[..., "Index"], tuple[Any, ...]]:
        """To a worker that is being started the arrays go as the memory they lie in; elsewhere they are copied."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        memory, layout = self.__dict__.get("_memory", (None, None))
        if memory is None or get_spawning_popen() is None:
            return _restored, (state, None, None)
        return _restored, ({k: v for k, v in state.items() if k not in layout}, memory, layout)


ALIGNMENT = 64  # bytes
_NO_ARRAYS = ("names", "root", "findings", "image_ids", "category_ids", "channels", "value_range")
Layout = dict[str, tuple[Any, tuple[int, ...], int]]  # of each array its dtype, shape and first byte


def _layout(arrays: dict[str, np.ndarray]) -> tuple[Layout, int]:
    """Where arrays lie one after the other, and where they end."""
    layout: Layout = {}
    start = 0
    for name, array in arrays.items():
        layout[name] = (array.dtype.str, array.shape, start)
        start = -(-(start + array.nbytes) // ALIGNMENT) * ALIGNMENT
    return layout, start


def _views(memory: SharedMemory, layout: Layout) -> dict[str, np.ndarray]:
    return {
        name: memory.array(np.dtype(dtype), start, int(np.prod(shape))).reshape(shape)
        for name, (dtype, shape, start) in layout.items()
    }


def _restored(state: dict[str, Any], memory: SharedMemory | None, layout: Layout | None) -> Index:
    if memory is None:
        return Index(**state)
    index = Index(**state, **_views(memory, layout))
    object.__setattr__(index, "_memory", (memory, layout))
    return index


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def _ragged(offsets: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows the groups with these numbers consist of, in this order, and the offsets of what they make."""
    counts = offsets[numbers + 1] - offsets[numbers]
    ends = _offsets(counts)
    rows = np.arange(ends[-1]) + np.repeat(offsets[numbers] - ends[:-1], counts)
    return rows, ends
