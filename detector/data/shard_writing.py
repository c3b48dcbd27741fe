"""Writes a data set into tar shards, as `shard.py` and WebDataset read them."""

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from detector.data import shard
from detector.data.index import Index
from detector.files import replaced


def write_shards(
    index: Index,
    folder: Path,
    images_per_shard: int = 1000,
    name: str = "train",
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Write the images of an index, as their files are, and their labels into `folder`/NAME-000000.tar and so on.

    Returns the pattern that stands for them in a description: "train-{000000..000012}.tar". They are read back as the
    same samples in the same order. Images keep their names, with the folders below the one that holds all of them; dots
    in them become `_`, and where two would be called the same, the later gets a number. Labels are YOLO's rows, and
    JSON where there is more to say: crowds and difficult objects, areas, polygons. The same index makes the same bytes.
    Raises DataError where an image cannot be read, OSError where a shard cannot be written.
    """
    assert images_per_shard > 0
    folder.mkdir(parents=True, exist_ok=True)
    stems = sample_names([index.place(i) for i in range(len(index))])
    starts = range(0, len(index), images_per_shard)
    for number, start in enumerate(starts):
        with replaced(folder / f"{name}-{number:06}.tar") as place, tarfile.open(place, "w") as tar:
            for i in range(start, min(start + images_per_shard, len(index))):
                _add(tar, stems[i] + os.path.splitext(index.place(i))[1].lower(), index.content(i))
                if label := label_of(index, i):
                    _add(tar, f"{stems[i]}.{label[0]}", label[1].encode())
                if progress:
                    progress(i + 1, len(index))
    last = f"{len(starts) - 1:06}"
    return f"{name}-{last}.tar" if len(starts) == 1 else f"{name}-{{000000..{last}}}.tar"


def sample_names(places: list[str]) -> list[str]:
    """A name for each image, from its path or its place in a shard: without ending and dots, each another."""
    members = [PurePath(shard.member_of(place)) for place in places]
    common = os.path.commonpath([member.parent for member in members]) if len(members) > 1 else members[0].parent
    names: dict[str, None] = {}
    for member in members:
        below = member.relative_to(common)
        stem = plain = (below.parent / below.stem.replace(".", "_")).as_posix()
        number = 2
        while stem in names:
            stem, number = f"{plain}_{number}", number + 1
        names[stem] = None
    return list(names)


def label_of(index: Index, i: int) -> tuple[str, str] | None:
    """The kind and the text of the label of image i; None where it has none."""
    if not index.labelled[i]:
        return None
    boxes = slice(index.box_offsets[i], index.box_offsets[i + 1])
    rows = zip(index.labels(i).tolist(), index.boxes_xywh[boxes].tolist(), strict=True)
    ignored, areas, polygons = index.ignored(i), index.areas[boxes], index.polygons(i)
    if not ignored.any() and np.isnan(areas).all() and all(polygon is None for polygon in polygons):
        return "txt", "".join(f"{label} {' '.join(map(repr, xywh))}\n" for label, xywh in rows)
    annotations: list[dict[str, Any]] = []
    corners = index.boxes_xyxy(i)
    for label, box, crowd, area, polygon in zip(index.labels(i), corners, ignored, areas, polygons, strict=True):
        left, top, right, bottom = box.tolist()
        one = {"bbox": [left, top, right - left, bottom - top], "category": index.names[label]}
        one |= {"iscrowd": 1} if crowd else {}
        one |= {} if np.isnan(area) else {"area": float(area)}
        one |= {} if polygon is None else {"segmentation": [polygon.ravel().tolist()]}
        annotations.append(one)
    return "json", json.dumps({"annotations": annotations}, ensure_ascii=False)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # of no owner and no time
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
