"""One run, one folder: a lock that the system releases when its process ends, however it ends.

A record lock (`lockf`), not `flock`: loader processes, which may live some seconds longer, do not inherit it.
"""

import os
import re
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


def run_id(folder: Path) -> str | None:
    """The random id of the run in a folder, which it keeps as long as it lives; None: there is no run in it."""
    try:
        text = (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\brun (\w+)", text)
    return found[1] if found else None


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
        yield identity
