"""Numbers as text: metrics.csv and the table of classes in the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detector.files import replaced

if TYPE_CHECKING:
    from detector.evaluation.evaluate import Evaluation


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows under all their keys, in order of first appearance; floats with 6 significant digits.

    The file is replaced at once: whoever reads it, or is left with it after a crash, sees the old rows or the new.
    """
    path = Path(path)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([_csv_value(row.get(key, "")) for key in keys] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as beside:
        beside.write_text(text.getvalue(), encoding="utf-8")


def format_class_table(evaluation: Evaluation, names: Sequence[str]) -> str:
    """An aligned table, the whole set first and then each class: images, true boxes, P, R, mAP50, mAP50-95.

    Precision and recall are those at the confidence with the highest mean F1, said in the last line. A dash stands
    where a class has no true boxes.
    """
    curves, metrics = evaluation.curves, evaluation.metrics
    precision, recall, _ = curves.at_best()
    lines = [("class", "images", "instances", "P", "R", "mAP50", "mAP50-95")]
    instances = str(int(evaluation.class_instances.sum()))
    lines.append(
        ("all", str(evaluation.images), instances, *map(_share, (precision, recall, metrics.map50, metrics.map50_95)))
    )
    for c, name in enumerate(names):
        values = (
            curves.precision[c, curves.best],
            curves.recall[c, curves.best],
            metrics.class_map50[c],
            metrics.class_map50_95[c],
        )
        counts = str(int(evaluation.class_images[c])), str(int(evaluation.class_instances[c]))
        lines.append((name, *counts, *map(_share, values)))
    text = aligned(lines, rule=True)
    text.append(f"P and R at confidence {curves.best_confidence:.3f}, where the mean F1 is highest")
    return "\n".join(text)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), rule: bool = False) -> list[str]:
    """Lines of text whose columns stand below each other, the first row being the head; `left` begin at the left.

    rule: a line of dashes is under the head.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def clock(seconds: float) -> str:
    """0:07, 12:30, 3:02:05 or 2d 3:02:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    text = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {text}" if days else text


def _csv_value(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else value


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
