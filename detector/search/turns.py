"""Workers of one search: one at a time decides what is next, and a trial is claimed by who trains it.

Both are locks of the system (see `run/lock.py`), gone with the process that held them, however it ended. Where there
are none, on Windows, a search has one worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from detector.errors import OutputError

try:
    import fcntl
except ImportError:
    fcntl = None

TURN, CLAIMS = ".turn", ".claims"


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """A context that one worker is in at a time; the others wait, for less than a second."""
    try:
        file = open(folder / TURN, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written to: {error.strerror}; a search is kept in its folder") from None
    with file:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def claim(folder: Path, number: int) -> BinaryIO | None:
    """The claim to a trial, held until it is closed; None where another process holds it.

    A process is not to ask for one that it holds: closing either would give up both.
    """
    (folder / CLAIMS).mkdir(exist_ok=True)
    file = open(folder / CLAIMS / f"{number:03d}", "ab")  # noqa: SIM115 - its owner closes it
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
