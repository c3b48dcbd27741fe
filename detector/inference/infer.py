"""Finding objects in images by a network, or by an export of one, within the memory there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from detector.errors import ConfigError
from detector.inference.postprocess import to_original
from detector.memory import attempt
from detector.model.network import Network, check_side, fused
from detector.model.selection import Detections

if TYPE_CHECKING:
    from detector.data.header import Range
    from detector.data.image import Letterbox

Found = TypeVar("Found")
Autocast = Callable[[], AbstractContextManager[None]]


class Limits(NamedTuple):
    """Which of a network's boxes are detections."""

    conf: float  # the least score
    iou: float  # of two boxes of a class that overlap more, the weaker is dropped
    max_det: int  # the most detections of an image
    multi_label: bool = True  # whether an anchor may be of several classes


JUDGED = Limits(conf=0.001, iou=0.7, max_det=300)  # in validation: nearly all, as the COCO protocol sorts them itself


class Runtime(Protocol):
    """What finds objects in images that are letterboxed already: a network here, or an export elsewhere."""

    @property
    def stride(self) -> int:
        """Sides of images are multiples of it."""

    @property
    def channels(self) -> int:
        """Of an image."""

    @property
    def value_range(self) -> Range | None:
        """What became 0 and 255 in files of more than 8 bits; None: what such a file can hold."""

    def check_side(self, imgsz: int) -> None:
        """Raise ConfigError unless a square of that side can be looked at."""

    def find(self, images: Tensor, limits: Limits) -> list[Detections]:
        """The detections in each of (B, H, W, C) uint8 images on the host: on the host, in pixels of those images.

        It may run out of memory, as `memory.attempt` knows it.
        """


@dataclass(frozen=True)
class NetworkRuntime:
    """A network as a `Runtime`: a copy of it does the work on a device. The network itself is not altered."""

    network: Network
    device: torch.device | str
    autocast: Autocast = nullcontext

    @property
    def stride(self) -> int:
        return self.network.stride

    @property
    def channels(self) -> int:
        return self.network.channels

    @property
    def value_range(self) -> Range | None:
        return self.network.value_range

    def check_side(self, imgsz: int) -> None:
        check_side(self.network, imgsz)

    @cached_property
    def worker(self) -> Network:
        """The copy of the network that does the work; made once."""
        return for_inference(self.network).to(self.device)

    @torch.inference_mode()
    def find(self, images: Tensor, limits: Limits) -> list[Detections]:
        boxes_xyxy, scores = infer(self.worker, images.to(self.device), self.autocast)
        return [one.cpu() for one in self.worker.head.select(boxes_xyxy, scores, *limits)]


def for_inference(network: Network) -> Network:
    """A copy with conv + bn fused and laid out for speed; the network itself is not altered."""
    return fused(network).to(memory_format=torch.channels_last)


def infer(worker: Network, images: Tensor, autocast: Autocast = nullcontext) -> tuple[Tensor, Tensor]:
    """(B, H, W, 3) uint8 RGB images on the worker's device to (B, A, 4) boxes in their pixels and (B, A, C) scores."""
    # Seen as (B, 3, H, W) they are channels_last already: nothing is copied but by the conversion.
    pixels = images.permute(0, 3, 1, 2).float() / 255
    with autocast():
        predictions = worker(pixels)
    return worker.head.decode(predictions)


def find_objects(runtime: Runtime, images: Tensor, placements: Sequence[Letterbox], limits: Limits) -> list[Detections]:
    """The detections in (B, H, W, C) uint8 images on the host, on the CPU and in pixels of the original images."""
    found = runtime.find(images, limits)
    return [to_original(one, place) for one, place in zip(found, placements, strict=True)]


def within_memory(
    work: Callable[[slice], list[Found]], count: int, most: int | None = None
) -> tuple[list[Found], int | None]:
    """What `work` gives for slices of `count` things, all at once or at most `most` at a time.

    `most` is halved as long as memory runs out, and returned. Raises ConfigError where it does not suffice for one.
    """
    while True:
        size = min(most or count, count)
        parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        found = attempt(lambda parts=parts: [one for part in parts for one in work(part)])
        if found is not None:
            return found, most
        if size == 1:
            raise ConfigError("out of memory with one image at a time; use a smaller imgsz or model, or another device")
        most = -(-size // 2)
