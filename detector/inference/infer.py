"""Running a network on images and selecting detections, in inference mode and within the memory there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from detector.errors import ConfigError
from detector.inference.postprocess import to_original
from detector.memory import attempt
from detector.model.network import Network, fused
from detector.model.selection import Detections

if TYPE_CHECKING:
    from detector.data.image import Letterbox

Found = TypeVar("Found")
Autocast = Callable[[], AbstractContextManager[None]]


class Limits(NamedTuple):
    """Which of a network's boxes are detections."""

    conf: float  # the least score
    iou: float  # of two boxes of a class that overlap more, the weaker is dropped
    max_det: int  # the most detections of an image
    multi_label: bool = True  # whether an anchor may be of several classes


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


@torch.inference_mode()
def find_objects(
    worker: Network, images: Tensor, placements: Sequence[Letterbox], autocast: Autocast, limits: Limits
) -> list[Detections]:
    """The detections in (B, H, W, 3) uint8 images on the host, on the CPU and in pixels of the original images."""
    boxes_xyxy, scores = infer(worker, images.to(next(worker.parameters()).device), autocast)
    selected = worker.head.select(boxes_xyxy, scores, *limits)
    return [to_original(one, place).cpu() for one, place in zip(selected, placements, strict=True)]


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
