"""The numbers of a run by the names that all loggers have them under. What is not finite is left out."""

import math
from collections.abc import Mapping
from typing import Any

from detector.reporting.journal import WindowRow


def of_window(row: WindowRow) -> dict[str, float]:
    """A window's. Its rate is the last of them, and always there: what has it has the others."""
    values = {
        **{f"window/{term}": loss for term, loss in row.losses.items()},
        "window/images": row.images,
        "window/accumulate": max(map(len, row.cut)),
        "window/gradient norm": row.norm,
        "window/target weight": row.weight,
        "window/loss scale": row.loss_scale,
        "window/seconds": row.seconds,
        "window/waited": row.waited,
        "window/memory GiB": row.memory / 2**30,
        "window/lr": row.lr,
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def of_epoch(row: Mapping[str, Any]) -> dict[str, float]:
    """An epoch's; its rate is the last of them, and always there."""
    values = {f"epoch/{name}": value for name, value in row.items() if name not in ("epoch", "step", "lr")}
    values["epoch/lr"] = row["lr"]
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text, those that are not set left out."""
    return {key: str(value) for key, value in settings.items() if value is not None}
