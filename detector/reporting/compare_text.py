"""The comparison of runs as tables of text: for the terminal, and for the page."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detector.data.index import Index
from detector.evaluation.comparing import METRICS, Comparison, Contender, Interval
from detector.reporting.table import aligned

# Where a run is written, which is never the same.
OF_THE_FOLDER = ("project", "name", "exist_ok", "resume")
LISTED = 10  # images on the terminal
FEW = 30  # images below which drawing them anew says little

Rows = list[Sequence[str]]  # the first is the head


def lines_of(found: Comparison, index: Index) -> list[str]:
    """All of it, for the terminal."""
    titles = [f"{one.label}: " for one in found.runs]
    width = max(map(len, titles))
    lines = [f"{title:{width}}{facts(one)}" for title, one in zip(titles, found.runs, strict=True)]
    lines.append(f"measured on {found.data}")
    settings = settings_rows(found.runs)
    lines += ["", "Settings that differ"]
    lines += aligned(settings, range(len(settings[0])), rule=True) if len(settings) > 1 else [same_settings(found.runs)]
    lines += ["", "Metrics", *aligned(metric_rows(found), rule=True)]
    lines += ["", "AP50-95 by class", *aligned(class_rows(found), rule=True)]
    lines += ["", f"More than noise? {interval_title(found)}", *aligned(interval_rows(found), (0, 1, 5), rule=True)]
    lines += caveats(found)
    lines += ["", "Objects found and missed, IoU 0.5, each run at the confidence of its best F1"]
    lines += aligned(object_rows(found), rule=True)
    worst = found.worst()
    if worst:
        lines += ["", f"Images in which that differs: {len(worst):,} of {len(found.truth):,}"]
        lines += aligned(image_rows(found, index, LISTED), rule=True)
        lines += [f"and {len(worst) - LISTED:,} more"] if len(worst) > LISTED else []
    else:
        lines += ["", "No image in which that differs"]
    return lines


def facts(run: Contender) -> str:
    """Which checkpoint it is, in a line."""
    epochs = run.settings.get("epochs")
    epoch = "" if run.epoch is None else f", epoch {run.epoch}" + (f" of {epochs}" if epochs else "")
    return f"{one_line(run.path)}{epoch}, imgsz {run.imgsz}, {run.where}"


def settings_rows(runs: Sequence[Contender]) -> Rows:
    """The settings that are not the same in all runs that say theirs, which an export does not; a dash for none."""
    known = [one for one in runs if one.settings]
    rows: Rows = [("setting", *(one.label for one in known))]
    for key in dict.fromkeys(key for one in known for key in one.settings):
        values = [setting(one.settings.get(key)) for one in known]
        if len(set(values)) > 1 and key not in OF_THE_FOLDER:
            rows.append((key, *values))
    return rows


def same_settings(runs: Sequence[Contender]) -> str:
    """What to say where `settings_rows` has only its head."""
    unknown = [one.label for one in runs if not one.settings]
    return f"not known of {', '.join(unknown)}" if unknown else "none"


def setting(value: Any) -> str:
    """A value as a config file has it."""
    if value is None or value == []:
        return "-"
    return one_line(value) if isinstance(value, str) else json.dumps(value, default=str)


def metric_rows(found: Comparison) -> Rows:
    """Each metric of each run, and by how much each but the first differs from it."""
    of_runs = [one.row() for one in found.runs]
    rows = [_differing(name, [row[name] for row in of_runs]) for name in of_runs[0]]
    return [_head("", found.runs), *rows, ("best F1 at", *_confidences(found.runs))]


def _confidences(runs: Sequence[Contender]) -> list[str]:
    cells = [f"{one.confidence:.3f}" if one.row()["F1"] > 0 else "-" for one in runs]
    return [cells[0], *(cell for one in cells[1:] for cell in (one, ""))]


def class_rows(found: Comparison) -> Rows:
    """AP50-95 of each class; without those that no image has."""
    columns = [one.class_precision() for one in found.runs]
    rows: Rows = [_head("class", found.runs)]
    for c, name in enumerate(found.names):
        values = [float(column[c]) for column in columns]
        if not all(map(math.isnan, values)):
            rows.append(_differing(one_line(name), values))
    return rows


def _head(first: str, runs: Sequence[Contender]) -> Sequence[str]:
    return (first, runs[0].label, *(cell for one in runs[1:] for cell in (one.label, "+/-")))


def _differing(name: str, values: Sequence[float]) -> Sequence[str]:
    cells = [share(values[0])]
    for value in values[1:]:
        cells += [share(value), signed(value - values[0])]
    return (name, *cells)


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def signed(value: float) -> str:
    """+0.012, or 0 where it is that to the digits that are shown."""
    text = "-" if math.isnan(value) else f"{value:+.3f}"
    return "0" if text in ("+0.000", "-0.000") else text


def interval_title(found: Comparison) -> str:
    return f"The {len(found.truth):,} images drawn anew {found.draws:,} times; 95% of the differences lie in between"


def interval_rows(found: Comparison) -> Rows:
    """Each metric's difference from the first run."""
    rows: Rows = [("difference", "metric", "on the set", "from", "to", "which is")]
    first = found.runs[0].label
    for k, run in enumerate(found.runs[1:]):
        for metric in METRICS:
            one = found.intervals[metric][k]
            values = [signed(value) for value in (one.difference, one.low, one.high)]
            rows.append((f"{run.label} - {first}", metric, *values, told(one)))
    return rows


def told(one: Interval) -> str:
    """What an interval means, in words."""
    return {
        "better": "higher, by more than the noise of the images",
        "worse": "lower, by more than the noise of the images",
        "equal": "no difference",
        "open": f"not told apart: within the noise of the images ({one.higher:.0%} of the draws are higher)",
        "unknown": "not known: there is nothing to find",
    }[one.verdict]


def caveats(found: Comparison) -> list[str]:
    """What the intervals do not say."""
    lines = [
        "This is the noise of which images are in the set, not that of training: another seed gives other weights, and",
        "often differs by as much as settings do. To tell settings apart, train each with several seeds.",
    ]
    if len(found.truth) < FEW:
        lines.append(f"{len(found.truth)} images are few to draw from: take the interval as a hint.")
    return lines


def object_rows(found: Comparison) -> Rows:
    """How many objects each run finds and misses, what it finds where there is nothing, and what only one finds."""
    objects, first = int((~found.truth.crowd).sum()), found.runs[0].label
    rows: Rows = [("run", "confidence", "found", "missed", "wrong", "only it finds", f"only {first} finds")]
    for k, (run, one) in enumerate(zip(found.runs, found.sightings, strict=True)):
        numbers = int(one.found.sum()), objects - int(one.found.sum()), sum(map(len, one.wrong))
        only = [f"{int(found.only(*pair).sum()):,}" if k else "" for pair in ((k, 0), (0, k))]
        rows.append((run.label, f"{run.confidence:.3f}", *(f"{number:,}" for number in numbers), *only))
    return rows


def image_rows(found: Comparison, index: Index, most: int) -> Rows:
    """The images in which runs differ, most first: the objects that some find and some miss, and who misses them."""
    rows: Rows = [("image", "objects", "differ", *(f"missed by {one.label}" for one in found.runs))]
    for i in found.worst()[:most]:
        objects = int((~found.truth.of_image(i)[2]).sum())
        missed = [f"{number:,}" for number in missed_by(found, i)]
        rows.append((image_name(index, i), f"{objects:,}", f"{found.apart[i]:,}", *missed))
    return rows


def missed_by(found: Comparison, i: int) -> list[int]:
    """By run, the objects of image i that it misses and some other finds."""
    here = found.found[:, found.truth.offsets[i] : found.truth.offsets[i + 1]]
    return [int(number) for number in (here.any(axis=0) & ~here).sum(axis=1)]


def image_name(index: Index, i: int) -> str:
    """The image's path in its data set."""
    place = index.place(i)
    with_root = f"{index.root.rstrip('/')}/"
    return one_line(place.removeprefix(with_root) if index.root else place)


def one_line(value: object) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Short names of runs: the ends of their paths, as long as it takes to tell them apart; a run again is numbered."""
    parts = [_telling(path) for path in paths]
    length, several = 1, len(set(parts))
    while len({part[-length:] for part in parts}) < several:
        length += 1
    labels = [one_line("/".join(part[-length:])) for part in parts]
    again = [labels[: k + 1].count(label) for k, label in enumerate(labels)]
    return [label if number == 1 else f"{label} ({number})" for label, number in zip(labels, again, strict=True)]


def _telling(path: Path) -> tuple[str, ...]:
    """The parts of a path that tell a run: of runs/a/weights/best.pt as of runs/a: runs, a."""
    path = path.resolve()
    if path.parent.name == "weights":
        *before, run = path.parent.parent.parts
        return (*before, run if path.stem == "best" else f"{run} {path.stem}")
    return (path.with_suffix("") if path.suffix == ".pt" else path).parts
