"""Memory that this process and its workers see alike, however they are started.

Not in /dev/shm, which containers cut to 64 MB or mount read-only: on Linux a file without a name or a folder, in memory
(memfd), elsewhere an unlinked file in the temporary folder. Pages are zero, and take no memory until they are written.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any
from uuid import uuid4

import numpy as np

WINDOWS = os.name == "nt"  # where such memory has a name instead of a file


class SharedMemory:
    """A number of bytes, zero at first.

    Pickled for a worker that is just being started it is the same memory there; pickled otherwise it is a new one.
    """

    def __init__(self, size: int) -> None:
        self._attach(size, f"detector-{uuid4()}" if WINDOWS else _nameless_file(size))

    def _attach(self, size: int, file: int | str) -> None:
        self.size, self._file = size, file
        most = max(size, 1)  # nothing cannot be mapped
        self._map = mmap.mmap(-1, most, tagname=file) if isinstance(file, str) else mmap.mmap(file, most)

    def array(self, dtype: type[np.generic] = np.uint8, start: int = 0, count: int | None = None) -> np.ndarray:
        """A one-dimensional array of this memory from byte `start` on, to the end if there is no count."""
        if count is None:
            count = (self.size - start) // np.dtype(dtype).itemsize
        return np.ndarray(count, dtype, buffer=self._map, offset=start)

    def inode(self) -> int | None:
        """What tells whether the memory of two processes is one; None on Windows."""
        return None if WINDOWS else os.fstat(self._file).st_ino

    def __reduce__(self) -> tuple[Callable[..., "SharedMemory"], tuple[Any, ...]]:
        if get_spawning_popen() is None:
            return SharedMemory, (self.size,)
        return _same_memory, (self.size, self._file if WINDOWS else reduction.DupFd(self._file))

    def __del__(self) -> None:
        if isinstance(file := getattr(self, "_file", None), int):
            os.close(file)  # the map, and arrays of it, hold one of their own


def _same_memory(size: int, file: Any) -> SharedMemory:
    memory = SharedMemory.__new__(SharedMemory)
    memory._attach(size, file if WINDOWS else file.detach())
    return memory


def _nameless_file(size: int) -> int:
    """The descriptor of a file of zeros that goes with its last user."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("detector")
    else:
        file, path = tempfile.mkstemp("detector")
        os.unlink(path)
    os.ftruncate(file, max(size, 1))
    return file
