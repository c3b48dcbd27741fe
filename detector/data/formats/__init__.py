"""The formats of annotations, read in place: which one a data set has, and what it says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.data.formats import coco, voc
from detector.data.formats.shards import ShardLabels, are_shards
from detector.data.formats.yolo import YoloLabels
from detector.data.labels import Labels
from detector.errors import DataError

RECOGNISED = {"coco": coco.recognised, "voc": voc.recognised}


class Annotations(Protocol):
    """The annotations of a split in some format."""

    names: tuple[str, ...]  # of the classes
    paths: Sequence[str]  # of the images, sorted
    files: Sequence[str | None]  # what annotates each; None: nothing does
    findings: Sequence[Finding]  # what was noticed about the split as a whole

    def expected(self, i: int) -> str:
        """Where the annotation of image i is looked for."""

    def read(self, numbers: Sequence[int], sizes: Sequence[tuple[int, int] | None]) -> list[Labels]:
        """What is said of these images, whose (height, width) in pixels are known unless they cannot be read."""


def annotations_of(
    description: DataDescription,
    split: str,
    polygons: bool = False,
    kept_in: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Annotations:
    """The annotations of a split of a description that is complete; kept_in and progress: of shards, see there."""
    if are_shards(description.splits[split]):
        return ShardLabels(description, split, polygons, kept_in, progress)
    reader = {"yolo": YoloLabels, "coco": coco.CocoLabels, "voc": voc.VocLabels}[description.format]
    return reader(description, split, polygons)


def completed(description: DataDescription) -> DataDescription:
    """The description with its format and names: where it does not say them, they are seen in the files."""
    apart = {split: entries for split, entries in description.splits.items() if not are_shards(entries)}
    folders = replace(description, splits=apart)  # shards say neither
    kind = description.format or next(
        (name for name, recognised in RECOGNISED.items() if "train" in apart and recognised(folders)), "yolo"
    )
    names = description.names
    if not names and kind != "yolo":
        names = {"coco": coco.class_names, "voc": voc.class_names}[kind](folders)
    if not names:
        raise DataError(
            f"{description.path}: 'names' is missing; name the classes, for example `names: {{0: cat, 1: dog}}`"
        )
    return replace(description, format=kind, names=names)


def sources_of(description: DataDescription, split: str) -> list[Path]:
    """The files that say by themselves which images a split has."""
    if description.format != "coco":
        return []
    return [coco.annotation_file(description, split, entry)[0] for entry in description.splits[split]]
