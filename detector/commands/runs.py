"""`detector runs`: the runs in a folder, newest first. It reads, and disturbs none that is in progress."""

import argparse
import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import RunsSettings
from detector.errors import ConfigError
from detector.reporting.table import aligned, clock
from detector.run.records import Record, read_record, runs_in

HEADS = ("run", "state", "epochs", "best", "at", "model", "data", "time", "last change")
LEFT = (0, 1, 3, 5, 6)  # columns of names


def run(options: argparse.Namespace) -> int:
    said = words.of_folder(options.arguments, "folder", "json=true")
    settings = load_settings(RunsSettings, None, said.overrides, said.values)
    folder = settings.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a file, not a folder of runs")
    if not folder.exists() and "folder" in settings.model_fields_set:
        raise ConfigError(f"{folder}: there is no such folder; runs are in runs/ unless project= named another")
    records = sorted(map(read_record, runs_in(folder)), key=lambda one: (-one.changed, str(one.folder)))
    if settings.as_json:
        print(json.dumps([as_json(one) for one in records], indent=1))
    elif records:
        print("\n".join(aligned([HEADS, *(row_of(one, folder) for one in records)], LEFT, rule=True)))
    else:
        print(f"no runs in {folder}; `detector train data=my_data.yaml` makes one, in runs/train")
    return 0


def row_of(record: Record, folder: Path) -> Sequence[str]:
    """A line of the table; a dash for what is not known."""
    best, data = record.best, record.settings.get("data")
    return (
        shown(record.folder.name if record.folder == folder else record.folder.relative_to(folder)),
        record.state or "-",
        f"{record.epoch}/{'-' if record.epochs is None else record.epochs}",
        f"{best.metric} {best.value:.3f}" if best else "-",
        str(best.epoch) if best else "-",
        shown(model_of(record)),
        shown("/".join(Path(data).parts[-2:])) if isinstance(data, str) and data else "-",
        "-" if record.seconds is None else clock(record.seconds),
        datetime.fromtimestamp(record.changed).strftime("%Y-%m-%d %H:%M"),
    )


def model_of(record: Record) -> str | None:
    """The model's name, or the file of its description."""
    model = record.settings.get("model")
    return Path(model).name if isinstance(model, str) else None


def shown(value: object) -> str:
    """A name in one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value)) if value else "-"


def as_json(record: Record) -> dict[str, Any]:
    """A run for a script; null for what is not known."""
    best, seconds = record.best, record.seconds
    return {
        "folder": str(record.folder.resolve()),
        "state": record.state,
        "epoch": record.epoch,
        "epochs": record.epochs,
        "best": best._asdict() if best else None,
        "model": record.settings.get("model") if isinstance(record.settings.get("model"), str) else None,
        "data": record.settings.get("data") if isinstance(record.settings.get("data"), str) else None,
        "seconds": None if seconds is None or not math.isfinite(seconds) else round(seconds, 1),
        "changed": round(record.changed, 3),
    }
