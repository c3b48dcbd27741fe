"""Keeps the scan of a large split in a file, so that the next start looks at files' sizes and times only."""

import hashlib
import json
import os
import zipfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.data.formats import sources_of
from detector.data.header import readers
from detector.data.index import Index
from detector.data.scan import Scan
from detector.distributed import is_main
from detector.files import replaced

VERSION = 2  # of what is kept and of the readers: another one reads everything anew


class IndexCache:
    """A split's file: beside the description, or in a folder of the user's; none where it cannot be written."""

    def __init__(self, description: DataDescription, split: str, polygons: bool, folder: Path | None) -> None:
        content = {
            "version": [VERSION, *readers()],
            "images": [description.channels, description.value_range],
            "description": [str(description.path), str(description.root), description.format, description.keypoints],
            "entries": [*map(str, description.splits[split])],
            "annotations": {str(key): str(value) for key, value in description.annotations.items()},
            "names": description.names,
            "polygons": polygons,
            "sources": _stamped(sources_of(description, split)),
        }
        self.key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        place = hashlib.sha256(str(description.path).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        name = f"{description.path.stem}.{split}{'.polygons' if polygons else ''}"
        self.path = description.path.with_name(f".{name}.index") if folder is None else folder / f"{name}.{place}.index"

    def load(self) -> Scan | None:
        """What was kept; None where there is nothing, or it belongs to another description, version or reader."""
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                head = json.loads(arrays["head"].tobytes())
                if head["key"] != self.key:
                    return None
                columns = {field: arrays[f"index.{field}"] for field in head["columns"]}
                paths, files = _texts(arrays["paths"]), _texts(arrays["files"])
                stamps, rows = arrays["stamps"], arrays["rows"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # not there, or damaged
        index = Index(
            **columns,
            names=tuple(head["names"]),
            root=head["root"],
            findings=tuple(Finding(*row) for row in head["findings"]),
            image_ids=tuple(head["image_ids"]),
            category_ids=tuple(head["category_ids"]),
        )
        return Scan(paths, [file or None for file in files], stamps, rows, index)

    def save(self, scan: Scan) -> None:
        """Keep a scan, unless the place is not one to write to."""
        if not is_main():
            return
        index = scan.index
        columns = {
            field.name: value for field in fields(index) if isinstance(value := getattr(index, field.name), np.ndarray)
        }
        head = {
            "key": self.key,
            "columns": list(columns),
            "names": index.names,
            "root": index.root,
            "findings": index.findings,
            "image_ids": index.image_ids,
            "category_ids": index.category_ids,
        }
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self.path) as place, open(place, "wb") as file:
                np.savez(
                    file,
                    head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8),
                    paths=_bytes(scan.paths),
                    files=_bytes([path or "" for path in scan.files]),
                    stamps=scan.stamps,
                    rows=scan.rows,
                    **{f"index.{name}": column for name, column in columns.items()},
                )


def _stamped(paths: list[Path]) -> list[Any]:
    stamped = []
    for path in paths:
        try:
            found = os.stat(path)
            stamped.append([str(path), found.st_size, found.st_mtime_ns])
        except OSError:
            stamped.append([str(path), -1, -1])
    return stamped


def _bytes(texts: Any) -> np.ndarray:
    """Paths, in which there is no byte 0, as bytes."""
    return np.frombuffer(b"\0".join(map(os.fsencode, texts)), dtype=np.uint8)


def _texts(array: np.ndarray) -> list[str]:
    return [os.fsdecode(text) for text in array.tobytes().split(b"\0")]
