"""The runs in a folder, each as its files and its lock tell it."""

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from detector.reporting.journal import BEGINNINGS, ENDINGS, Event, read_events
from detector.reporting.run_files import MARKS, best_row, read_metrics, read_settings, state_of
from detector.run.lock import in_use


class Best(NamedTuple):
    """The best epoch of a run."""

    metric: str
    value: float
    epoch: int  # from 1


@dataclass(frozen=True)
class Record:
    """A run as its folder tells it."""

    folder: Path
    settings: Mapping[str, Any]  # nothing where they cannot be read
    rows: Sequence[dict[str, float]]  # of metrics.csv
    events: Sequence[Event]
    in_use: bool | None  # by a process; None: this system does not say
    changed: float  # seconds since 1970

    @property
    def state(self) -> str | None:
        """running, finished, stopped, failed or killed; None where nothing tells."""
        told = state_of(self.events, self.in_use)
        if told or self.events:
            return told
        return "finished" if self.epochs is not None and self.epoch >= self.epochs else None

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return max((int(row["epoch"]) for row in self.rows), default=0)

    @property
    def epochs(self) -> int | None:
        """Epochs that are wanted."""
        value = self.settings.get("epochs")
        return value if isinstance(value, int) else None

    @property
    def best(self) -> Best | None:
        """By the run's `metric`, the first of equals; None where no epoch has it."""
        metric = str(self.settings.get("metric", "mAP50-95"))
        row = best_row(self.rows, metric)
        return row and Best(metric, row[metric], int(row["epoch"]))

    @property
    def seconds(self) -> float | None:
        """How long it trained, all its stretches together; None where it has no events."""
        total, start, last = 0.0, None, 0.0
        for event in self.events:
            if event.kind in BEGINNINGS and start is not None:  # killed meanwhile: up to the last that was heard of it
                total, start = total + last - start, None
            start = event.time if event.kind in BEGINNINGS else start
            last = event.time
            if event.kind in ENDINGS and start is not None:
                total, start = total + last - start, None
        if start is not None:
            total += max((time.time() if self.in_use else self.changed), last) - start
        return max(total, 0.0) if self.events else None


def read_record(folder: Path) -> Record:
    """The run in a folder. Raises nothing for what is in it."""
    events: list[Event] = []
    with suppress(OSError):
        events = read_events(folder)
    times = [event.time for event in events if isinstance(event.time, int | float)]
    events = events if len(times) == len(events) else []
    return Record(folder, read_settings(folder), read_metrics(folder), events, in_use(folder), changed(folder) or 0.0)


def changed(folder: Path) -> float | None:
    """When a run's folder last changed, seconds since 1970; None where it is none."""
    times = []
    for name in MARKS:
        with suppress(OSError):
            found = os.stat(folder / name)
            times += [found.st_mtime] if stat.S_ISREG(found.st_mode) else []
    return max(times, default=None)


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs: this one, those in it, and those in its folders that are none; each once."""
    found: dict[Path, Path] = {}
    for one in [folder, *_folders(folder)]:
        is_run = changed(one) is not None
        for run in [one] if is_run or one == folder else _folders(one):
            if is_run or changed(run) is not None:
                found.setdefault(run.resolve(), run)
    return list(found.values())


def _folders(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from [Path(entry) for entry in entries if entry.is_dir()]
