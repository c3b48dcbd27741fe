"""What a run writes down of itself while it goes: `steps.jsonl`, a line a window, and `events.jsonl`, a line an event.

The steps are those of the run as it stands: one that goes on from a checkpoint takes back what it had written of later
windows, and writes them anew. Events are what happened, when, and are never taken back.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from detector.files import replaced

STEPS, EVENTS = "steps.jsonl", "events.jsonl"
BEGINNINGS, ENDINGS = ("begun", "resumed"), ("finished", "stopped", "failed")  # kinds of events

Row = TypeVar("Row")


@dataclass(frozen=True)
class WindowRow:
    """A window that was trained, or skipped. What is not finite is NaN here and null in the file."""

    window: int  # its number in the run, from 1; skipped ones count
    epoch: int  # from 1
    done: int  # images of the epoch that are done with it
    step: int  # applied steps up to it
    images: int  # that counted: without damaged ones
    cut: list[list[int]]  # by replica, the images of each micro-batch
    applied: bool  # False: the gradient was not finite, or no image counted
    losses: dict[str, float]  # by term: per target weight, times its gain
    weight: float  # target weight
    norm: float  # of the gradient, before clipping
    lr: float  # of the weights
    loss_scale: float  # of fp16; 1 elsewhere
    seconds: float  # from the window before it
    waited: float  # the share of them that was waited for images
    memory: int  # bytes: the GPU's peak, or what the process holds
    time: float  # seconds since 1970


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    kind: begun, resumed; machine (what it computes with, told after both); finished, stopped (a signal, patience, a
    callback), failed; bad step, bad image, memory, save. A run that begins or resumes after a beginning without an
    ending was killed.
    """

    kind: str
    text: str
    epoch: int  # the epoch it was in, from 1
    step: int  # applied steps so far
    time: float  # seconds since 1970


class Journal:
    """The two files of a run's folder, while it goes. Every method may raise OSError; what was written stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rewind(self, epoch: int, done: int) -> tuple[list[WindowRow], int]:
        """Take back what is written of windows after so many images of an epoch (from 1).

        Returns what stays, and how many were taken back.
        """
        written = read_windows(self.folder)
        rows = [row for row in written if (row.epoch, row.done) <= (epoch, done)]
        with replaced(self.folder / STEPS) as beside:
            beside.write_text("".join(map(line, rows)), encoding="utf-8")
        return rows, len(written) - len(rows)

    def window(self, row: WindowRow) -> None:
        self._append(STEPS, row)

    def event(self, event: Event) -> None:
        self._append(EVENTS, event)

    def sync(self) -> None:
        """Have the disk hold what is written: before a checkpoint that is later than it."""
        for name in (STEPS, EVENTS):
            with suppress(FileNotFoundError), open(self.folder / name, "rb+") as file:
                os.fsync(file.fileno())

    def _append(self, name: str, row: WindowRow | Event) -> None:
        with open(self.folder / name, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:  # after a line that a full disk cut short, another one begins
                file.seek(end - 1)
            torn = end > 0 and file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + line(row).encode())


def event_now(kind: str, text: str, epoch: int, step: int) -> Event:
    return Event(kind, text, epoch, step, round(time.time(), 3))


def line(row: WindowRow | Event) -> str:
    """A row as a line of JSON."""
    return json.dumps(_plain(asdict(row)), separators=(",", ":")) + "\n"


def read_windows(folder: Path) -> list[WindowRow]:
    """The windows of the run in a folder, in order; lines that a crash cut short are none."""
    return list(_read(folder / STEPS, WindowRow))


def read_events(folder: Path) -> list[Event]:
    """The events of the run in a folder, in order."""
    return list(_read(folder / EVENTS, Event))


def _read(path: Path, kind: type[Row]) -> Iterator[Row]:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    with suppress(FileNotFoundError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                values = json.loads(text)
                if isinstance(values, dict) and values.keys() == names:
                    yield kind(**{name: _number(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    """Numbers with 7 digits, and null for those that JSON has not."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, float):
        return (float(f"{value:.7g}") if abs(value) < 1e9 else value) if math.isfinite(value) else None
    return value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(one) for key, one in value.items()}
    return math.nan if value is None else value
