"""One run, one folder: a lock that the system releases when its process ends, however it ends.

A record lock (`lockf`), not `flock`: loader processes, which may live some seconds longer, do not inherit it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from detector.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no such locks: there two runs can still be told apart by their names
    fcntl = None


def launch_id() -> str:
    """One word that the processes of a torchrun have in common, those that it started again too; "" without one."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"agent-{os.getppid()}" if run == "none" else run  # "none" is what a torchrun without --rdzv-id is called


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that holds a run's folder. Raises ConfigError, with the holder's process, where another run does."""
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
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
        started = f" of torchrun {launch_id()}" if launch_id() else ""
        file.write(f"process {os.getpid()}{started}\n")
        file.flush()
        yield
