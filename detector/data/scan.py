"""What is on disk: the images of a split with their sizes and labels, read where they are not known from before."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from detector.data.findings import Finding
from detector.data.formats import Annotations
from detector.data.header import read_header
from detector.data.index import Index
from detector.data.labels import NO_LABELS, Labels

CHUNK = 512  # images that are read at once
OF_LISTING = ("listed twice", "no picture", "no image")  # findings that are made whenever images are looked for

Progress = Callable[[int, int], None]  # images read, of so many
ReadHeader = Callable[[str], tuple[tuple[int, int] | None, str]]  # see `read_header`


@dataclass(frozen=True, eq=False)
class Scan:
    """The N images that a split lists, and the index of those that can be read."""

    paths: Sequence[str]
    files: Sequence[str | None]  # what annotates each
    stamps: np.ndarray  # (N, 4) int64, see `stamps_of`
    rows: np.ndarray  # (N,) int64 each one's number in the index, -1 where it cannot be read
    index: Index

    def unchanged(self) -> bool:
        """Whether all files are what they were, and none was missing."""
        missing = any(finding.kind == "no image" for finding in self.index.findings)
        return not missing and np.array_equal(stamps_of(self.paths, self.files), self.stamps)

    def same(self, paths: Sequence[str], files: Sequence[str | None], stamps: np.ndarray) -> np.ndarray:
        """(M,) int64 where in this scan each of M images is that has not changed since, else -1."""
        if list(self.paths) == list(paths):
            old = np.arange(len(paths))
        else:
            places = {path: i for i, path in enumerate(self.paths)}
            old = np.array([places.get(path, -1) for path in paths], dtype=np.int64)
        alike = (self.stamps[old] == stamps).all(axis=1)
        alike &= np.array([self.files[i] == file for i, file in zip(old.tolist(), files, strict=True)], dtype=bool)
        return np.where((old >= 0) & alike, old, -1)

    def is_all(self, old: np.ndarray, findings: Sequence[Finding]) -> bool:
        """Whether images that are these of this scan, found with such findings, are just this scan."""
        found = [finding for finding in self.index.findings if finding.kind in OF_LISTING]
        return np.array_equal(old, np.arange(len(self.paths))) and found == list(findings)


def scan_of(
    annotations: Annotations,
    root: str,
    known: Scan | None = None,
    progress: Progress | None = None,
    header: ReadHeader = read_header,
) -> Scan:
    """The scan of a split; what has not changed since `known` is not read again, and `known` itself if nothing has."""
    paths, files = annotations.paths, annotations.files
    stamps = stamps_of(paths, files)
    old = np.full(len(paths), -1) if known is None else known.same(paths, files, stamps)
    if known is not None and known.is_all(old, annotations.findings):
        return known
    seen, fresh = np.flatnonzero(old >= 0), np.flatnonzero(old < 0)
    rows = np.full(len(paths), -1)
    parts = []
    if known is not None and len(seen):
        old_rows = known.rows[old[seen]]
        parts.append(_still_known(known, old_rows[old_rows >= 0], {paths[i] for i in seen.tolist()}))
        rows[seen[old_rows >= 0]] = np.arange(len(parts[0]))
    start = len(parts[0]) if parts else 0
    for numbers, part, readable in _read_all(annotations, fresh, root, progress, header):
        rows[numbers[readable]] = start + np.arange(len(part))
        start += len(part)
        parts.append(part)
    index = Index.joined(parts)
    order = rows[rows >= 0]
    if not np.array_equal(order, np.arange(len(order))):
        index = index.take(order)
        rows[rows >= 0] = np.arange(len(order))
    members = getattr(annotations, "members", None)  # shards have them
    if members is not None:
        index = replace(index, members=members[rows >= 0])
    ids = getattr(annotations, "image_ids", ())  # COCO has them
    categories = getattr(annotations, "category_ids", {})
    index = replace(
        index,
        findings=(*annotations.findings, *index.findings),
        image_ids=tuple(ids[i] for i in np.flatnonzero(rows >= 0).tolist()) if ids else (),
        category_ids=tuple(categories.get(i) for i in range(len(annotations.names))) if categories else (),
    )
    return Scan(paths, files, stamps, rows, index)


def stamps_of(paths: Sequence[str], files: Sequence[str | None]) -> np.ndarray:
    """(N, 4) int64: size and time of change, in nanoseconds, of images and of what annotates them; -1 for neither."""
    same: dict[str, tuple[int, int]] = {}  # one COCO file annotates many images
    several = len(files) > 1 and files[0] == files[-1]

    def stamp(path: str | None) -> tuple[int, int]:
        if path is None:
            return -1, -1
        try:
            found = os.stat(path)
        except OSError:
            return -1, -1
        return found.st_size, found.st_mtime_ns

    def annotated(path: str | None) -> tuple[int, int]:
        if not several or path is None:
            return stamp(path)
        if path not in same:
            same[path] = stamp(path)
        return same[path]

    table = [(*stamp(path), *annotated(file)) for path, file in zip(paths, files, strict=True)]
    return np.array(table, dtype=np.int64).reshape(-1, 4)


def _still_known(known: Scan, rows: np.ndarray, paths: set[str]) -> Index:
    kept = tuple(f for f in known.index.findings if f.kind not in OF_LISTING and f.image in paths)
    return replace(known.index.take(rows), findings=kept)


def _read_all(
    annotations: Annotations, numbers: np.ndarray, root: str, progress: Progress | None, header: ReadHeader
) -> Sequence[tuple[np.ndarray, Index, np.ndarray]]:
    """Chunks of images: their numbers, the index of those that can be read, and a mask that says which these are."""
    chunks = [numbers[start : start + CHUNK] for start in range(0, len(numbers), CHUNK)]
    read, done = [], 0
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        parts = pool.map(lambda chunk: _read(annotations, chunk, root, header), chunks)
        for chunk, (part, readable) in zip(chunks, parts, strict=True):
            read.append((chunk, part, readable))
            done += len(chunk)
            if progress:
                progress(done, len(numbers))
    return read


def _read(annotations: Annotations, numbers: np.ndarray, root: str, header: ReadHeader) -> tuple[Index, np.ndarray]:
    """The index of these images and (N,) bool: which of them are in it."""
    these = numbers.tolist()
    headers = [header(annotations.paths[i]) for i in these]
    labels = annotations.read(these, [size for size, _ in headers])
    findings: list[Finding] = []
    readable = np.array([size is not None for size, _ in headers], dtype=bool)
    for i, (size, reason), one in zip(these, headers, labels, strict=True):
        path = annotations.paths[i]
        if size is None:
            findings.append(Finding("unreadable image", path, reason, path))
        findings += one.findings
    paths = [annotations.paths[i] for i, good in zip(these, readable.tolist(), strict=True) if good]
    sizes = [size for size, _ in headers if size is not None]
    whole = [one for one, (size, _) in zip(labels, headers, strict=True) if size is not None]
    return _packed(paths, sizes, whole, annotations.names, root, tuple(findings)), readable


def _packed(
    paths: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    labels: Sequence[Labels],
    names: tuple[str, ...],
    root: str,
    findings: tuple[Finding, ...],
) -> Index:
    inside = root.rstrip(os.sep) + os.sep
    encoded = [os.fsencode(path.removeprefix(inside)) for path in paths]
    table = np.array(sizes, dtype=np.int32).reshape(-1, 2)
    columns: dict[str, Any] = {}
    for name, field in (
        ("boxes_xywh", "boxes_xywh"),
        ("classes", "classes"),
        ("ignored_boxes", "ignored"),
        ("areas", "areas"),
        ("rows", "rows"),
    ):
        columns[name] = np.concatenate([getattr(one, field) for one in (*labels, NO_LABELS)])
    polygons = [shape for one in labels for shape in (one.polygons or (None,) * len(one.classes))]
    counts = [0 if shape is None else len(shape) for shape in polygons]
    points = [shape for shape in polygons if shape is not None]
    return Index(
        paths=np.frombuffer(b"".join(encoded), dtype=np.uint8),
        path_offsets=np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        heights=table[:, 0].copy(),
        widths=table[:, 1].copy(),
        labelled=np.array([one.found for one in labels], dtype=bool),
        box_offsets=np.cumsum([0, *(len(one.classes) for one in labels)], dtype=np.int64),
        points=np.concatenate([np.zeros((0, 2)), *points]).astype(np.float32),
        point_offsets=np.cumsum([0, *counts], dtype=np.int64),
        names=names,
        root=root,
        findings=findings,
        **columns,
    )
