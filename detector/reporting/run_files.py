"""What a run's folder tells of the run, read without touching it, and without torch: hundreds are read in a second.

A run may be in progress, killed, or of an earlier version: what is missing, damaged or not to be read costs what it
would have said, and nothing else.
"""

import csv
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from detector.reporting.journal import BEGINNINGS, ENDINGS, EVENTS, STEPS, Event

SETTINGS, METRICS = "settings.yaml", "metrics.csv"
MARKS = (SETTINGS, METRICS, STEPS, EVENTS, "weights/last.pt", "weights/best.pt")  # a folder with one is a run's
LOSSES = ("box", "cls", "dfl", "l1")  # columns of metrics.csv of which the lowest is best
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former, where it was built, is ten times as fast


def number(value: Any) -> float:
    """A number that a file holds; NaN for whatever else."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the run in a folder; nothing where they cannot be read."""
    try:
        found = yaml.load((folder / SETTINGS).read_text(encoding="utf-8"), Loader=LOADER)  # both are safe loaders
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str)} if isinstance(found, dict) else {}


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv that say which epoch they are of; cells without a number are left out."""
    with suppress(OSError, csv.Error):
        text = (folder / METRICS).read_text(encoding="utf-8", errors="replace").replace("\0", "")
        rows = [
            {key: number(value) for key, value in row.items() if isinstance(key, str) and value}
            for row in csv.DictReader(text.splitlines())
        ]
        return [row for row in rows if math.isfinite(row.get("epoch", math.nan))]
    return []


def best_row(rows: Sequence[dict[str, float]], metric: str) -> dict[str, float] | None:
    """The row of metrics.csv whose metric is best, the first of equals; None where none has a number for it."""
    known = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    return min(known, key=lambda row: row[metric] if metric in LOSSES else -row[metric], default=None)


def state_of(events: Sequence[Event], in_use: bool | None) -> str | None:
    """running, finished, stopped, failed or killed; None where nothing tells.

    in_use: whether a process holds the run's folder; None: that is not known.
    """
    if in_use:
        return "running"
    told = [event.kind for event in events if event.kind in BEGINNINGS + ENDINGS]
    if not told or (told[-1] in BEGINNINGS and in_use is None):
        return None
    return told[-1] if told[-1] in ENDINGS else "killed"
