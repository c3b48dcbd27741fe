"""What the loader hands to training: a sample, and a micro-batch of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from detector.data.colours import Colours, recoloured
from detector.data.image import PADDING


class Sample(NamedTuple):
    """One training image with its boxes."""

    image: np.ndarray  # (H, W, C) uint8
    boxes_xyxy: np.ndarray  # (N, 4) float32 pixels of the network input
    classes: np.ndarray  # (N,) int64
    index: int  # its slot in the epoch
    good: bool = True  # False: the image is damaged, the sample is grey without boxes and counts for nothing
    colours: Colours | None = None  # a change that is still to be made


class Batch(NamedTuple):
    """One micro-batch of B images with N boxes in all.

    Images that are damaged have no row in it and count for nothing; `bad` says which they were.
    """

    images: Tensor  # (B, H, W, C) uint8
    boxes_xyxy: Tensor  # (N, 4) float32 pixels of the network input
    classes: Tensor  # (N,) int64
    image_index: Tensor  # (N,) int64, which of the B images a box belongs to, ascending
    samples: Tensor  # (B,) int64, the slot of each image in its epoch; empty in a blank batch
    bad: Tensor  # (K,) int64, slots of the images that should have been in it but are damaged
    colours: Tensor = torch.zeros(0, 3)  # (B, 3) float32 `Colours` still to be given to the images; (0, 3): none
    on_host: Tensor = torch.zeros(0, 4)  # of a batch on another device: its boxes_xyxy in the host's memory

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        """The batch on a device; only from pinned memory does `non_blocking` overlap with anything."""
        moved = (tensor.to(device, non_blocking=non_blocking) for tensor in self[:-1])
        return Batch(*moved, on_host=self.host_boxes_xyxy)

    @property
    def host_boxes_xyxy(self) -> Tensor:
        """(N, 4) `boxes_xyxy` in the host's memory: what follows from them is known there without waiting."""
        return self.boxes_xyxy if self.boxes_xyxy.device.type == "cpu" else self.on_host

    def part(self, start: int, stop: int) -> "Batch":
        """The images from `start` to before `stop`, with their boxes; `bad` stays that of the whole."""
        mine = (self.image_index >= start) & (self.image_index < stop)
        return Batch(
            self.images[start:stop],
            self.boxes_xyxy[mine],
            self.classes[mine],
            self.image_index[mine] - start,
            self.samples[start:stop],
            self.bad,
            self.colours[start:stop],
        )

    def without_images(self) -> "Batch":
        """The same with images of no channel and no colours: what a loss needs, and what cuts it."""
        return self._replace(images=self.images[..., :0].clone(), colours=self.colours[:0])

    def resized(self, side: int) -> "Batch":
        """The same with images of side x side, bilinear. Each image is resized alone, so any cut gives the same."""
        before = self.images.shape[1]
        if side == before:
            return self
        if self.images.shape[3]:
            pixels = interpolate(self.images.permute(0, 3, 1, 2).float(), (side, side), mode="bilinear")
            images = pixels.round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        else:  # see `without_images`
            images = self.images.new_empty(len(self.images), side, side, 0)
        boxes, on_host = (one * (side / before) for one in (self.boxes_xyxy, self.on_host))
        return self._replace(images=images, boxes_xyxy=boxes, on_host=on_host)

    def pictures(self) -> Tensor:
        """(B, H, W, C) uint8: the images as they are learned from."""
        if not len(self.colours):
            return self.images
        return self.network_input().mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1)

    def network_input(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, C, H, W) in 0..1, channels last in memory: a view of the images but for the conversion and colours."""
        pixels = self.images.permute(0, 3, 1, 2).to(dtype).div_(255)
        return recoloured(pixels, self.colours) if len(self.colours) else pixels


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one image size as one."""
    starts = torch.tensor([0, *(len(batch.samples) for batch in batches)]).cumsum(dim=0)
    return Batch(
        images=torch.cat([batch.images for batch in batches]),
        boxes_xyxy=torch.cat([batch.boxes_xyxy for batch in batches]),
        classes=torch.cat([batch.classes for batch in batches]),
        image_index=torch.cat([batch.image_index + start for batch, start in zip(batches, starts, strict=False)]),
        samples=torch.cat([batch.samples for batch in batches]),
        bad=torch.cat([batch.bad for batch in batches]),
        colours=torch.cat([batch.colours for batch in batches]),
    )


def recut_batches(batches: Sequence[Batch], micro_batches: Sequence[Sequence[int]]) -> list[Batch]:
    """The images of some batches, in their order, as the micro-batches with these samples.

    As at first, the damaged among them have no row, and one of which nothing is left is blank.
    """
    blank = blank_batch(*batches[0].images.shape[2:])
    full = [batch for batch in batches if len(batch.samples)]
    whole = joined(full) if full else blank
    bad = {index for batch in batches for index in batch.bad.tolist()}
    cut, start = [], 0
    for micro in micro_batches:
        left_out = [sample for sample in micro if sample in bad]
        stop = start + len(micro) - len(left_out)
        batch = whole.part(start, stop) if stop > start else blank
        cut.append(batch._replace(bad=torch.tensor(left_out, dtype=torch.int64)))
        start = stop
    return cut


def blank_batch(size: int, channels: int = 3, bad: Sequence[int] = ()) -> Batch:
    """A grey image that is none of the data set's: what a device runs that has no image in a micro-batch.

    All ranks of a distributed step must run equally many passes; this one has no samples and counts for nothing.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    grey = torch.full((1, size, size, channels), PADDING, dtype=torch.uint8)
    return Batch(
        images=grey,
        boxes_xyxy=torch.zeros(0, 4),
        classes=nothing,
        image_index=nothing,
        samples=nothing,
        bad=torch.tensor(bad, dtype=torch.int64),
    )


def collate(samples: Sequence[Sample], images: np.ndarray | None = None) -> Batch:
    """The good ones of samples whose images have one size, stacked; blank where none is good.

    `images`: (B, H, W, C) those of the good ones, where they lie together already.
    """
    bad = [sample.index for sample in samples if not sample.good]
    good = [sample for sample in samples if sample.good]
    if not good:
        return blank_batch(*samples[0].image.shape[1:], bad)
    counts = torch.tensor([len(sample.classes) for sample in good])
    return Batch(
        images=torch.from_numpy(np.stack([sample.image for sample in good]) if images is None else images),
        boxes_xyxy=torch.from_numpy(np.concatenate([sample.boxes_xyxy for sample in good])),
        classes=torch.from_numpy(np.concatenate([sample.classes for sample in good])),
        image_index=torch.repeat_interleave(torch.arange(len(good)), counts),
        samples=torch.tensor([sample.index for sample in good]),
        bad=torch.tensor(bad, dtype=torch.int64),
        colours=torch.tensor([sample.colours for sample in good if sample.colours], dtype=torch.float32).reshape(-1, 3),
    )


def training_batch(dataset: Any, plan: Sequence[Any], memory: np.ndarray, before: Callable[[], None]) -> Batch:
    """The micro-batch of a training set's samples; its images are drawn where it lies, in the first bytes of `memory`.

    `before` is called before each sample.
    """
    shape = (len(plan), dataset.imgsz, dataset.imgsz, dataset.channels)
    rows = memory[: math.prod(shape)].reshape(shape)
    samples: list[Sample] = []
    count = 0
    for position in plan:
        before()
        samples.append(dataset.draw(position, rows[count]))
        count += samples[-1].good  # a damaged one has no row
    return collate(samples, rows[:count])
