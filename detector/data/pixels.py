"""What the pixels of each image of a split show: whether all are there, and by what two images are the same."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import cv2
import numpy as np

from detector.data.header import header_of
from detector.data.image import resized
from detector.data.index import Index
from detector.data.scan import Progress
from detector.errors import DataError

SIDE = 16  # of the grid that an image is compared by: SIDE x SIDE bits
BITS = SIDE * SIDE
CHUNK = 16  # images that a thread takes at once
THREADS = 8  # each holds one decoded image


@dataclass(frozen=True, eq=False)
class Pixels:
    """Of the n images of an index."""

    digests: tuple[bytes, ...]  # of the files' content; empty where it cannot be read
    hashes: np.ndarray  # (n, BITS / 8) uint8: the bits of `difference_hash`, 0 of a damaged image
    orientations: np.ndarray  # (n,) uint8, 1..8 as EXIF has it
    damage: dict[int, str]  # by image: why it cannot be decoded


class _Seen(NamedTuple):
    digest: bytes = b""
    bits: np.ndarray = np.zeros(BITS, dtype=bool)
    orientation: int = 1
    damage: str = ""


def look_at(index: Index, progress: Progress | None = None) -> Pixels:
    """Decode all images of an index, some in each thread; what is kept of an image are about 200 bytes."""
    count = len(index)
    digests: list[bytes] = []
    hashes = np.zeros((count, BITS // 8), dtype=np.uint8)
    orientations = np.ones(count, dtype=np.uint8)
    damage: dict[int, str] = {}
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:  # decoders let go of Python's lock
        chunks = range(0, count, CHUNK)
        for start, chunk in zip(chunks, pool.map(lambda first: list(_chunk(index, first)), chunks), strict=True):
            for i, seen in enumerate(chunk, start=start):
                digests.append(seen.digest)
                hashes[i], orientations[i] = np.packbits(seen.bits), seen.orientation
                if seen.damage:
                    damage[i] = seen.damage
            if progress:
                progress(len(digests), count)
    return Pixels(tuple(digests), hashes, orientations, damage)


def _chunk(index: Index, start: int) -> Iterator[_Seen]:
    return (_look(index, i) for i in range(start, min(start + CHUNK, len(index))))


def _look(index: Index, i: int) -> _Seen:
    try:
        content = index.content(i)
        digest = blake2b(content, digest_size=16).digest()
        bits = difference_hash(decoded(index, i))
    except DataError as error:
        return _Seen(damage=str(error).removeprefix(f"{index.place(i)}: "))
    except MemoryError:
        return _Seen(damage="there is not enough memory to decode it")
    return _Seen(digest, bits, header_of(io.BytesIO(content)).orientation)


def decoded(index: Index, i: int) -> np.ndarray:
    """(H, W, C) uint8 of image i, as training has it. DataError where it cannot be had."""
    return index.image(i)


def difference_hash(image: np.ndarray) -> np.ndarray:
    """(BITS,) bool: on a grid over the image, where it is brighter than to the left.

    Two sizes, qualities or formats of a picture differ in a few bits, two pictures in about half of them.
    """
    grid = resized(image, SIDE, SIDE + 1, cv2.INTER_AREA).astype(np.int32).sum(axis=2)
    return (grid[:, 1:] > grid[:, :-1]).reshape(-1)
