"""A trained detector for use from Python: images in, boxes out.

OpenCV is imported with the first image: who only loads a network need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detector.errors import ConfigError, DataError
from detector.inference.ahead import read_ahead
from detector.inference.infer import Limits, NetworkRuntime, Runtime, find_objects, within_memory
from detector.inference.results import Result
from detector.inference.sliced import Slicing, find_in_tiles, slicing_by
from detector.inference.sources import Frame, Reading, Source, find_sources, read_sources
from detector.inference.tracking import LOW, Tracking, check_tracker, tracked
from detector.model.network import Network
from detector.model.selection import Detections

if TYPE_CHECKING:
    from detector.data.image import Letterbox

__all__ = ["STRIDE", "Detector", "Result", "check_limits"]

STRIDE = 32  # image sides are multiples of it, whatever the network
MOST_BYTES = 2**28  # of images that are held at once, beyond one


class _Prepared(NamedTuple):
    frame: Frame
    network_image: NDArray[np.uint8]
    placement: Letterbox


@dataclass(frozen=True)
class Detector:
    """A network, or an export of one, with its class names and input size, ready to predict; see `detector.load`."""

    runtime: Runtime
    names: tuple[str, ...]
    imgsz: int

    @property
    def network(self) -> Network:
        """The network of a checkpoint. Raises ConfigError for an export, which has none."""
        if not isinstance(self.runtime, NetworkRuntime):
            raise ConfigError("an export has no network; load the checkpoint that it was made of")
        return self.runtime.network

    def predict(
        self,
        sources: Source | Sequence[Source],
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        batch: int = 16,
        max_det: int = 300,
        **reading: object,
    ) -> list[Result]:
        """Detections in images, one Result each, in order.

        sources: files, folders, globs, text files of paths, videos, (H, W, 3) uint8 RGB arrays (or as many channels as
        the network takes), PIL images, (C, H, W) tensors, or a list or generator of those. conf is
        the least score, iou the overlap above which the weaker of two boxes of a class is dropped, imgsz the network's
        input side (default: what it was trained at); `reading` are the keywords of `stream`. Raises DataError for a
        source that is not there or not an image, ConfigError for an argument out of range.

        All results are held, with their images: of a video of many frames, and of cameras, use `stream`.
        """
        return list(self.stream(sources, conf, iou, imgsz, batch, max_det, **reading))

    def stream(
        self,
        sources: Source | Sequence[Source],
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        batch: int = 16,
        max_det: int = 300,
        unreadable: Callable[[DataError], None] | None = None,
        *,
        recursive: bool = False,
        vid_stride: int = 1,
        start: float = 0.0,
        stop: float | None = None,
        order: Literal["rgb", "bgr"] = "rgb",
        tile: int | None = None,
        overlap: float | None = None,
        track: Tracking = None,
    ) -> Iterator[Result]:
        """`predict`, one Result at a time, for more images than fit in memory. Sources are read ahead in a thread.

        unreadable: is told of an image that cannot be read, which is then left out. recursive: folders in folders, too.
        vid_stride, start, stop: of a video every so-manieth frame, from and to a second. order: of the colours of
        arrays and tensors. tile, overlap: images are looked at in squares of `tile` pixels that share this part of
        their side, 0.2 where it is left out. track: 'bytetrack' follows objects through a video, see `tracking`.
        """
        check_limits(conf, iou, imgsz, batch, max_det)
        check_reading(vid_stride, start, stop, order, tile, overlap)
        check_tracker(track)
        self.runtime.check_side(imgsz or self.imgsz)
        channels, value_range = self.runtime.channels, self.runtime.value_range
        reading = Reading(channels, value_range, order, int(vid_stride), start, stop, unreadable)
        frames = read_sources(find_sources(sources, recursive), reading)
        limits = Limits(conf if track is None else min(conf, LOW), iou, max_det, multi_label=False)
        if tile is None:
            results = self._results(frames, imgsz or self.imgsz, limits, batch)
        else:
            slicing = slicing_by(tile, overlap, imgsz or self.imgsz, batch)
            results = self._results_of_tiles(frames, slicing, limits)
        return results if track is None else tracked(results, conf)

    def _results(self, frames: Iterator[Frame], imgsz: int, limits: Limits, batch: int) -> Iterator[Result]:
        prepared = (self._prepare(frame, imgsz) for frame in frames)
        most = None
        for group in _batches(_ahead(prepared, batch), batch):
            found, most = self._find(group, limits, most)
            results = [self._result(one.frame, *found_one) for one, found_one in zip(group, found, strict=True)]
            del group  # what the caller holds of these results is all that is held of them
            while results:
                yield results.pop(0)

    def _results_of_tiles(self, frames: Iterator[Frame], slicing: Slicing, limits: Limits) -> Iterator[Result]:
        most = None
        for frame in _ahead(frames, 2):
            found, most = find_in_tiles(self.runtime, frame.image, slicing, limits, most)
            yield self._result(frame, *found)

    def _prepare(self, frame: Frame, imgsz: int) -> _Prepared:
        from detector.data.image import letterbox

        return _Prepared(frame, *letterbox(frame.image, imgsz, self.runtime.stride))

    def _find(
        self, group: Sequence[_Prepared], limits: Limits, most: int | None
    ) -> tuple[list[Detections], int | None]:
        """What is in images whose network images have one shape; `most` are looked at at once, see `within_memory`."""
        images = torch.from_numpy(np.stack([one.network_image for one in group]))
        placements = [one.placement for one in group]
        return within_memory(
            lambda part: find_objects(self.runtime, images[part], placements[part], limits), len(group), most
        )

    def _result(self, frame: Frame, boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor) -> Result:
        return Result(
            boxes.numpy(),
            scores.numpy(),
            classes.numpy(),
            self.names,
            frame.origin.path,
            frame.image,
            frame.index,
            frame.time,
            origin=frame.origin,
        )


def _ahead(items: Iterator, most: int) -> Iterator:
    """Frames, prepared or not, read ahead in a thread; of a camera or a stream the newest."""

    def frame(item: Frame | _Prepared) -> Frame:
        return item if isinstance(item, Frame) else item.frame

    return read_ahead(
        items,
        max(2, most),
        newest=lambda item: frame(item).origin.kind == "live",
        size=lambda item: frame(item).image.nbytes,
        most_size=MOST_BYTES,
    )


def _batches(prepared: Iterator[_Prepared], most: int) -> Iterator[list[_Prepared]]:
    """Consecutive images of one shape, at most `most` and those of MOST_BYTES; of a camera or a stream single ones."""
    group: list[_Prepared] = []
    held = 0
    for one in prepared:
        if group and one.network_image.shape != group[0].network_image.shape:
            yield group
            group, held = [], 0
        group.append(one)
        held += one.frame.image.nbytes
        if len(group) >= most or held >= MOST_BYTES or one.frame.origin.kind == "live":
            yield group
            group, held = [], 0
        del one
    if group:
        yield group


def check_limits(conf: float, iou: float, imgsz: int | None, batch: int, max_det: int) -> None:
    """Raise ConfigError for an argument out of the range that the settings of `detector predict` have."""
    for name, value in (("conf", conf), ("iou", iou)):
        if not _is(value, Real) or not 0 <= value <= 1:
            raise ConfigError(f"{name}={value!r}: should be a number in 0..1")
    for name, value in (("batch", batch), ("max_det", max_det)):
        if not _is(value, Integral) or value < 1:
            raise ConfigError(f"{name}={value!r}: should be a whole number from 1")
    if imgsz is not None and (not _is(imgsz, Integral) or imgsz < STRIDE or imgsz % STRIDE):
        raise ConfigError(f"imgsz={imgsz!r}: should be a multiple of {STRIDE}, for example 640; left out: as trained")


def check_reading(
    vid_stride: int, start: float, stop: float | None, order: str, tile: int | None, overlap: float | None
) -> None:
    """The same of the arguments that say how sources are read."""
    if not _is(vid_stride, Integral) or vid_stride < 1:
        raise ConfigError(f"vid_stride={vid_stride!r}: should be a whole number from 1: every so-manieth frame")
    if not _is(start, Real) or not 0 <= start < float("inf"):
        raise ConfigError(f"start={start!r}: should be a number of seconds from 0")
    if stop is not None and (not _is(stop, Real) or not start < stop < float("inf")):
        raise ConfigError(f"stop={stop!r}: should be a number of seconds after start={start}; left out: to the end")
    if order not in ("rgb", "bgr"):
        raise ConfigError(f"order={order!r}: should be 'rgb' or 'bgr', the order of the colours of arrays")
    if tile is not None and (not _is(tile, Integral) or tile < STRIDE):
        raise ConfigError(f"tile={tile!r}: should be a whole number of pixels from {STRIDE}, for example 640")
    if overlap is None:
        return
    if tile is None:
        raise ConfigError(f"overlap={overlap!r}: is shared by tiles, of which there are none; say tile=640, too")
    if not _is(overlap, Real) or not 0 <= overlap <= 0.9:
        raise ConfigError(f"overlap={overlap!r}: should be a number in 0..0.9, the part of its side that tiles share")


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
