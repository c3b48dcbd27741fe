"""The index of a split as a run is to have it: what is on disk, and a verdict on what was found there."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from detector.data.description import DataDescription
from detector.data.findings import KINDS, OF_BOXES, Finding, of_kind
from detector.data.formats import annotations_of, are_shards
from detector.data.header import read_header
from detector.data.index import Index
from detector.data.index_cache import IndexCache
from detector.data.scan import Progress, Scan, scan_of
from detector.data.shapes import ensure_generated
from detector.distributed import is_main
from detector.errors import DataError

CACHED_FROM = 5_000  # images: fewer are read in about a second, and leave no file
SHOWN = 10  # problems in an error's message; where there are more, all of them are written to a file

BadBoxes = Literal["error", "clip", "drop_box", "drop_image"]


@dataclass(frozen=True)
class Reading:
    """How a data set is read.

    bad_boxes: "clip": boxes that reach outside their image are clipped, those without an area in it are dropped, and a
    row that breaks a rule is an error; "drop_box" drops all of them, "drop_image" their images; "error" stops at any.
    """

    bad_boxes: BadBoxes = "clip"
    max_missing_labels: float = 0.5  # the largest share of images without a label file
    polygons: bool = False  # whether they are kept
    cache_dir: Path | None = None  # where the index is kept; None: beside the description


def build_index(
    description: DataDescription,
    split: str,
    reading: Reading = Reading(),
    progress: Progress | None = None,
) -> Index:
    """The index of one split, drawn first if the description says that the project draws it.

    What is dropped or changed becomes findings. Raises DataError when the split or its images or labels are missing or
    when labels break a rule: the first are named, and where there are many, all are written to a file of the system's
    folder for temporary ones.
    """
    index = read_split(description, split, reading, progress).index
    if split != "test":
        check_labelled(index, description, split, reading.max_missing_labels, reading.cache_dir)
    index = judged(index, reading.bad_boxes)
    if not len(index):
        raise DataError(f"{description.path}: {split}: no image is left; mend their labels")
    return index.shared()


def read_split(description: DataDescription, split: str, reading: Reading, progress: Progress | None = None) -> Scan:
    """What one split holds as its files are, with all findings and before any verdict on them; see `build_index`."""
    if split not in description.splits:
        raise DataError(f"{description.path}: '{split}' is missing; add `{split}: images/{split}`")
    ensure_generated(description)
    if are_shards(description.splits[split]):  # what is found in them is kept shard by shard
        shards = annotations_of(description, split, reading.polygons, reading.cache_dir, progress)
        return _some(scan_of(shards, str(description.root), header=shards.header), description, split)
    cache = IndexCache(description, split, reading.polygons, reading.cache_dir)
    scan = known = cache.load()
    if known is None or description.format != "coco" or not known.unchanged():  # others' folders may have new images
        annotations = annotations_of(description, split, reading.polygons)
        header = partial(read_header, channels=description.channels, value_range=description.value_range)
        scan = scan_of(annotations, str(description.root), known, progress, header)
        if len(scan.paths) >= CACHED_FROM and scan is not known:
            cache.save(scan)
    return _some(scan, description, split)


def _some(scan: Scan, description: DataDescription, split: str) -> Scan:
    """The scan, in which there is an image; else DataError."""
    if not len(scan.index):
        first = of_kind(scan.index.findings, "unreadable image")[0]
        raise DataError(f"{description.path}: {split}: none of its images can be read (first: {first})")
    images = {"channels": description.channels, "value_range": description.value_range}
    return replace(scan, index=replace(scan.index, **images))


def judged(index: Index, bad_boxes: BadBoxes) -> Index:
    """The index without what is not to be trained on. Raises DataError where that stops the run."""
    stops = {"error": (*OF_BOXES, "bad file"), "clip": ("bad row", "bad file")}.get(bad_boxes, ())
    _raise_problems(of_kind(index.findings, *stops))
    if bad_boxes in ("error", "clip"):
        return index
    concerned = of_kind(index.findings, *(OF_BOXES if bad_boxes == "drop_image" else ()), "bad file")
    if concerned:
        index = _without_images(index, concerned)
    clipped = of_kind(index.findings, "clipped box")
    if clipped:
        index = _without_boxes(index, clipped)
    become = {"bad row": "dropped row", "clipped box": "dropped box"}
    return replace(index, findings=tuple(f._replace(kind=become.get(f.kind, f.kind)) for f in index.findings))


def _numbers_of(index: Index, findings: Sequence[Finding]) -> np.ndarray:
    """(F,) the number of the image that each finding is about."""
    numbers = {index.place(i): i for i in range(len(index))}
    return np.array([numbers.get(finding.image, -1) for finding in findings], dtype=np.int64)


def _without_images(index: Index, findings: Sequence[Finding]) -> Index:
    bad = _numbers_of(index, findings)
    first = {finding.image: finding for finding in reversed(findings)}
    dropped = [finding._replace(kind="dropped image") for finding in first.values()]
    others = [finding for finding in index.findings if finding.image not in first]
    kept = np.setdiff1d(np.arange(len(index)), bad)
    return replace(index.take(kept), findings=(*others, *dropped))


def _without_boxes(index: Index, findings: Sequence[Finding]) -> Index:
    bad = {*zip(_numbers_of(index, findings).tolist(), (finding.row for finding in findings), strict=True)}
    boxes = zip(index.image_of_box.tolist(), index.rows.tolist(), strict=True)
    return index.keep(np.array([box not in bad for box in boxes], dtype=bool))


def check_labelled(
    index: Index, description: DataDescription, split: str, limit: float, kept_in: Path | None = None
) -> None:
    """Raise DataError where too many images have no label file: then they are most likely looked for elsewhere."""
    without = np.flatnonzero(~index.labelled)
    if not len(without) or len(without) <= limit * len(index):
        return
    annotations = annotations_of(description, split, kept_in=kept_in)
    path = index.place(int(without[0]))
    expected = annotations.expected(list(annotations.paths).index(path))
    place = f"{description.path}: {split}:"
    if len(without) == len(index):
        raise DataError(
            f"{place} none of the {len(index)} images has a label file; looked for {expected} and its like. Put the "
            "labels there"
        )
    raise DataError(
        f"{place} {len(without):,} of {len(index):,} images have no label file (first: {expected}), more than "
        f"max_missing_labels={limit:g} allows. If they show nothing, allow more, or write empty files; else put the "
        "labels there"
    )


def _raise_problems(problems: Sequence[Finding]) -> None:
    if len(problems) == 1:
        raise DataError(_told(problems[0]))
    if problems:
        more = f"\nand {len(problems) - SHOWN:,} more; {_written(problems)}" if len(problems) > SHOWN else ""
        listed = "\n".join(map(_told, problems[:SHOWN]))
        raise DataError(f"{len(problems):,} labels break a rule:\n{listed}{more}")


def _told(finding: Finding) -> str:
    """A finding as an error; those that a run would go on with say what they are and how."""
    if finding.severity == "error":
        return str(finding)
    return f"{finding.place}: {finding.kind}: {KINDS[finding.kind].told} by bad_boxes=clip; mend it"


def _written(problems: Sequence[Finding]) -> str:
    """Where all the problems can be read, once they are written there. All ranks meet them, and the main one writes."""
    if not is_main():
        return ""
    try:
        file, path = tempfile.mkstemp(prefix="bad_labels_", suffix=".txt")
        with open(file, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.writelines(f"{_told(problem)}\n" for problem in problems)
    except OSError as error:
        return f"their list cannot be written ({error.strerror or error})"
    return f"all of them are listed in {path}"
