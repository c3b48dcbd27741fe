"""One run, one folder: a lock that the system releases when its process ends, however it ends.

A record lock (`lockf`), not `flock`: loader processes, which may live some seconds longer, do not inherit it.
"""

import os
import re
import struct
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from detector.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no such locks: there two runs can still be told apart by their names
    fcntl = None

LOCK = ".lock"
# The folders that this process holds. It must not ask the system about them: closing a file gives up its lock.
_held: set[Path] = set()


def run_id(folder: Path) -> str | None:
    """The random id of the run in a folder, which it keeps as long as it lives; None: there is no run in it."""
    try:
        text = (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\brun (\w+)", text)
    return found[1] if found else None


def in_use(folder: Path) -> bool | None:
    """Whether a process holds a run's folder, asked without holding it; None where the system does not say."""
    if fcntl is None:
        return None
    if folder.resolve() in _held:
        return True
    try:
        with open(folder / LOCK, "rb") as file:
            return _is_locked(file.fileno())
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _is_locked(descriptor: int) -> bool:
    if sys.platform == "linux":
        # struct flock: type, whence, start, length (0: to the end), process.
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return struct.unpack_from("h", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked(folder: Path, identity: str | None = None) -> Iterator[str]:
    """A context that holds a run's folder, and gives the run's id: `identity`, or a new one.

    Raises ConfigError, with the holder's process, where another process holds it.
    """
    identity = identity or uuid.uuid4().hex
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ConfigError(
                    f"{folder}: {file.read().strip() or 'another process'} is training in this folder; "
                    "wait for it, stop it, or choose another name="
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of run {identity}\n")
        file.flush()
        _held.add(folder.resolve())
        try:
            yield identity
        finally:
            _held.discard(folder.resolve())
