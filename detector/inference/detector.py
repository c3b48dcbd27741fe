"""A trained detector for use from Python: images in, boxes out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detector.data.image import Letterbox, letterbox, read_rgb
from detector.errors import DataError
from detector.inference.infer import Limits, find_objects, for_inference, within_memory
from detector.inference.sources import Source, find_images
from detector.model.network import Network


@dataclass(frozen=True)
class Result:
    """The detections in one image, best first."""

    boxes: NDArray[np.float32]  # (N, 4) x1, y1, x2, y2 in the image's own pixels
    scores: NDArray[np.float32]  # (N,)
    classes: NDArray[np.int64]  # (N,)
    names: tuple[str, ...]  # of all classes
    path: Path | None  # None for an array
    image: NDArray[np.uint8]  # (H, W, 3) RGB

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
    """A network with its class names and input size, ready to predict; `detector.load` makes one."""

    network: Network
    names: tuple[str, ...]
    imgsz: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager[None]]

    @cached_property
    def inference(self) -> Network:
        """The copy of the network that does the work; made once."""
        return for_inference(self.network)

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

        sources: a file, folder, glob or text file of paths, an (H, W, 3) uint8 RGB array, or a list of those. conf is
        the least score, iou the overlap above which the weaker of two boxes of a class is dropped, imgsz the network's
        input side (default: what it was trained at). Raises DataError for a source that is not there or not an image.
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
        limits, most = Limits(conf, iou, max_det, multi_label=False), None
        prepared = self._prepared(sources, imgsz or self.imgsz, unreadable)
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
        image = read_rgb(source) if isinstance(source, Path) else source
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise DataError(f"an array of shape {image.shape} and type {image.dtype}: images are (H, W, 3) uint8 RGB")
        network_image, placement = letterbox(image, imgsz)
        return _Prepared(source if isinstance(source, Path) else None, image, network_image, placement)

    def _predict(self, group: list[_Prepared], limits: Limits, most: int | None) -> tuple[list[Result], int | None]:
        """The results of images whose network images have one shape; `most` are looked at at once, see
        `within_memory`."""
        images = torch.from_numpy(np.stack([one.network_image for one in group]))
        placements = [one.placement for one in group]
        found, most = within_memory(
            lambda part: find_objects(self.inference, images[part], placements[part], self.autocast, limits),
            len(group),
            most,
        )
        arrays = ([tensor.numpy() for tensor in one] for one in found)
        return [
            Result(boxes, scores, classes, self.names, one.path, one.image)
            for one, (boxes, scores, classes) in zip(group, arrays, strict=True)
        ], most
