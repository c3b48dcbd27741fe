"""What the doctor of a data set has to say: lines for a terminal, and a map for report.json."""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from detector.data.counts import BOX_EDGES, IMAGE_EDGES, LARGE, SMALL, Counts, histogram
from detector.data.doctor import Examination, Noticed
from detector.data.findings import KINDS, SEVERITIES
from detector.reporting.table import aligned

SHOWN = 3  # findings of a kind
CLASSES = 20  # beyond which the terminal shows those with most and with fewest boxes


def by_kind(findings: Sequence[Noticed]) -> Iterator[tuple[str, list[Noticed]]]:
    """The findings of each kind; they come sorted."""
    for kind, several in groupby(findings, key=lambda noticed: noticed[1].kind):
        yield kind, list(several)


def lines_of(found: Examination) -> list[str]:
    """The counts, then each kind of finding with their number and the first few."""
    description, names = found.description, found.description.names
    lines = [
        f"data      {description.path}, {description.format}, {len(names)} {'class' if len(names) == 1 else 'classes'}",
        "",
        *split_table(found.counts),
        "",
        *class_table(found.counts, names),
        "",
        f"sizes of boxes at imgsz {found.imgsz}: root of the area, pixels; small: to {SMALL}, large: from {LARGE} on",
        *size_table(found.counts),
    ]
    for kind, several in by_kind(found.findings):
        lines += ["", f"{KINDS[kind].severity:9} {KINDS[kind].told}: {len(several):,}"]
        lines += [f"          {_located(split, finding)}" for split, finding in several[:SHOWN]]
        if len(several) > SHOWN:
            lines.append(f"          and {len(several) - SHOWN:,} more")
    return [*lines, "", verdict(found)]


def verdict(found: Examination) -> str:
    """How many there are of each severity."""
    numbers = [(severity, len(found.of_severity(severity))) for severity in SEVERITIES]
    if not found.findings:
        return "nothing was found" if found.pixels else "nothing was found; the images were not decoded (fast=true)"
    text = ", ".join(f"{number:,} {severity}{'' if number == 1 else 's'}" for severity, number in numbers)
    return text if found.pixels else f"{text}; the images were not decoded (fast=true)"


def split_table(counts: dict[str, Counts]) -> list[str]:
    """Images and boxes of each split."""
    rows = [("split", "images", "background", "no label file", "boxes", "in an image", "most", "mostly of size")]
    for split, one in counts.items():
        height, width, of_size = one.common_size
        per_image = f"{one.boxes / one.images:.1f}"
        size = f"{width} x {height}" + ("" if of_size == one.images else f" ({of_size / one.images:.0%})")
        numbers = [f"{n:,}" for n in (one.images, one.background, one.unlabelled, one.boxes)]
        rows.append((split, *numbers, per_image, f"{one.most_boxes:,}", size))
    lines = aligned(rows, rule=True)
    ignored = {split: one.ignored for split, one in counts.items() if one.ignored}
    if ignored:
        told = ", ".join(f"{number:,} in {split}" for split, number in ignored.items())
        lines.append(f"crowds and difficult objects, which are not counted: {told}")
    return lines


def class_table(counts: dict[str, Counts], names: Sequence[str]) -> list[str]:
    """Boxes of each class in each split, with its share of all."""
    total = sum(one.class_boxes for one in counts.values())
    order = list(range(len(names)))
    if len(names) > CLASSES:
        order = np.argsort(-total, kind="stable").tolist()
        order = [*order[: CLASSES // 2], -1, *order[-CLASSES // 2 :]]
    rows = [("class", "name", *counts, "share")]
    for number in order:
        if number < 0:
            rows.append(("...", f"({len(names) - CLASSES} more)", *("" for _ in counts), ""))
            continue
        share = f"{total[number] / max(total.sum(), 1):.1%}"
        rows.append((str(number), names[number], *(f"{one.class_boxes[number]:,}" for one in counts.values()), share))
    return aligned(rows, left=(1,), rule=True)


def size_table(counts: dict[str, Counts]) -> list[str]:
    rows = [("split", "small", "medium", "large", "smallest", "5 %", "half", "95 %", "largest")]
    for split, one in counts.items():
        if not one.boxes:
            rows.append((split, *["-"] * 8))
            continue
        sides = [f"{side:.0f}" for side in np.quantile(one.box_sides, (0, 0.05, 0.5, 0.95, 1))]
        rows.append((split, *(f"{number / one.boxes:.0%}" for number in one.by_size), *sides))
    return aligned(rows, rule=True)


def shortened(text: str) -> str:
    """Without the working directory, where a path begins in it."""
    return without(text, os.getcwd())


def without(text: str, folder: str) -> str:
    """A text whose paths begin in a folder where they lie in it."""
    return (
        re.sub(rf"(^|\s){re.escape(folder.rstrip(os.sep) + os.sep)}(?=[^\s])", r"\1", text) if len(folder) > 1 else text
    )


def _located(split: str, finding: Any) -> str:
    return shortened(str(finding)) + (f" [{split}]" if split else "")


def as_json(found: Examination) -> dict[str, Any]:
    """All of it, as report.json holds it."""
    description = found.description
    return {
        "data": str(description.path),
        "root": str(description.root),
        "format": description.format,
        "names": list(description.names),
        "imgsz": found.imgsz,
        "pixels": found.pixels,
        "splits": {split: _numbers(one) for split, one in found.counts.items()},
        "totals": {severity: len(found.of_severity(severity)) for severity in SEVERITIES},
        "findings": [
            {"severity": finding.severity, "split": split, **finding._asdict()} for split, finding in found.findings
        ],
    }


def _numbers(one: Counts) -> dict[str, Any]:
    small, medium, large = one.by_size
    height, width, number = one.common_size
    return {
        "images": one.images,
        "unlabelled": one.unlabelled,
        "background": one.background,
        "boxes": one.boxes,
        "ignored": one.ignored,
        "most_boxes": one.most_boxes,
        "common_size": {"height": height, "width": width, "images": number},
        "class_boxes": one.class_boxes.tolist(),
        "class_images": one.class_images.tolist(),
        "by_size": {"small": small, "medium": medium, "large": large},
        "box_sides": {"edges": BOX_EDGES, "boxes": histogram(one.box_sides, BOX_EDGES).tolist()},
        "image_sides": {"edges": IMAGE_EDGES, "images": histogram(one.image_sides, IMAGE_EDGES).tolist()},
    }
