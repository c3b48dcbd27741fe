"""What sources are read into: single images that know where they come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detector.errors import DataError

if TYPE_CHECKING:
    from detector.data.header import Range


@dataclass(frozen=True, eq=False)
class Origin:
    """Where images come from that belong together: those of one origin are one object's."""

    name: str  # what messages call it
    kind: Literal["image", "pages", "video", "live"]
    path: Path | None = None  # of a file
    rate: float | None = None  # images a second, of a video
    count: int | None = None  # images that there are, where that is known; of a video about so many
    title: str | None = None  # what files of results are called; None: as the file

    @property
    def moves(self) -> bool:
        """Whether its images follow each other in time."""
        return self.kind in ("video", "live")


class Frame(NamedTuple):
    """An image to look at."""

    image: NDArray[np.uint8]  # (H, W, C), RGB
    origin: Origin
    index: int | None = None  # its number in a video or a file of pages, from 0
    time: float | None = None  # seconds since the first image of a video, or since a stream began


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    channels: int = 3  # of the images that are wanted
    value_range: Range | None = None  # what becomes 0 and 255 of more than 8 bits; None: what such a file can hold
    order: Literal["rgb", "bgr"] = "rgb"  # of the colours of arrays and tensors
    vid_stride: int = 1  # of a video or stream every so-manieth image
    start: float = 0.0  # seconds of a video that are passed over
    stop: float | None = None  # the second at which a video or stream is left
    left_out: Callable[[DataError], None] | None = None  # is told of what cannot be read, which else is an error


def tell(reading: Reading, error: DataError) -> None:
    """Say what is left out of a video, which is read all the same, also where images that cannot be read are errors."""
    if reading.left_out is None:
        warnings.warn(str(error), stacklevel=2)
    else:
        reading.left_out(error)
