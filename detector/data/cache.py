"""Keeps decoded training images, resized to imgsz, so that a run decodes as few as its memory allows.

Decoding a photograph costs more than augmenting it. The first images, as many as the budget holds, are kept for the
whole run: in memory that all workers share (`shared.py`), or in a file that later runs take up (`disk_cache.py`).
Whoever needs an image first fills it in. Two workers that fill in the same image write the same bytes.

Beside each image lies the checksum of its pixels. No lock and no order of writes is relied on, and many CPUs promise
none: an image counts as kept for a process once that process has seen pixels that agree with their checksum, which it
looks at once. Then, too, what a killed worker left half written is written anew.

Of the others each process holds those it was asked for last, and with several processes a ring of them lies in shared
memory: as a sample's partners are its neighbours in the epoch (`neighbours.py`), they are decoded about once, and not
four times.
"""

import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from detector.data.disk_cache import DiskPixels
from detector.data.image import fitted_sizes
from detector.data.index import Index
from detector.data.neighbours import NEAR
from detector.data.ring import Ring
from detector.data.shared import SharedMemory
from detector.distributed import local_world_size
from detector.memory import available_memory

Mode = Literal["auto", "ram", "disk", "off"]

GIB = 2**30
AUTO_SHARE = 0.25  # of the available memory, for all processes of a run on this machine together
AUTO_LIMIT = 8 * GIB  # bytes
MOST = 0.8  # of the memory that is free, where the user names no budget
RECENT_BYTES = 128 * 2**20  # of images that a process holds beside the kept ones
RING_BYTES = 512 * 2**20  # of the ring


class RamPixels:
    """Zeros in memory that all workers share, to be filled with pixels and their checksums."""

    def __init__(self, images: int, pixel_bytes: int) -> None:
        self._pixels, self._checksums = SharedMemory(pixel_bytes), SharedMemory(8 * images)

    def pixels(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) uint8, to read and to write."""
        return self._pixels.array(start=start, count=stop - start)

    def checksums(self) -> np.ndarray:
        """(images,) uint64; 0: nothing was kept yet."""
        return self._checksums.array(np.uint64)

    def write(self, start: int, pixels: np.ndarray) -> None:
        self._pixels.array(start=start, count=len(pixels))[:] = pixels


class ImageCache:
    """The images of an index with their long side resized to imgsz."""

    def __init__(
        self,
        index: Index,
        imgsz: int,
        mode: Mode = "auto",
        budget: int | None = None,
        folder: Path | None = None,
        processes: int = 0,
    ) -> None:
        """`mode`: "ram" and "disk" keep as many as `budget` bytes hold, "off" none, "auto" all in memory if they fit.

        Without a budget that is 0.8 of what is free, and for "auto" a quarter of the free memory and 8 GiB.
        `folder`: where the file of "disk" lies; `processes`: that will share this cache.
        """
        self.index, self.imgsz = index, imgsz
        self.channels = index.channels
        self._sizes = fitted_sizes(index.heights, index.widths, imgsz)
        self._offsets = np.concatenate(([0], np.cumsum(self.channels * self._sizes.prod(axis=1), dtype=np.int64)))
        self.bytes = int(self._offsets[-1])  # of all images
        self.problem = ""  # why the file of "disk" cannot be used
        self.count = 0  # images that are kept
        self._kept: RamPixels | DiskPixels | None = None
        self.on_disk = mode == "disk" and folder is not None
        if self.on_disk:
            try:
                file = DiskPixels(index, imgsz, self._offsets, budget, folder)
                self._kept, self.count = file if file.images else None, file.images
            except OSError as error:
                self.problem = f"{folder}: {error.strerror or error}"
        elif mode in ("ram", "auto"):
            self.count = self._fitting(mode, budget)
            self._kept = RamPixels(self.count, self.kept_bytes) if self.count else None
        largest = int(np.max(np.diff(self._offsets), initial=1))
        self._most_recent = max(4, min(NEAR, RECENT_BYTES // largest))
        self._ring = None
        if processes > 1 and self.count < len(index):
            room = min(RING_BYTES, int(AUTO_SHARE * available_memory() / local_world_size()))
            self._ring = Ring(max(1, min(len(index), room // largest)), largest)
        self._forget()

    def _fitting(self, mode: Mode, budget: int | None) -> int:
        """How many of the first images are kept in memory."""
        memory = available_memory() / local_world_size()
        if mode == "auto" and budget is None:
            return len(self.index) if self.bytes < min(AUTO_LIMIT, AUTO_SHARE * memory) else 0
        limit = MOST * memory if budget is None else min(budget / local_world_size(), MOST * memory)
        return int(np.searchsorted(self._offsets, limit, side="right")) - 1

    @property
    def kept_bytes(self) -> int:
        """Of the images that are kept, once they are."""
        return int(self._offsets[self.count])

    @property
    def memory_bytes(self) -> int:
        """The most memory that one process touches for images, once all are kept."""
        recent = min(self._most_recent, len(self.index) - self.count) * int(np.diff(self._offsets).max(initial=0))
        ring = self._ring.bytes if self._ring else 0
        return recent + ring + (0 if self.on_disk else self.kept_bytes)

    def __getitem__(self, i: int) -> np.ndarray:
        """(H, W, C) uint8, long side imgsz; not to be written to."""
        return self.image(i, i)

    def image(self, i: int, place: int) -> np.ndarray:
        """The same; `place`: where image i stands in the order in which images are asked for, about."""
        image = self._kept_image(i) if i < self.count else self._recent_image(i, place)
        image.flags.writeable = False
        return image

    def told(self) -> str:
        """What is kept, in a line."""
        images = f"{self.count:,} of {len(self.index):,} images"
        if self.problem:
            return f"no image is kept: {self.problem}; name another folder with cache_dir"
        if not self.count:
            return f"{len(self.index):,} images are decoded once an epoch"
        rest = "" if self.count == len(self.index) else "; the others are decoded once an epoch"
        where = f"in {self._kept.path}" if self.on_disk else "in memory"
        others = self._kept.others() if isinstance(self._kept, DiskPixels) else []
        taken = sum(path.stat().st_size for path in others) / GIB
        unused = f"; {len(others)} more there, for other images or sizes, {taken:.2f} GiB" if others else ""
        return f"{images}, {self.kept_bytes / GIB:.2f} GiB {where}{rest}{unused}"

    def kept(self) -> int:
        """How many images are kept, by whichever process."""
        return 0 if self._kept is None else int(np.count_nonzero(self._kept.checksums()))

    def shape(self, i: int) -> tuple[int, int, int]:
        """(height, width, channels) of image i once it is resized."""
        return (*self._sizes[i].tolist(), self.channels)

    def _kept_image(self, i: int) -> np.ndarray:
        start, stop = int(self._offsets[i]), int(self._offsets[i + 1])
        kept = self._kept.pixels(start, stop)
        if not self._seen[i]:
            checksums = self._kept.checksums()
            if not checksums[i] or checksums[i] != _checksum(kept):
                loaded = self._load(i)
                self._kept.write(start, loaded.reshape(-1))
                checksums[i] = _checksum(loaded)
            self._seen[i] = 1
        return kept.reshape(self.shape(i))

    def _recent_image(self, i: int, place: int) -> np.ndarray:
        found = self._recent.get(place)
        if found is not None and found[0] == i:
            return found[1]
        image = self._ring.get(place, i, self.shape(i)) if self._ring else None
        if image is None:
            image = self._load(i)
            if self._ring:
                self._ring.put(place, i, image)
        if len(self._recent) >= self._most_recent:
            del self._recent[min(self._recent)]  # what stands furthest back is asked for no more
        self._recent[place] = i, image
        return image

    def _load(self, i: int) -> np.ndarray:
        return np.ascontiguousarray(self.index.fitted(i, self.imgsz))

    def _forget(self) -> None:
        self._seen = bytearray(self.count)  # 1: agreed with its checksum, in this process
        self._recent: dict[int, tuple[int, np.ndarray]] = {}  # by place

    def __getstate__(self) -> dict[str, object]:
        """For another process, where nothing was seen yet; the memory may be the same or a new one."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_seen", "_recent")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()


def _checksum(pixels: np.ndarray) -> int:
    """Of contiguous pixels; never 0."""
    return zlib.crc32(pixels.reshape(-1)) + 1
