"""Running a network on images, in inference mode and within the memory there is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from detector.errors import TrainingError
from detector.memory import attempt
from detector.model.network import Network, fused


def for_inference(network: Network) -> Network:
    """A copy with conv + bn fused and laid out for speed; the network itself is not altered."""
    return fused(network).to(memory_format=torch.channels_last)


def infer(
    worker: Network, images: Tensor, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> tuple[Tensor, Tensor]:
    """(B, H, W, 3) uint8 RGB images on the worker's device to (B, A, 4) boxes in their pixels and (B, A, C) scores."""
    # Seen as (B, 3, H, W) they are channels_last already: nothing is copied but by the conversion.
    pixels = images.permute(0, 3, 1, 2).float() / 255
    with autocast():
        predictions = worker(pixels)
    return worker.head.decode(predictions)


def infer_what_fits(
    worker: Network,
    images: Tensor,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    most: int | None,
) -> tuple[list[tuple[Tensor, Tensor]], int | None]:
    """`infer` on host images, at most `most` at a time (None: all), halved as long as memory runs out; and that number.

    Raises TrainingError where memory does not suffice for one image.
    """
    while True:
        parts = images.split(most or len(images))
        found = attempt(lambda parts=parts: [infer(worker, part.to(device), autocast) for part in parts])
        if found is not None:
            return found, most
        if (most := len(parts[0])) == 1:
            raise TrainingError("out of memory with one image at a time; use a smaller imgsz or model")
        most = -(-most // 2)
