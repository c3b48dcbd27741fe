"""What there is to look at: from what a user names to single files, cameras, streams and arrays."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from detector.errors import DataError
from detector.files import IMAGES, images_among
from detector.inference.sources.sequence import ImageSequence, find_sequence, is_pattern
from detector.inference.sources.video import VIDEOS

Source = Any  # a path, a glob, an address, a camera's number, an array, an image, a tensor, or many of these


@dataclass(frozen=True)
class Camera:
    """A camera of this machine."""

    number: int


@dataclass(frozen=True)
class Stream:
    """A video that comes over the network, because the user named its address."""

    address: str


@dataclass(frozen=True)
class Encoded:
    """The content of an image file that is none."""

    content: bytes
    name: str


Item = (
    Path | ImageSequence | Camera | Stream | Encoded | NDArray[np.uint8] | torch.Tensor | Any
)  # the last: an image of PIL

STREAMS = ("rtsp", "rtsps", "rtmp", "rtp", "udp", "tcp", "srt", "http", "https")
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
STDIN = "-"


def find_sources(sources: Source, recursive: bool = False) -> Iterator[Item]:
    """The single things to look at, in order: image and video files, cameras, streams, arrays, tensors, PIL images.

    No file is opened but lists, so that a folder of 100,000 images is begun at once.

    A folder gives its images and videos by name, with `recursive` those of its folders, too; a text file and stdin
    (`-`) the paths in them, a glob what it matches, img%04d.png the frames of one video, and a list or generator what
    each of its parts gives. Raises DataError for what is no source, and where nothing is found.
    """
    if isinstance(sources, str | Path):
        yield from _named(str(sources), recursive)
    elif isinstance(sources, Integral) and not isinstance(sources, bool):
        yield Camera(int(sources))
    elif isinstance(sources, np.ndarray | torch.Tensor | ImageSequence | Camera | Stream | Encoded) or is_pillow(
        sources
    ):
        yield sources
    elif _holds_sources(sources):
        for source in sources:
            yield from find_sources(source, recursive)
    else:
        raise DataError(
            f"a {type(sources).__name__} is no source: give a path, a glob, an (H, W, 3) uint8 RGB array of numpy "
            "(np.asarray(image)), a PIL image, a (C, H, W) tensor, or a list or generator of those"
        )


def is_pillow(value: object) -> bool:
    """Whether it is an image of PIL, which is not imported to find out."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _holds_sources(value: object) -> bool:
    """Whether its parts are sources: not a tensor of some library, whose rows are no images, nor an open file."""
    if isinstance(value, bytes | bytearray | memoryview | Mapping) or hasattr(value, "shape") or hasattr(value, "read"):
        return False
    return isinstance(value, Iterable)


def _named(name: str, recursive: bool) -> Iterator[Item]:
    """What a text names."""
    path = Path(name)
    if path.is_dir():
        yield from _in_folder(path, recursive)
    elif path.exists():
        yield from _in_list(path.read_text(encoding="utf-8-sig"), path.parent, recursive) if _is_list(path) else [path]
    elif name == STDIN:
        yield from _from_stdin(sys.stdin.buffer.read(), recursive)
    elif name.isdecimal():
        yield Camera(int(name))
    elif match := ADDRESS.match(name):
        yield _address(name, match[1].lower())
    elif is_pattern(name):
        yield find_sequence(name)
    else:
        yield from _matched(name)


def _is_list(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def _in_folder(folder: Path, recursive: bool) -> list[Path]:
    """Its images and videos by name, hidden ones left out; those in its folders after those beside them."""
    found: list[Path] = []
    below = False
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        videos = [one for one in names if one.lower().endswith(VIDEOS) and not one.startswith(".")]
        found += sorted(Path(place) / one for one in [*images_among(names), *videos])
        below = bool(folders)
        if not recursive:
            break
    if not found:
        hint = "recursive=true looks into its folders, too" if below and not recursive else "name another"
        raise DataError(f"{folder}: no image there, nor a video; {hint}")
    return found


def _in_list(text: str, folder: Path, recursive: bool) -> Iterator[Item]:
    """What the lines of a text name, relative to a folder."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise DataError(f"{folder}: a list without a path in it; write one path a line")
    for line in lines:
        if ADDRESS.match(line) or line.isdecimal():
            yield from _named(line, recursive)
            continue
        path = folder / line
        if path.is_dir() or glob.has_magic(line) or is_pattern(line):
            yield from _named(str(path), recursive)
        else:
            yield path  # one that is not there is told with its name when it is read


def _from_stdin(content: bytes, recursive: bool) -> Iterator[Item]:
    """One encoded image, or a list of paths, one a line, relative to the working directory."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text and content:
        yield Encoded(content, "stdin")
    elif text.strip():
        yield from _in_list(text, Path(), recursive)
    else:
        raise DataError("-: nothing came from stdin; pipe an image into it, or paths, one a line")


def _address(address: str, scheme: str) -> Stream:
    if scheme not in STREAMS:
        raise DataError(f"{address}: '{scheme}' is not read; {', '.join(STREAMS)} are, as streams of video")
    ending = Path(address.partition("?")[0]).suffix.lower()
    if scheme in ("http", "https") and ending in IMAGES:
        raise DataError(
            f"{address}: an image is not fetched from the network; save it (curl -O {address}) and name the file"
        )
    return Stream(address)


def _matched(pattern: str) -> list[Path]:
    found = sorted(path for name in glob.glob(pattern, recursive=True) if not (path := Path(name)).is_dir())
    if not found:
        raise DataError(f"{pattern}: no image there; name an image, a video, a folder or a glob in quotes")
    return found
