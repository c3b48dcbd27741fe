"""Writes a data set in another format, YOLO text, COCO JSON, Pascal VOC XML or shards, with a description of it.

Numbers are written so that reading them back gives the same to the last digit that is written: fractions with nine
decimals, pixels with four.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

import numpy as np
import yaml

from detector.data.index import Index
from detector.data.shard import member_of
from detector.data.shard_writing import write_shards
from detector.errors import DataError

Format = Literal["yolo", "coco", "voc", "shards"]
FRACTIONS, PIXELS = 9, 4  # decimals that are written
ENTRIES = {  # what a description's splits are in each format
    "yolo": "images/{split}",
    "coco": "annotations/instances_{split}.json",
    "voc": "ImageSets/Main/{split}.txt",
}
IMAGES = {"yolo": "images", "coco": "images", "voc": "JPEGImages"}
CANNOT = {"yolo": "a crowd or a difficult object"}  # what a format has no way to say


def write_dataset(splits: dict[str, Index], folder: Path, form: Format, link: bool = False) -> list[str]:
    """Write the splits of a data set into a new folder; returns what is worth telling.

    link: images become symbolic links to where they are, instead of copies; what is in a shard is copied. Raises
    DataError where two images of a split would have one annotation file.
    """
    if form == "shards":
        entries = {split: write_shards(index, folder, name=split) for split, index in splits.items()}
        _describe(folder, entries, next(iter(splits.values())))
        return []
    names = {split: _names(index, form, split) for split, index in splits.items()}
    folder.mkdir(parents=True, exist_ok=True)
    notes = []
    for split, index in splits.items():
        for i, name in enumerate(names[split]):
            _put(index, i, folder / IMAGES[form] / split / name, link)
        {"yolo": _write_yolo, "coco": _write_coco, "voc": _write_voc}[form](index, names[split], folder, split)
        ignored = int(index.ignored_boxes.sum())
        if ignored and form in CANNOT:
            notes.append(
                f"{split}: {ignored:,} boxes were left out: {form} cannot say of a box that it is {CANNOT[form]}"
            )
    entries = {split: ENTRIES[form].format(split=split) for split in splits}
    _describe(folder, {**entries, "format": form}, next(iter(splits.values())))
    return notes


def _describe(folder: Path, entries: dict[str, str], index: Index) -> None:
    description = {
        **entries,
        "names": dict(enumerate(index.names)),
        **({} if index.channels == 3 else {"channels": index.channels}),
        **({} if index.value_range is None else {"range": list(index.value_range)}),
    }
    text = yaml.safe_dump(description, sort_keys=False, allow_unicode=True)
    (folder / "data.yaml").write_text(text, encoding="utf-8")


def _names(index: Index, form: Format, split: str) -> list[str]:
    """The images' names in the new folder: their paths below the folder that holds them all."""
    paths = [member_of(index.place(i)) for i in range(len(index))]
    top = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, top) for path in paths]
    if form != "coco":
        stems: dict[str, str] = {}
        for name in names:
            stem = os.path.splitext(name)[0]
            if stem in stems:
                raise DataError(
                    f"{split}: {stems[stem]} and {name} would have one label file in {form}; rename one of them, or "
                    "convert to coco"
                )
            stems[stem] = name
    return names


def _put(index: Index, i: int, target: Path, link: bool) -> None:
    source = index.path(i)
    target.parent.mkdir(parents=True, exist_ok=True)
    if len(index.members):
        target.write_bytes(index.content(i))
    elif link:
        target.unlink(missing_ok=True)
        target.symlink_to(source.resolve())
    else:
        shutil.copyfile(source, target)


def _boxes(index: Index, i: int) -> Iterator[tuple[int, list[float], bool, float]]:
    """Class, corners in pixels, whether it is to be ignored, and the area if it is not the box's."""
    rows = slice(index.box_offsets[i], index.box_offsets[i + 1])
    columns = (index.classes, index.ignored_boxes, index.areas)
    classes, ignored, areas = (column[rows].tolist() for column in columns)
    yield from zip(classes, index.boxes_xyxy(i).tolist(), ignored, areas, strict=True)


def _write_yolo(index: Index, names: Sequence[str], folder: Path, split: str) -> None:
    for i, name in enumerate(names):
        rows = slice(index.box_offsets[i], index.box_offsets[i + 1])
        kept = ~index.ignored_boxes[rows]
        lines = [
            f"{label} " + " ".join(_number(value, FRACTIONS) for value in xywh)
            for label, xywh in zip(
                index.classes[rows][kept].tolist(), index.boxes_xywh[rows][kept].tolist(), strict=True
            )
        ]
        if index.labelled[i]:
            target = (folder / "labels" / split / name).with_suffix(".txt")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "labels" / split).mkdir(parents=True, exist_ok=True)


def _write_coco(index: Index, names: Sequence[str], folder: Path, split: str) -> None:
    ids = index.image_ids or range(1, len(index) + 1)
    known = index.category_ids if all(number is not None for number in index.category_ids) else ()
    categories = known or range(1, len(index.names) + 1)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        height, width = index.size(i)
        images.append({"id": ids[i], "file_name": f"{split}/{name}", "height": height, "width": width})
        for (label, (left, top, right, bottom), crowd, area), outline in zip(
            _boxes(index, i), index.polygons(i), strict=True
        ):
            sides = [round(value, PIXELS) for value in (left, top, right - left, bottom - top)]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": ids[i],
                    "category_id": categories[label],
                    "bbox": sides,
                    "area": round(sides[2] * sides[3] if np.isnan(area) else area, PIXELS),
                    "iscrowd": int(crowd),
                    "segmentation": [] if outline is None else [np.round(outline, PIXELS).ravel().tolist()],
                }
            )
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": categories[number], "name": name} for number, name in enumerate(index.names)],
    }
    (folder / "annotations").mkdir(exist_ok=True)
    text = json.dumps(content, ensure_ascii=False)
    (folder / "annotations" / f"instances_{split}.json").write_text(text, encoding="utf-8")


def _write_voc(index: Index, names: Sequence[str], folder: Path, split: str) -> None:
    stems = [f"{split}/{os.path.splitext(name)[0]}" for name in names]
    for i, (name, stem) in enumerate(zip(names, stems, strict=True)):
        if not index.labelled[i]:
            continue
        target = folder / "Annotations" / f"{stem}.xml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_voc_text(index, i, os.path.basename(name)), encoding="utf-8")
    (folder / "Annotations").mkdir(exist_ok=True)
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True, exist_ok=True)
    (lists / f"{split}.txt").write_text("".join(f"{stem}\n" for stem in stems), encoding="utf-8")


def _voc_text(index: Index, i: int, name: str) -> str:
    height, width = index.size(i)
    lines = ["<annotation>", f"  <filename>{escape(name)}</filename>"]
    lines.append(f"  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>")
    for label, (left, top, right, bottom), difficult, _ in _boxes(index, i):
        corners = zip(("xmin", "ymin", "xmax", "ymax"), (left + 1, top + 1, right, bottom), strict=True)
        box = "".join(f"<{corner}>{_number(value, PIXELS)}</{corner}>" for corner, value in corners)
        lines += [
            "  <object>",
            f"    <name>{escape(index.names[label])}</name>",
            f"    <difficult>{int(difficult)}</difficult>",
            f"    <bndbox>{box}</bndbox>",
            "  </object>",
        ]
    return "\n".join([*lines, "</annotation>", ""])


def _number(value: float, decimals: int) -> str:
    """Without zeros at its end: 12 and 0.25."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")
