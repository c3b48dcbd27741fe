"""Keeps the resized training images in memory, shared by all workers.

Decoding a photograph costs more than augmenting it. The images, their long side already imgsz, lie in memory that all
workers share (`shared.py`), and whoever needs an image first fills it in. Two workers that fill in the same image write
the same bytes.

Beside each image lies the checksum of its pixels. No lock and no order of writes is relied on, and many CPUs promise
none: an image counts as kept for a process once that process has seen pixels that agree with their checksum, which it
looks at once. Then, too, what a killed worker left half written is written anew.
"""

import zlib
from typing import Literal

import numpy as np

from detector.data.image import fit_long_side, fitted_size
from detector.data.index import Index
from detector.data.shared import SharedMemory
from detector.distributed import local_world_size
from detector.memory import available_memory

AUTO_SHARE = 0.25  # of the available memory, for all processes of a run on this machine together
AUTO_LIMIT = 8 * 2**30  # bytes


class ImageCache:
    """The images of an index with their long side resized to imgsz, decoded once if they are kept."""

    def __init__(self, index: Index, imgsz: int, mode: bool | Literal["auto"] = "auto") -> None:
        """`mode` True keeps all, False none, "auto" all when they need under a quarter of free memory and 8 GiB."""
        self.index, self.imgsz = index, imgsz
        sizes = [fitted_size(*index.size(i), imgsz) for i in range(len(index))]
        self._sizes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        self._offsets = np.concatenate(([0], np.cumsum(3 * self._sizes.prod(axis=1), dtype=np.int64)))
        self.bytes = int(self._offsets[-1])
        self.enabled = (
            self.bytes < min(AUTO_LIMIT, AUTO_SHARE * available_memory() / local_world_size())
            if mode == "auto"
            else bool(mode)
        )
        self._pixels = SharedMemory(self.bytes if self.enabled else 0)
        self._checksums = SharedMemory(8 * len(index) if self.enabled else 0)  # 0: not kept yet
        self._seen = bytearray(len(index))  # 1: agreed with its checksum, in this process

    def __getitem__(self, i: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, long side imgsz; not to be written to."""
        if not self.enabled:
            return self._load(i)
        start, stop = int(self._offsets[i]), int(self._offsets[i + 1])
        kept = self._pixels.array(start=start, count=stop - start).reshape(*self._sizes[i], 3)
        if not self._seen[i]:
            checksums = self._checksums.array(np.uint64)
            if not checksums[i] or checksums[i] != _checksum(kept):
                kept[:] = self._load(i)
                checksums[i] = _checksum(kept)
            self._seen[i] = 1
        kept.flags.writeable = False
        return kept

    def kept(self) -> int:
        """How many images are kept, by whichever process."""
        return int(np.count_nonzero(self._checksums.array(np.uint64)))

    def _load(self, i: int) -> np.ndarray:
        return fit_long_side(self.index.image(i), self.imgsz)

    def __setstate__(self, state: dict[str, object]) -> None:
        """In another process, where nothing was seen yet; the memory may be the same or a new one."""
        self.__dict__.update(state)
        self._seen = bytearray(len(self.index))


def _checksum(pixels: np.ndarray) -> int:
    """Of contiguous pixels; never 0."""
    return zlib.crc32(pixels.reshape(-1)) + 1
