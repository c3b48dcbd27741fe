"""A trained detector for use from Python: images in, boxes out.

OpenCV is imported with the first image: who only loads a network need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detector.errors import ConfigError, DataError
from detector.inference.infer import Limits, NetworkRuntime, Runtime, find_objects, within_memory
from detector.inference.sources import Source, find_images
from detector.model.network import Network

if TYPE_CHECKING:
    from detector.data.image import Letterbox

STRIDE = 32  # image sides are multiples of it, whatever the network


@dataclass(frozen=True)
class Result:
    """The detections in one image, best first."""

    boxes: NDArray[np.float32]  # (N, 4) x1, y1, x2, y2 in the image's own pixels
    scores: NDArray[np.float32]  # (N,)
    classes: NDArray[np.int64]  # (N,)
    names: tuple[str, ...]  # of all classes
    path: Path | None  # None for an array
    image: NDArray[np.uint8]  # (H, W, 3) RGB, or as many channels as the network takes

    def __len__(self) -> int:
        return len(self.boxes)

    def summary(self) -> str:
        """For example '3 dog, 1 cat', or 'nothing'."""
        counts = np.bincount(self.classes, minlength=len(self.names))
        return (
            ", ".join(f"{count} {name}" for name, count in zip(self.names, counts, strict=True) if count) or "nothing"
        )


class _Prepared(NamedTuple):
    path: Path | None
    image: NDArray[np.uint8]
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
    ) -> list[Result]:
        """Detections in images, one Result each, in order.

        sources: a file, folder, glob or text file of paths, an (H, W, 3) uint8 RGB array (or as many channels as the
        network takes), or a list of those. conf is
        the least score, iou the overlap above which the weaker of two boxes of a class is dropped, imgsz the network's
        input side (default: what it was trained at). Raises DataError for a source that is not there or not an image,
        ConfigError for an argument out of range.
        """
        return list(self.stream(sources, conf, iou, imgsz, batch, max_det))

    def stream(
        self,
        sources: Source | Sequence[Source],
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        batch: int = 16,
        max_det: int = 300,
        unreadable: Callable[[DataError], None] | None = None,
    ) -> Iterator[Result]:
        """`predict`, one Result at a time, for more images than fit in memory.

        unreadable: is told of an image that cannot be read, which is then left out.
        """
        check_limits(conf, iou, imgsz, batch, max_det)
        self.runtime.check_side(imgsz or self.imgsz)
        prepared = self._prepared(sources, imgsz or self.imgsz, unreadable)
        return self._results(prepared, Limits(conf, iou, max_det, multi_label=False), batch)

    def _results(self, prepared: Iterator[_Prepared], limits: Limits, batch: int) -> Iterator[Result]:
        most = None
        for _, alike in groupby(prepared, key=lambda one: one.network_image.shape):
            while group := list(islice(alike, batch)):
                results, most = self._predict(group, limits, most)
                yield from results

    def _prepared(
        self,
        sources: Source | Sequence[Source],
        imgsz: int,
        unreadable: Callable[[DataError], None] | None,
    ) -> Iterator[_Prepared]:
        for source in find_images(sources):
            try:
                yield self._prepare(source, imgsz)
            except DataError as error:
                if unreadable is None:
                    raise
                unreadable(error)

    def _prepare(self, source: Path | NDArray[np.uint8], imgsz: int) -> _Prepared:
        from detector.data.image import letterbox, read_image

        channels, value_range = self.runtime.channels, self.runtime.value_range
        is_file = isinstance(source, Path)
        image = read_image(source, channels, value_range=value_range) if is_file else source
        check_image(image, channels)
        network_image, placement = letterbox(image, imgsz, self.runtime.stride)
        return _Prepared(source if is_file else None, image, network_image, placement)

    def _predict(self, group: list[_Prepared], limits: Limits, most: int | None) -> tuple[list[Result], int | None]:
        """The results of images whose network images have one shape; `most` are looked at at once, see
        `within_memory`."""
        images = torch.from_numpy(np.stack([one.network_image for one in group]))
        placements = [one.placement for one in group]
        found, most = within_memory(
            lambda part: find_objects(self.runtime, images[part], placements[part], limits),
            len(group),
            most,
        )
        arrays = ([tensor.numpy() for tensor in one] for one in found)
        return [
            Result(boxes, scores, classes, self.names, one.path, one.image)
            for one, (boxes, scores, classes) in zip(group, arrays, strict=True)
        ], most


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


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_image(image: NDArray[np.uint8], channels: int = 3) -> None:
    """Raise DataError unless an array is an image of so many channels, with what would make it one."""
    if image.ndim == 3 and image.shape[2] == channels and image.dtype == np.uint8 and image.size:
        return
    if not image.size:
        remedy = "; this one has no pixels"
    elif image.ndim == 2 and channels == 3:
        remedy = "; grey becomes RGB by np.stack([image] * 3, axis=2)"
    elif image.ndim == 2 and channels == 1:
        remedy = "; add the channel by image[:, :, None]"
    elif image.ndim == 4:
        remedy = "; give several as a list, list(images)"
    elif image.ndim == 3 and image.shape[0] == channels and image.shape[2] != channels:
        remedy = "; move the channels to the end by image.transpose(1, 2, 0)"
    elif image.ndim == 3 and image.shape[2] == 4 and channels == 3:
        remedy = "; leave out the fourth channel, image[:, :, :3]"
    elif np.issubdtype(image.dtype, np.floating):
        remedy = "; numbers in 0..1 become uint8 by (image * 255).round().astype(np.uint8)"
    else:
        remedy = ""
    form = f"(H, W, {channels}) uint8{' RGB' if channels == 3 else ''}"
    raise DataError(f"an array of shape {image.shape} and type {image.dtype}: images are {form}{remedy}")
