"""What the loader hands to training: a sample, and a micro-batch of them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detector.data.image import PADDING


class Sample(NamedTuple):
    """One training image with its boxes."""

    image: np.ndarray  # (H, W, 3) uint8 RGB
    boxes_xyxy: np.ndarray  # (N, 4) float32 pixels of the network input
    classes: np.ndarray  # (N,) int64
    index: int  # of the image in the data set


class Batch(NamedTuple):
    """One micro-batch of B images with N boxes in all."""

    images: Tensor  # (B, H, W, 3) uint8 RGB
    boxes_xyxy: Tensor  # (N, 4) float32 pixels of the network input
    classes: Tensor  # (N,) int64
    image_index: Tensor  # (N,) int64, which of the B images a box belongs to, ascending
    samples: Tensor  # (B,) int64, index of each image in the data set

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        """The batch on a device; only from pinned memory does `non_blocking` overlap with anything."""
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))

    def part(self, start: int, stop: int) -> "Batch":
        """The images from `start` to before `stop`, with their boxes."""
        mine = (self.image_index >= start) & (self.image_index < stop)
        return Batch(
            self.images[start:stop],
            self.boxes_xyxy[mine],
            self.classes[mine],
            self.image_index[mine] - start,
            self.samples[start:stop],
        )

    def network_input(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, 3, H, W) in 0..1, channels last in memory: a view of the images but for the conversion."""
        return self.images.permute(0, 3, 1, 2).to(dtype).div_(255)


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one image size as one."""
    starts = torch.tensor([0, *(len(batch.samples) for batch in batches)]).cumsum(dim=0)
    return Batch(
        images=torch.cat([batch.images for batch in batches]),
        boxes_xyxy=torch.cat([batch.boxes_xyxy for batch in batches]),
        classes=torch.cat([batch.classes for batch in batches]),
        image_index=torch.cat([batch.image_index + start for batch, start in zip(batches, starts, strict=False)]),
        samples=torch.cat([batch.samples for batch in batches]),
    )


def recut_batches(batches: Sequence[Batch], sizes: Sequence[int]) -> list[Batch]:
    """The images of some batches, in their order, as batches of these sizes; of size 0 is what `blank_batch` makes."""
    if not any(sizes):
        return [batches[0]] * len(sizes)
    whole = joined([batch for batch in batches if len(batch.samples)])
    blank = blank_batch(whole.images.shape[1])
    ends = accumulate(sizes)
    return [whole.part(end - size, end) if size else blank for size, end in zip(sizes, ends, strict=True)]


def blank_batch(size: int) -> Batch:
    """A grey image that is none of the data set's: what a device runs that has no image in a micro-batch.

    All ranks of a distributed step must run equally many passes; this one has no samples and counts for nothing.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    grey = torch.full((1, size, size, 3), PADDING, dtype=torch.uint8)
    return Batch(grey, torch.zeros(0, 4), classes=nothing, image_index=nothing, samples=nothing)


def collate(samples: Sequence[Sample]) -> Batch:
    """Stacks samples whose images have one size."""
    counts = torch.tensor([len(sample.classes) for sample in samples])
    return Batch(
        images=torch.from_numpy(np.stack([sample.image for sample in samples])),
        boxes_xyxy=torch.from_numpy(np.concatenate([sample.boxes_xyxy for sample in samples])),
        classes=torch.from_numpy(np.concatenate([sample.classes for sample in samples])),
        image_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        samples=torch.tensor([sample.index for sample in samples]),
    )
