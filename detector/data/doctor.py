"""The doctor of a data set: all that is noticed about it, as findings and numbers; what to make of it is the reader's.

What reading a split shows are the findings of its index. Here come those that need a look at all boxes, at all splits,
or at the pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from detector.data.conventions import conventions, ids_from_one
from detector.data.counts import Counts, box_sides, count
from detector.data.description import DataDescription
from detector.data.duplicates import duplicates
from detector.data.findings import KINDS, SEVERITIES, Finding
from detector.data.index import Index
from detector.data.pixels import Pixels, look_at
from detector.data.reading import Reading, check_labelled, read_split
from detector.data.scan import Progress, Scan
from detector.errors import DataError

TINY = 2.0  # pixels of the network's input below which a side is next to nothing
DOUBLED = 0.9  # IoU of two boxes of one object
PAIRS = 2**20  # of boxes that are compared at once

Noticed = tuple[str, Finding]  # with the split it is about; "": with all of them


@dataclass(frozen=True, eq=False)
class Examination:
    """What was found out about a data set."""

    description: DataDescription
    imgsz: int
    indices: dict[str, Index]  # of the splits that can be read
    counts: dict[str, Counts]
    findings: tuple[Noticed, ...]  # the worst first
    pixels: bool  # whether they were looked at

    def of_severity(self, severity: str) -> list[Noticed]:
        return [(split, finding) for split, finding in self.findings if finding.severity == severity]


def examine(
    description: DataDescription,
    splits: Sequence[str],
    imgsz: int = 640,
    pixels: bool = True,
    reading: Reading | None = None,
    bar: Callable[[str], Progress | None] = lambda title: None,
) -> Examination:
    """Look at splits of a data set; `bar` makes what is told of progress. Raises DataError where none can be read."""
    reading = reading or Reading()
    scans: dict[str, Scan] = {}
    errors: list[tuple[str, DataError]] = []
    for split in splits:
        try:
            scans[split] = read_split(description, split, reading, bar(split))
        except DataError as error:
            errors.append((split, error))
    if not scans:
        raise errors[0][1]
    found: list[Noticed] = []
    for split, error in errors:
        kind = "no test" if split == "test" else "bad split"
        text = str(error).removeprefix(f"{description.path}: ")
        found.append((split, Finding(kind, str(description.path), text)))
    indices = {split: scan.index for split, scan in scans.items()}
    for split, scan in scans.items():
        several = [
            *scan.index.findings,
            *_unlabelled(scan, description, split, reading.max_missing_labels),
            *_boxes(scan, description.format, imgsz),
        ]
        found += [(split, finding) for finding in several]
    found += of_classes(indices, description.path)
    if description.format == "yolo":
        found += conventions(indices, description.path)
    if pixels:
        found += _pixels(
            indices, {split: look_at(index, bar(f"the pixels of {split}")) for split, index in indices.items()}
        )
    return Examination(
        description,
        imgsz,
        indices,
        {split: count(index, imgsz) for split, index in indices.items()},
        tuple(sorted(found, key=_rank)),
        pixels,
    )


def before_training(indices: Mapping[str, Index], description: DataDescription) -> list[Finding]:
    """What a run should tell of its splits at no cost: what will never be learnt, and ids that seem to begin at 1."""
    found = [finding for _, finding in of_classes(indices, description.path)]
    if description.format == "yolo":
        found += ids_from_one(list(indices.values()), description.path)
    return [finding for finding in found if finding.severity != "note"]


def of_classes(indices: Mapping[str, Index], description: Path) -> list[Noticed]:
    """What the classes of splits have too few of, and names that are nearly the same."""
    names = next(iter(indices.values())).names
    used = {
        split: np.bincount(index.classes[~index.ignored_boxes], minlength=len(names))
        for split, index in indices.items()
    }
    found: list[Noticed] = []
    for number, name in enumerate(names):
        boxes = {split: int(several[number]) for split, several in used.items()}
        if not any(boxes.values()):
            found.append(("", Finding("empty class", str(description), f"class {number} ({name})")))
            continue
        for split in [split for split in boxes if split != "train" and "train" in boxes]:
            if boxes[split] and not boxes["train"]:
                text = f"class {number} ({name}): none in train, {boxes[split]:,} in {split}"
                found.append((split, Finding("untrained class", str(description), text)))
            elif split == "val" and not boxes[split]:
                text = f"class {number} ({name}): {boxes['train']:,} in train, none in {split}"
                found.append((split, Finding("unmeasured class", str(description), text)))
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault("".join(name.casefold().split()), name)
        if other is not name:
            found.append(("", Finding("alike names", str(description), f"{other!r} and {name!r}")))
    return found


def _rank(noticed: Noticed) -> tuple[int, int]:
    kind = noticed[1].kind
    return SEVERITIES.index(KINDS[kind].severity), list(KINDS).index(kind)


def _unlabelled(scan: Scan, description: DataDescription, split: str, limit: float) -> list[Finding]:
    """Images without a label file, and whether they are so many that a run would stop."""
    index = scan.index
    paths = [index.place(i) for i in np.flatnonzero(~index.labelled).tolist()]
    found = [Finding("no label", path, "", path) for path in paths]
    if split != "test":
        try:
            check_labelled(index, description, split, limit)
        except DataError as error:
            text = str(error).removeprefix(f"{description.path}: ")
            found.append(Finding("missing labels", str(description.path), text))
    return found


def _boxes(scan: Scan, form: str | None, imgsz: int) -> list[Finding]:
    """Boxes that are next to nothing at imgsz, and those that lie on another."""
    index = scan.index
    files = [scan.files[i] for i in np.flatnonzero(scan.rows >= 0).tolist()]
    owner, learnt = index.image_of_box, ~index.ignored_boxes

    between, unit = (": annotation ", "annotation") if form == "coco" else (":", "line")

    def at(box: int, kind: str, text: str) -> Finding:
        i, row = int(owner[box]), int(index.rows[box])
        return Finding(kind, f"{files[i]}{between}{row}", text, index.place(i), row)

    sides = box_sides(index, imgsz)
    found = [
        at(box, "tiny box", f"is {sides[box, 0]:.1f} x {sides[box, 1]:.1f} pixels at imgsz {imgsz}")
        for box in np.flatnonzero((sides.min(axis=1, initial=np.inf) < TINY) & learnt).tolist()
    ]
    for i in np.flatnonzero(np.diff(index.box_offsets) > 1).tolist():
        for box, other, overlap in _doubled(index, i):
            same = index.classes[box] == index.classes[other]
            text = f"lies on that of {unit} {index.rows[other]} (IoU {overlap:.2f})"
            if not same:
                text += f", {index.names[index.classes[box]]} on {index.names[index.classes[other]]}"
            found.append(at(box, "doubled box" if same else "two classes", text))
    return found


def _doubled(index: Index, i: int) -> list[tuple[int, int, float]]:
    """(box, earlier box, IoU) for each box of image i that lies on an earlier one, by their numbers in the index."""
    start, stop = int(index.box_offsets[i]), int(index.box_offsets[i + 1])
    learnt = start + np.flatnonzero(~index.ignored_boxes[start:stop])
    boxes = index.boxes_xyxy(i)[learnt - start]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    found = []
    step = max(PAIRS // max(len(boxes), 1), 1)
    for first in range(0, len(boxes), step):
        some = boxes[first : first + step]
        low, high = np.maximum(some[:, None, :2], boxes[None, :, :2]), np.minimum(some[:, None, 2:], boxes[None, :, 2:])
        inside = (high - low).clip(min=0).prod(axis=2)
        overlap = inside / (areas[first : first + step, None] + areas[None] - inside)
        overlap[np.arange(len(boxes))[None] >= first + np.arange(len(some))[:, None]] = 0
        nearest = overlap.argmax(axis=1)
        for k in np.flatnonzero(overlap.max(axis=1, initial=0) > DOUBLED).tolist():
            other = int(nearest[k])
            found.append((int(learnt[first + k]), int(learnt[other]), float(overlap[k, other])))
    return found


def _pixels(indices: Mapping[str, Index], pixels: Mapping[str, Pixels]) -> list[Noticed]:
    found: list[Noticed] = []
    for split, seen in pixels.items():
        paths = {i: indices[split].place(i) for i in (*seen.damage, *np.flatnonzero(seen.orientations > 1).tolist())}
        found += [(split, Finding("damaged image", paths[i], text, paths[i])) for i, text in seen.damage.items()]
        for i in np.flatnonzero(seen.orientations > 1).tolist():
            text = f"orientation {seen.orientations[i]}: its boxes are to be those of the upright image"
            found.append((split, Finding("turned image", paths[i], text, paths[i])))
    return found + duplicates(indices, pixels)
