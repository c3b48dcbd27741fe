"""COCO: one JSON file a split, `images`, `annotations` and `categories`, boxes as corner and size in pixels.

Ids may have gaps and begin anywhere. A crowd (`iscrowd`: a region of many objects) is not learnt, and is no fault of a
detection. Lin et al., "Microsoft COCO: common objects in context" (2014).
"""

import gc
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.data.labels import BACKGROUND, Box, Labels, usable
from detector.errors import DataError

BESIDE = "_annotations.coco.json"  # in the images' folder, as some exports have it
CATEGORIES = re.compile(r'"categories"\s*:\s*(?=\[)')


class CocoLabels:
    """The labels of a split; see `formats.Annotations`. Images keep their ids, in `image_ids`."""

    def __init__(self, description: DataDescription, split: str, polygons: bool = False) -> None:
        self.names, self._polygons = description.names, polygons
        self.findings: list[Finding] = []
        images: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {}  # by path: its file, and what it says
        self.category_ids: dict[int, int] = {}  # by our number
        absent: list[Finding] = []
        for entry in description.splits[split]:
            file, folder = annotation_file(description, split, entry)
            content = read_json(file)
            self._categories(file, content["categories"], description)
            by_image = defaultdict(list)
            for annotation in content["annotations"]:
                by_image[annotation.get("image_id")].append(annotation)
            names = [str(image["file_name"]) for image in content["images"]]
            folder = _folder_of(names, file, folder, description, split)
            for image, name in zip(content["images"], names, strict=True):
                path = str(folder / name)
                if path in images:
                    self.findings.append(Finding("listed twice", path, image=path))
                elif not os.path.exists(path):
                    absent.append(Finding("no image", f"{file}: image {image['id']}", f"{path} does not exist"))
                else:
                    images[path] = (str(file), image, by_image.pop(image["id"], []))
        if not images:
            first = f" (first: {absent[0]})" if absent else ""
            raise DataError(f"{description.path}: {split}: none of the {len(absent):,} images is there{first}; "
                            f"{description.absence}")  # fmt: skip
        self.findings += absent
        self.paths = sorted(images)
        self._images = [images[path] for path in self.paths]
        self.files = [file for file, _, _ in self._images]

    @property
    def image_ids(self) -> list[Any]:
        """The id that each image has in its file."""
        return [image["id"] for _, image, _ in self._images]

    def expected(self, i: int) -> str:
        """Where the annotations of image i are looked for."""
        return self.files[i]

    def read(self, numbers: Sequence[int], sizes: Sequence[tuple[int, int] | None]) -> list[Labels]:
        return [self._labels(i, size) for i, size in zip(numbers, sizes, strict=True)]

    def _labels(self, i: int, size: tuple[int, int] | None) -> Labels:
        file, image, annotations = self._images[i]
        boxes, findings = [], []
        said = _size(image)
        size = size or said
        if said and size and said != size:
            text = f"says {said[1]} x {said[0]} pixels, the image has {size[1]} x {size[0]}"
            findings.append(Finding("other size", f"{file}: image {image['id']}", text, self.paths[i]))
        if not annotations:
            return BACKGROUND._replace(findings=tuple(findings))
        for number, annotation in enumerate(annotations, start=1):
            row = annotation.get("id", number)
            row = row if isinstance(row, int) and 0 <= row < 2**31 else number
            try:
                category = annotation.get("category_id")
                if category not in self._numbers:
                    raise ValueError(f"category_id {category!r} is not among `categories`")
                boxes.append(box_of(annotation, self._numbers[category], row, size, self._polygons))
            except ValueError as reason:
                place = f"{file}: annotation {annotation.get('id', number)}"
                findings.append(Finding("bad row", place, str(reason), self.paths[i], row))
        return usable(boxes, f"{file}: annotation ", self.paths[i], findings)

    def _categories(self, file: Path, categories: list[dict[str, Any]], description: DataDescription) -> None:
        """Take note of a file's categories, which are told by their names."""
        known = {name: number for number, name in enumerate(self.names)}
        self._numbers = {}
        for category in categories:
            name = str(category["name"])
            if name not in known:
                raise DataError(
                    f"{file}: the category {name!r} is not among `names` of {description.path}; leave `names` out to "
                    "take those of the file, and give others by the setting names="
                )
            self._numbers[category["id"]] = known[name]
            self.category_ids.setdefault(known[name], category["id"])


def box_of(
    annotation: dict[str, Any], label: int, row: int, size: tuple[int, int] | None, polygons: bool = False
) -> Box:
    """An annotation of an image of this (height, width) in pixels. Raises ValueError with what is wrong with it."""
    if size is None:
        raise ValueError("the image cannot be read and its size is not written; give width and height")
    left, top, width, height = _four(annotation.get("bbox"))
    high, wide = size
    xywh = ((left + width / 2) / wide, (top + height / 2) / high, width / wide, height / high)
    area = annotation.get("area")
    area = float(area) if isinstance(area, int | float) and math.isfinite(area) and area > 0 else math.nan
    polygon = _polygon(annotation.get("segmentation"), size) if polygons else None
    return Box(label, xywh, row, bool(annotation.get("iscrowd", 0)), area, polygon)


def annotation_file(description: DataDescription, split: str, entry: Path) -> tuple[Path, Path | None]:
    """The JSON file of an entry of a split, and the folder of its images where that is known."""
    if entry in description.annotations:
        return description.annotations[entry], entry
    if entry.suffix.lower() == ".json":
        return entry, None
    if (entry / BESIDE).is_file():
        return entry / BESIDE, entry
    if (file := _in_annotations(description.root, entry)) is not None:
        return file, entry
    raise DataError(
        f"{description.path}: {split}: {entry} has no COCO file; name one, as `{split}: annotations/instances_{split}"
        f".json`, or `{split}: {{images: images/{split}, annotations: annotations/instances_{split}.json}}`"
    )


def _in_annotations(root: Path, entry: Path) -> Path | None:
    for name in (f"instances_{entry.name}.json", f"{entry.name}.json"):
        if (file := root / "annotations" / name).is_file():
            return file
    return None


def recognised(description: DataDescription) -> bool:
    """Whether the training images have a COCO file."""
    entry = description.splits["train"][0]
    named = description.annotations.get(entry)
    if named is not None:
        return named.suffix.lower() == ".json"
    if entry.suffix.lower() == ".json":
        return True
    if not entry.is_dir():
        return False
    labels = Path(*("labels" if part == "images" else part for part in entry.parts))
    has_labels = labels != entry and labels.is_dir()
    return (entry / BESIDE).is_file() or (not has_labels and _in_annotations(description.root, entry) is not None)


def class_names(description: DataDescription) -> tuple[str, ...]:
    """The categories of the training images by their ids, then those that only other splits have.

    What is wrong with another split is told when that is read, which a training may never do.
    """
    names: dict[str, None] = {}
    for split, entries in description.splits.items():
        for entry in entries:
            try:
                categories = read_categories(annotation_file(description, split, entry)[0])
            except DataError:
                if split == "train":
                    raise
                continue
            names |= dict.fromkeys(str(c["name"]) for c in sorted(categories, key=lambda c: _order(c["id"])))
    if not names:
        raise DataError(f"{description.path}: its COCO files have no categories; name the classes by `names`")
    return tuple(names)


def read_categories(file: Path) -> list[dict[str, Any]]:
    """The categories of a COCO file, without its images and annotations where that can be done: they take seconds."""
    with suppress(OSError, ValueError, RecursionError):
        text = file.read_text(encoding="utf-8")
        key, *others = CATEGORIES.finditer(text)
        if not others:
            categories, _ = json.JSONDecoder().raw_decode(text, key.end())
            plain = (isinstance(one, dict) and isinstance(one.get("id"), int) for one in categories)
            if all(plain) and all(isinstance(one.get("name"), str) for one in categories):
                return categories
    return read_json(file)["categories"]


def read_json(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The images, annotations and categories of a COCO file. Raises DataError where it is none."""
    try:
        with open(file, "rb") as opened, _without_collection():
            content = json.loads(opened.read())
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; name the COCO file of the split") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error}); make it readable") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is no JSON ({error}); export it anew") from None
    if not isinstance(content, dict) or "images" not in content:
        raise DataError(f"{file}: has no `images`; a COCO file has images, annotations and categories")
    content = {key: content.get(key) or [] for key in ("images", "annotations", "categories")}
    for key, needed in (("images", ("id", "file_name")), ("annotations", ()), ("categories", ("id", "name"))):
        rows = content[key]
        for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
            if not isinstance(row, dict) or any(isinstance(row.get(name), dict | list | None) for name in needed):
                raise DataError(f"{file}: {key}[{number}] is {str(row)[:80]}, expected a map with {', '.join(needed)}")
        if not isinstance(rows, list):
            raise DataError(f"{file}: {key} is a map, expected a list")
    for number, row in enumerate(content["annotations"]):
        if isinstance(row.get("image_id"), dict | list) or isinstance(row.get("category_id"), dict | list):
            raise DataError(f"{file}: annotations[{number}] has an id that is no number")
    return content


@contextmanager
def _without_collection() -> Iterator[None]:
    """No looking for garbage among millions of new maps, which is a third of the time that reading them takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _folder_of(names: Sequence[str], file: Path, named: Path | None, description: DataDescription, split: str) -> Path:
    """The folder that the names of a file's images start at: the first that has one of them, of `named` and others."""
    suffix = file.stem.rpartition("_")[2]
    bases = dict.fromkeys((file.parent, file.parent.parent, description.root))
    middles = ("", "images", suffix, f"images/{suffix}", split, f"images/{split}")
    tried = [base / middle for middle in middles for base in bases]
    tried = tried if named is None else [named, named.parent, *tried]
    for folder in tried:
        if any((folder / name).exists() for name in names[:100]):
            return folder
    shown = ", ".join(str(folder) for folder in list(dict.fromkeys(tried))[:6])
    raise DataError(
        f"{file}: none of its first images is there ({names[0] if names else 'it lists none'}); looked in {shown} and "
        f"the like. Name the folder: {split}: {{images: folder, annotations: {file.name}}}; {description.absence}"
    )


def _size(image: dict[str, Any]) -> tuple[int, int] | None:
    height, width = image.get("height"), image.get("width")
    good = all(isinstance(side, int | float) and math.isfinite(side) and side >= 1 for side in (height, width))
    return (int(height), int(width)) if good else None


def _four(bbox: Any) -> Iterator[float]:
    good = isinstance(bbox, list) and len(bbox) == 4
    good = good and all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in bbox)
    if not good:
        raise ValueError(f"bbox is {str(bbox)[:60]}, expected [left, top, width, height] in pixels")
    return map(float, bbox)


def _polygon(segmentation: Any, size: tuple[int, int]) -> np.ndarray | None:
    """(P, 2) fractions: the largest part of a segmentation by polygons; None where it has none."""
    if not isinstance(segmentation, list) or not segmentation:
        return None
    largest = max((part for part in segmentation if isinstance(part, list)), key=len, default=[])
    try:
        points = np.array(largest, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    if points.ndim != 1 or len(points) < 6 or len(points) % 2 or not np.isfinite(points).all():
        return None
    return points.reshape(-1, 2) / (size[1], size[0])


def _order(key: Any) -> tuple[bool, Any]:
    return (not isinstance(key, int), key if isinstance(key, int) else str(key))
