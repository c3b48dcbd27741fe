"""A file of decoded images, which is mapped into memory by every process of a run and taken up by later runs.

Its name holds a digest of what its pixels follow from, the images' paths, sizes and times of change, and imgsz; then
how many of the images it holds. So it is never out of date, only unused, and may be deleted at any time.
"""

import hashlib
import mmap
import os
import shutil
from pathlib import Path
from uuid import uuid4

import numpy as np

from detector.data import shard
from detector.data.index import Index
from detector.data.storage import is_url

MOST = 0.8  # of the disk that is free, where the user names no budget
FORMAT = 2  # of the file; another one has another name


class DiskPixels:
    """As `cache.RamPixels`, in a file: the checksums, then the pixels."""

    def __init__(self, index: Index, imgsz: int, offsets: np.ndarray, budget: int | None, folder: Path) -> None:
        """Of as many of the first images as `budget` bytes hold, or those that are in the folder already.

        `offsets`: (n + 1,) where each image's pixels begin. Without a budget what is there is enough; if nothing is, a
        file takes 0.8 of what is free. `images` may be 0; then there is no file. Raises OSError where none can be made.
        """
        ends = offsets + 8 * np.arange(len(offsets))
        name = f"images-{imgsz}-{_digest(index, imgsz)}"
        there = [*map(_images_in, folder.glob(f"{name}-*.pixels"))]
        self.images = max((n for n in there if n < len(ends)), default=0)
        if budget is not None or not self.images:
            fits = int(np.searchsorted(ends, MOST * free_space(folder) if budget is None else budget, side="right")) - 1
            self.images = max(fits, self.images if budget is None or ends[self.images] <= budget else 0)
        self.size = int(ends[self.images])
        self.path = folder / f"{name}-{self.images}.pixels"
        if not self.images:
            return
        if not self.path.is_file() or self.path.stat().st_size != self.size:
            _create(self.path, self.size)
        self._attach()

    def others(self) -> list[Path]:
        """Such files of other images, sizes or budgets."""
        return [path for path in self.path.parent.glob("images-*-*-*.pixels") if path != self.path]

    def pixels(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) uint8, to read."""
        return np.frombuffer(self._map, np.uint8, stop - start, 8 * self.images + start)

    def checksums(self) -> np.ndarray:
        """(images,) uint64; 0: nothing was kept yet."""
        return np.frombuffer(self._map, np.uint64, self.images)

    def write(self, start: int, pixels: np.ndarray) -> None:
        self.pixels(start, start + len(pixels))[:] = pixels

    def _attach(self) -> None:
        with open(self.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.size)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_map"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._attach()


def free_space(folder: Path) -> int:
    """Bytes that are free for a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _images_in(file: Path) -> int:
    """How many images a file holds, by its name."""
    count = file.stem.rpartition("-")[2]
    return int(count) if count.isdecimal() else 0


def _digest(index: Index, imgsz: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {imgsz} {index.channels}".encode())
    for i in range(len(index)):
        digest.update(os.fsencode(os.path.abspath(index.place(i))) + f"\0{_stamp(index, i)}\n".encode())
    return digest.hexdigest()[:24]


def _stamp(index: Index, i: int) -> str:
    """What changes with image i: its file's size and time, or where it lies in a shard and those of the shard."""
    place = index.place(i)
    file, _, member = place.partition(shard.MARK)
    where = index.members[i].tolist() if member else ""
    file += ".tar" if member else ""
    if is_url(file):
        return f"{where}"
    status = os.stat(file)
    return f"{where} {status.st_size} {status.st_mtime_ns}"


def _create(path: Path, size: int) -> None:
    """A file of zeros that has its place on the disk: a map of a file that has none ends the process on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with open(unfinished, "xb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                for start in range(0, size, 2**24):
                    file.write(bytes(min(2**24, size - start)))
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
