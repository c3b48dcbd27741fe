"""What a run left in its folder, as plain values: read from a whole run, a killed one, one that still goes.

Files that are missing or damaged cost what they would have said, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector import checkpoint_file
from detector.errors import CheckpointError, ConfigError
from detector.reporting.journal import Event, WindowRow, read_events, read_windows
from detector.reporting.run_files import MARKS, number, read_metrics, read_settings

LARGE = ("model", "ema", "optimizer")  # what of them is not kept

Row = dict[str, float]


@dataclass(frozen=True)
class Record:
    """A run's folder. What is not known is empty."""

    folder: Path
    settings: dict[str, Any]
    epochs: list[Row] = field(default_factory=list)  # the rows of metrics.csv
    windows: list[WindowRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)  # a checkpoint's contents, without its tensors
    best: dict[str, Any] = field(default_factory=dict)  # the row of metrics that belongs to best.pt

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss terms."""
        for row in self.windows:
            if row.losses:
                return tuple(row.losses)
        return tuple(key for key in ("box", "cls", "dfl", "l1") if any(key in row for row in self.epochs))

    def column(self, name: str) -> NDArray[np.float64]:
        """(windows,) a number of every window, NaN where it is none."""
        return np.array([number(getattr(row, name)) for row in self.windows], dtype=np.float64)

    def losses(self, term: str) -> NDArray[np.float64]:
        """(windows,) a loss of every window."""
        return np.array([number(row.losses.get(term)) for row in self.windows], dtype=np.float64)

    def of_epochs(self, name: str) -> NDArray[np.float64]:
        """(epochs,) a column of metrics.csv, NaN where it has no value."""
        return np.array([row.get(name, math.nan) for row in self.epochs], dtype=np.float64)


def read_record(folder: Path) -> Record:
    """What there is of a run in a folder. ConfigError where nothing is."""
    if not any((folder / name).is_file() for name in MARKS):
        raise ConfigError(f"{folder}: no run of training: it has none of {', '.join(MARKS)}; name the folder of one")
    weights, best = folder / "weights", _checkpoint(folder / "weights" / "best.pt")
    most = _checkpoint(weights / "last.pt") or _checkpoint(weights / "last.prev.pt") or best
    return Record(
        folder,
        read_settings(folder) or dict(most.get("settings") or {}),
        read_metrics(folder),
        [row for row in read_windows(folder) if _is_window(row)],
        [event for event in read_events(folder) if isinstance(event.kind, str)],
        most,
        dict(best.get("metrics") or {}),
    )


def clock_of(event: Event) -> float:
    """When it was, seconds since 1970; NaN where a damaged line does not say."""
    return number(event.time)


def sizes_of(rows: Sequence[WindowRow]) -> set[tuple[int, int]]:
    """(replicas, most micro-batches of one) of the windows."""
    return {(len(row.cut), max(map(len, row.cut))) for row in rows if row.cut}


def _is_window(row: WindowRow) -> bool:
    """Whether a line is what it was written as, as far as the page goes by it."""
    cut = isinstance(row.cut, list) and all(isinstance(one, list) for one in row.cut)
    return cut and isinstance(row.losses, dict) and math.isfinite(number(row.window))


def _checkpoint(path: Path) -> dict[str, Any]:
    with suppress(CheckpointError, OSError):
        if path.is_file():
            return {key: value for key, value in checkpoint_file.read(path).items() if key not in LARGE}
    return {}
