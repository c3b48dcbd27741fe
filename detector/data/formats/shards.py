"""Data sets in tar shards, here or elsewhere: `train: shards/train-{000..063}.tar`, `s3://bucket/train-{000..063}.tar`.

The label of an image is beside it in its shard: YOLO's rows (`.txt`), or JSON with `annotations` as COCO has them, a
list of {"bbox": [left, top, width, height] in pixels, "category": its name, or "category_id": its number in `names`}.
"""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from detector.data import shard, storage
from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.data.formats.coco import box_of
from detector.data.formats.yolo import YoloLabels
from detector.data.labels import BACKGROUND, NO_LABELS, Box, Labels, usable
from detector.errors import DataError

READ_AT_ONCE = 8  # shards


def are_shards(entries: Sequence[Path | str]) -> bool:
    """Whether the entries of a split are shards. Some of them are, and some not: then the others are refused later."""
    return any(str(entry).endswith(".tar") or storage.is_url(str(entry)) for entry in entries)


def expanded(pattern: str) -> list[str]:
    """The texts that a pattern with {000..063} or {a,b} stands for, in this order.

    >>> expanded("train-{08..11}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'train-11.tar']
    """
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if ends:
        first, last = ends.groups()
        width = max(len(first), len(last)) if any(len(end) > 1 and end[0] == "0" for end in (first, last)) else 0
        parts = [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    else:
        parts = found[1].split(",")
    if len(parts) < 2 and not (ends and parts):
        raise DataError(f"{pattern}: {found[0]} stands for nothing; write {{000..063}}, or {{a,b}}")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [text for part in parts for text in expanded(f"{before}{part}{after}")]


def shards_of(description: DataDescription, split: str) -> list[str]:
    """The shards of a split, each once, in the order that the description says."""
    shards: dict[str, None] = {}
    for entry in map(str, description.splits[split]):
        place = f"{description.path}: {split}: {entry}"
        for one in expanded(entry):
            listed = [one]
            if any(sign in one for sign in "*?["):
                listed = storage.matching(one)
                if not listed:
                    raise DataError(f"{place}: there is no such shard; {description.absence}")
            for name in listed:
                if not name.endswith(".tar"):
                    raise DataError(f"{place}: is no tar shard; what lies elsewhere, or beside shards, must be one")
                shards[name] = None
    return list(shards)


class ShardLabels(YoloLabels):
    """The labels of a split in shards; see `formats.Annotations`. Images come shard by shard, as they lie in them."""

    def __init__(
        self,
        description: DataDescription,
        split: str,
        polygons: bool = False,
        kept_in: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """kept_in: folder for what is found in the shards; None: beside them, or else beside the description."""
        self.names, self._keypoints, self._polygons = description.names, description.keypoints, polygons
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.findings: list[Finding] = []
        folder = kept_in or description.path.with_name(f".{description.path.stem}.shards")
        shards = shards_of(description, split)
        self.paths: list[str] = []
        self.files: list[str | None] = []
        self._samples: list[shard.Sample] = []
        images = description.channels, description.value_range
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            read = pool.map(lambda one: shard.samples_of(one, folder, kept_in is None, *images), shards)
            for done, (place, samples) in enumerate(zip(shards, read, strict=True), start=1):
                self.paths += [shard.member_place(place, one.image) for one in samples]
                self.files += [shard.member_place(place, one.label) if one.label else None for one in samples]
                self._samples += samples
                if progress:
                    progress(done, len(shards))
        self._number = {path: i for i, path in enumerate(self.paths)}
        self.members = np.array([(one.start, one.bytes) for one in self._samples], dtype=np.int64).reshape(-1, 2)

    def expected(self, i: int) -> str:
        """Where the labels of image i are looked for."""
        return f"{self.paths[i].rpartition('.')[0]}.txt"

    def header(self, path: str) -> tuple[tuple[int, int] | None, str]:
        """What the header of the image of this path said; see `header.read_header`."""
        sample = self._samples[self._number[path]]
        return sample.size, sample.reason

    def read(self, numbers: Sequence[int], sizes: Sequence[tuple[int, int] | None]) -> list[Labels]:
        """The labels of these images; all texts among them in one go."""
        json_of = {i: size for i, size in zip(numbers, sizes, strict=True) if self._samples[i].label.endswith(".json")}
        texts = [i for i in numbers if i not in json_of]
        labels = dict(zip(texts, super().read(texts, ()), strict=True))
        return [self._of_json(i, json_of[i]) if i in json_of else labels[i] for i in numbers]

    def _content(self, i: int) -> bytes:
        return self._samples[i].text

    def _of_json(self, i: int, size: tuple[int, int] | None) -> Labels:
        file, image = self.files[i], self.paths[i]
        try:
            annotations = json.loads(self._samples[i].text)
        except ValueError as error:
            return BACKGROUND._replace(findings=(Finding("bad file", file, f"is no JSON ({error})", image),))
        if isinstance(annotations, dict):
            annotations = annotations.get("annotations")
        if annotations is None:  # it says other things of the image
            return NO_LABELS
        if not isinstance(annotations, list):
            text = "its annotations are no list of maps with bbox and category"
            return BACKGROUND._replace(findings=(Finding("bad file", file, text, image),))
        boxes, findings = [], []
        for row, annotation in enumerate(annotations, start=1):
            try:
                boxes.append(self._box(annotation, row, size))
            except ValueError as reason:
                findings.append(Finding("bad row", f"{file}:{row}", str(reason), image, row))
        return usable(boxes, f"{file}:", image, findings)

    def _box(self, annotation: object, row: int, size: tuple[int, int] | None) -> Box:
        if not isinstance(annotation, dict):
            raise ValueError(f"is {str(annotation)[:60]}, expected a map with bbox and category")
        name, number = annotation.get("category"), annotation.get("category_id")
        if name is not None:
            number = self._numbers.get(str(name))
            if number is None:
                raise ValueError(f"category {name!r} is not among `names`")
        if type(number) is not int or not 0 <= number < len(self.names):
            raise ValueError(f"category_id {number!r} is not a number in `names`, 0 to {len(self.names) - 1}")
        return box_of(annotation, number, row, size, self._polygons)
