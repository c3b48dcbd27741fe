"""Keeps the resized training images in memory, shared by all workers.

Decoding a photograph costs more than augmenting it. The images, their long side already imgsz, lie in one anonymous
shared memory map that forked workers inherit; whoever needs an image first fills it in. Two workers that fill in the
same image write the same bytes. A spawned worker cannot inherit the map and keeps a cache of its own.
"""

import mmap
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from detector.data.image import fit_long_side, fitted_size, read_rgb
from detector.data.index import Index
from detector.distributed import local_world_size
from detector.errors import DataError

AUTO_SHARE = 0.25  # of the available memory, for all processes of a run on this machine together
AUTO_LIMIT = 8 * 2**30  # bytes


class ImageCache:
    """The images of an index with their long side resized to imgsz, decoded once if they are kept."""

    def __init__(self, index: Index, imgsz: int, mode: bool | Literal["auto"] = "auto") -> None:
        """`mode` True keeps all, False none, "auto" all when they need under a quarter of free memory and 8 GiB."""
        self.index, self.imgsz = index, imgsz
        sizes = [fitted_size(int(h), int(w), imgsz) for h, w in zip(index.heights, index.widths, strict=True)]
        self._sizes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        self._offsets = np.concatenate(([0], np.cumsum(3 * self._sizes.prod(axis=1), dtype=np.int64)))
        self.bytes = int(self._offsets[-1])
        self.enabled = (
            self.bytes < min(AUTO_LIMIT, AUTO_SHARE * available_memory() / local_world_size())
            if mode == "auto"
            else bool(mode)
        )
        self._allocate()

    def __getitem__(self, i: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, long side imgsz; not to be written to."""
        if not self.enabled:
            return self._load(i)
        height, width = self._sizes[i]
        kept = self._pixels[self._offsets[i] : self._offsets[i + 1]].reshape(height, width, 3)
        if not self._filled[i]:
            kept[:] = self._load(i)
            self._filled[i] = 1  # only after the pixels: whoever sees the flag may read them
        kept.flags.writeable = False
        return kept

    def _load(self, i: int) -> np.ndarray:
        path, expected = self.index.path(i), (int(self.index.heights[i]), int(self.index.widths[i]))
        image = read_rgb(path)
        if image.shape[:2] != expected:
            raise DataError(
                f"{path}: decodes to {image.shape[1]} x {image.shape[0]} pixels but its header says "
                f"{expected[1]} x {expected[0]}; save it anew without EXIF orientation"
            )
        return fit_long_side(image, self.imgsz)

    def _allocate(self) -> None:
        if self.enabled:  # pages of an anonymous map are zero and take no memory until they are written
            self._pixels = np.frombuffer(mmap.mmap(-1, max(1, self.bytes)), dtype=np.uint8)
            self._filled = np.frombuffer(mmap.mmap(-1, max(1, len(self.index))), dtype=np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pixels", "_filled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._allocate()


def available_memory() -> int:
    """Bytes that can be taken without swapping, within the container's limit; 0 when the system does not say."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration):
        try:
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
        except (AttributeError, OSError, ValueError):
            return 0
    try:
        limit, used = (
            Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
        limits.append(int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup v2, or no limit in it
        pass
    return max(0, min(limits))
