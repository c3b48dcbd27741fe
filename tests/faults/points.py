"""Named places in the program at which a process ends itself by SIGKILL, without a hook in the shipped code.

A point is a function of the package (or of `os`) and a moment: before a call, after it, or inside it, with half of the
bytes of the file it writes on the disk. It is armed by wrapping that function in the process that is to die.
"""

import builtins
import importlib
import io
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

STEP, RUN, SAVING = "detector.step.step:", "detector.run.loop:", "detector.run.saving:"


def onto(name: str) -> Callable[..., bool]:
    """Whether a rename's new name is `name`."""
    return lambda source, target, *more, **options: Path(target).name == name


def a_file(descriptor: int) -> bool:
    """Whether a descriptor is a file's, not a folder's."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


@dataclass(frozen=True)
class Point:
    target: str  # module:attribute, what is wrapped
    moment: Literal["before", "inside", "after"]
    counts: Callable[..., bool] = lambda *arguments, **options: True  # which calls of it, by their arguments


POINTS = {
    # setting up, before the first checkpoint exists
    "folder made": Point(RUN + "create_folder", "after"),
    "folder locked": Point(RUN + "locked", "after"),
    # a step
    "forward done": Point("detector.loss.criterion:DetectionLoss.__call__", "after"),
    "backward done": Point(STEP + "finish_gradient", "before"),
    "gradient finished": Point(STEP + "finish_gradient", "after"),
    "weights stepped": Point("detector.step.ema:Ema.update", "before"),
    "step done": Point("detector.run.recover:train_window", "after"),
    # a save
    "save begun": Point(SAVING + "save", "before"),
    "checkpoint half written": Point("detector.checkpoint_file:write", "inside"),
    "checkpoint flushed": Point("os:fsync", "after", a_file),
    "old one linked": Point("os:replace", "before", onto("last.prev.pt")),
    "old one set aside": Point("detector.checkpoint_file:set_aside", "after"),
    "last.pt in place": Point("os:replace", "after", onto("last.pt")),
    # the end of an epoch
    "validating": Point("detector.inference.infer:infer", "after"),
    "validated": Point(RUN + "record", "before"),
    "best.pt in place": Point("os:replace", "after", onto("best.pt")),
    "epoch saved": Point("detector.run.saving:write_csv", "before"),
    "metrics.csv half written": Point("detector.run.saving:write_csv", "inside"),
    "metrics.csv written": Point("os:replace", "before", onto("metrics.csv")),
    "epoch recorded": Point(RUN + "record", "after"),
    # the end
    "trained": Point(RUN + "finish", "before"),
    "measured": Point(RUN + "format_class_table", "before"),
    "finished": Point(RUN + "finish", "after"),
}


def arm(name: str, number: int) -> None:
    """Let this process, but none that it forks, end itself the number-th time (from 1) that it comes to a point."""
    point, process, calls = POINTS[name], os.getpid(), 0
    module, _, path = point.target.partition(":")
    owner = importlib.import_module(module)
    *outer, attribute = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    real = getattr(owner, attribute)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        if os.getpid() != process or not point.counts(*arguments, **options):
            return real(*arguments, **options)
        calls += 1
        if calls != number:
            return real(*arguments, **options)
        if point.moment == "inside":
            with half_written():
                return real(*arguments, **options)
        if point.moment == "after":
            real(*arguments, **options)
        return end()

    setattr(owner, attribute, wrapped)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class HalfFile:
    """A file opened for writing; the first bytes or text written to it are halved, and the process ends."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> None:
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "HalfFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@contextmanager
def half_written() -> Iterator[None]:
    """A context in which whatever is opened for writing is a HalfFile, by whichever of Python's ways it is opened."""
    ways = [(builtins, "open"), (io, "open"), (os, "fdopen")]
    real = {way: getattr(*way) for way in ways}

    def halved(opener: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*arguments: Any, **options: Any) -> Any:
            file = opener(*arguments, **options)
            return HalfFile(file) if file.writable() else file

        return opened

    for module, name in ways:
        setattr(module, name, halved(real[module, name]))
    try:
        yield
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)
