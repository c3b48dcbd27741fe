"""Images that are there twice: the same file, or nearly the same picture, in one split or in two."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from detector.data.findings import Finding
from detector.data.index import Index
from detector.data.pixels import BITS, Pixels

DIFFERENT = 0.2  # share of the bits in question above which two pictures are two
LEAST_BITS = 32  # in question, for pictures to be compared by them: on a plain ground there are too few
BLOCK = 2048
SAME_PLACE = 0.01  # how far a side of the same box may lie from itself, as a fraction of the image


class Image(NamedTuple):
    """One image of a data set."""

    split: str
    number: int  # in the split's index


def duplicates(indices: Mapping[str, Index], pixels: Mapping[str, Pixels]) -> list[tuple[str, Finding]]:
    """(split, finding) for each image that an earlier one, of this or an earlier split, is the same as, or nearly."""
    images = [Image(split, i) for split, index in indices.items() for i in range(len(index))]
    digests = [digest for one in pixels.values() for digest in one.digests]
    hashes = np.concatenate([one.hashes for one in pixels.values()])
    owner = np.repeat(np.arange(len(indices)), [len(index) for index in indices.values()])

    found: list[tuple[str, Finding]] = []
    first: dict[bytes, int] = {}
    single: list[int] = []
    for i, digest in enumerate(digests):
        if not digest:
            continue
        if first.setdefault(digest, i) == i:
            single.append(i)
        else:
            found += _told(indices, images[first[digest]], images[i])
    kept = np.array(single, dtype=np.int64)
    for i, other in nearest(hashes[kept], owner[kept]).items():
        found += _told(indices, images[single[other]], images[single[i]], same=False)
    return found


def _told(indices: Mapping[str, Index], first: Image, second: Image, same: bool = True) -> list[tuple[str, Finding]]:
    """What there is to say of two images that are the same, or nearly."""
    path, other = (indices[one.split].place(one.number) for one in (second, first))
    leaked = first.split != second.split
    where = f"{first.split}: {other}" if leaked else other
    kind = ("leaked image" if leaked else "same image") if same else ("leaked scene" if leaked else "same scene")
    text = f"is the same file as {where}" if same else f"looks like {where}"
    found = [(second.split, Finding(kind, path, text, path))]
    if same and not _same_boxes(indices[first.split], first.number, indices[second.split], second.number):
        found.append((second.split, Finding("contradiction", path, f"has other boxes than {where}", path)))
    return found


def _same_boxes(one: Index, i: int, other: Index, j: int) -> bool:
    """Whether two images have the same boxes, in whatever order."""
    tables = []
    for index, number in ((one, i), (other, j)):
        height, width = index.size(number)
        boxes = index.boxes_xyxy(number) / (width, height, width, height)
        tables.append((index.labels(number), boxes))
    (labels, boxes), (others, other_boxes) = tables
    if len(labels) != len(others):
        return False
    apart = np.abs(boxes[:, None] - other_boxes[None]).max(axis=2, initial=0)
    alike = (apart <= SAME_PLACE) & (labels[:, None] == others[None])
    return bool(alike.any(axis=0).all() and alike.any(axis=1).all())


def nearest(hashes: np.ndarray, owner: Sequence[int] | np.ndarray) -> dict[int, int]:
    """For each of N images that shows nearly what an earlier one does, which: of another split, if there is one such.

    hashes (N, BITS / 8) uint8; owner (N,) the split of each, rising. Of two hashes the bits in question are those that
    are set in either, or those that are not, whichever are fewer.
    """
    found: dict[int, int] = {}
    count = len(hashes)
    owner = np.asarray(owner)
    for row in range(0, count, BLOCK):
        rows = np.unpackbits(hashes[row : row + BLOCK], axis=1).astype(np.float32)
        best = np.full((2, len(rows)), np.inf)  # the least share of bits: among other splits, and in the image's own
        where = np.full((2, len(rows)), -1)
        for column in range(0, row + 1, BLOCK):
            columns = np.unpackbits(hashes[column : column + BLOCK], axis=1).astype(np.float32)
            share = _shares(rows, columns)
            numbers = np.arange(row, row + len(rows))[:, None], np.arange(column, column + len(columns))[None]
            share[numbers[1] >= numbers[0]] = np.inf
            foreign = owner[numbers[1]] != owner[numbers[0]]
            for side, candidates in enumerate((foreign, ~foreign)):
                these = np.where(candidates, share, np.inf)
                nearest_of = these.argmin(axis=1)
                value = these[np.arange(len(rows)), nearest_of]
                nearer = value < best[side]
                best[side][nearer], where[side][nearer] = value[nearer], column + nearest_of[nearer]
        for side in (1, 0):
            near = np.flatnonzero(best[side] <= DIFFERENT)
            found |= dict(zip((row + near).tolist(), where[side][near].tolist(), strict=True))
    return dict(sorted(found.items()))


def _shares(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(R, C) the share of the bits in question in which hashes differ; infinite where too few are in question."""
    both = rows @ columns.T  # bits set in both
    either = rows.sum(axis=1)[:, None] + columns.sum(axis=1)[None] - both
    question = np.minimum(either, BITS - both)
    return np.where(question >= LEAST_BITS, (either - both) / np.maximum(question, 1), np.inf)
