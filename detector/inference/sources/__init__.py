"""From what a user names to single images: files, folders, videos, cameras, streams, arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from detector.errors import DataError
from detector.inference.sources.arrays import image_of_array, image_of_pillow, images_of_tensor
from detector.inference.sources.find import Camera, Encoded, Item, Source, Stream, find_sources, is_pillow
from detector.inference.sources.frame import Frame, Origin, Reading
from detector.inference.sources.live import read_live
from detector.inference.sources.sequence import ImageSequence, read_sequence
from detector.inference.sources.video import BEGINNING, is_video, read_video

__all__ = ["Frame", "Origin", "Reading", "Source", "find_sources", "read_sources"]


def read_sources(items: Iterable[Item], reading: Reading) -> Iterator[Frame]:
    """The images of what `find_sources` gives, one by one, in order.

    What cannot be read is told to `reading.left_out` and left out; without that it is raised, as DataError.
    """
    for item in items:
        try:
            yield from _read(item, reading)
        except DataError as error:
            if reading.left_out is None:
                raise
            reading.left_out(error)


def _read(item: Item, reading: Reading) -> Iterator[Frame]:
    if isinstance(item, Path):
        return _of_file(item, reading)
    if isinstance(item, ImageSequence):
        return read_sequence(item, reading)
    if isinstance(item, Encoded):
        return _of_content(item.content, Origin(item.name, "image"), reading)
    if isinstance(item, Camera | Stream):
        return read_live(item, reading)
    origin = Origin("an array", "image")
    if isinstance(item, torch.Tensor):
        return (Frame(image, origin) for image in images_of_tensor(item, reading))
    if is_pillow(item):
        named = getattr(item, "filename", "") or "a PIL image"
        return iter((Frame(image_of_pillow(item, reading), Origin(str(named), "image")),))
    assert isinstance(item, np.ndarray)
    return iter((Frame(image_of_array(item, reading), origin),))


def _of_file(path: Path, reading: Reading) -> Iterator[Frame]:
    """What is in a file; that of an image is opened once, also to see that it is no video."""
    try:
        with path.open("rb") as file:
            beginning = file.read(BEGINNING)
            content = None if is_video(path, beginning) else beginning + file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); put the file back") from None
    if content is None:
        return read_video(path, reading)
    return _of_content(content, Origin(str(path), "image", path), reading)


def _of_content(content: bytes, origin: Origin, reading: Reading) -> Iterator[Frame]:
    """The image of a file's content, or each page of a TIFF that has several and whose pages are not its channels."""
    from detector.data.image import decode, decode_pages
    from detector.data.tiff import STARTS

    if not (content.startswith(STARTS) and reading.channels in (1, 3)):
        yield Frame(decode(content, origin.name, reading.channels, None, reading.value_range), origin)
        return
    images = decode_pages(content, origin.name, reading.channels, reading.value_range)
    pages = Origin(origin.name, "pages", origin.path)
    first = next(images)
    try:
        second = next(images, None)
    except DataError:  # a damaged page takes nothing from those before it
        yield Frame(first, pages, 0)
        raise
    if second is None:
        yield Frame(first, origin)
        return
    yield from (Frame(image, pages, index) for index, image in enumerate(chain([first, second], images)))
