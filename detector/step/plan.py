"""Which images make which optimizer step, and how it is cut into micro-batches (gradient accumulation): pure functions,
no torch.

A window is the images of one optimizer step over all devices. It is a value, planned before anything runs; nowhere
does a counter modulo `accumulate` decide when to step. Windows never straddle an epoch, no image is dropped or
repeated, none is larger than nominal and none is a runt.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from detector.rng import Purpose, epoch_order, generator

NOMINAL = 64  # images of a step that the rates are tuned for
ENOUGH_STEPS = 1000  # optimizer steps below which a run gains by more of them, see docs/recipe.md


@dataclass(frozen=True)
class Cut:
    """How a window is split: `batch` images a micro-batch, `accumulate` of them on each of `devices`."""

    batch: int
    accumulate: int
    devices: int = 1

    @property
    def window(self) -> int:
        """Images of a full window, over all devices."""
        return self.batch * self.accumulate * self.devices


@dataclass(frozen=True)
class Window:
    """The images of one optimizer step.

    `micro_batches[d][m]` are the samples of device d's m-th micro-batch; every device has equally many. `done` is the
    number of the epoch's images before this window.
    """

    epoch: int
    done: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def images(self) -> int:
        return sum(len(micro) for device in self.micro_batches for micro in device)

    @property
    def accumulate(self) -> int:
        """Micro-batches per device in this window."""
        return len(self.micro_batches[0])


def nominal_cut(nbs: int, batch: int, devices: int = 1, per_device: bool = False, images: int | None = None) -> Cut:
    """accumulate = max(1, round(nbs / (batch * devices))), halves rounded up.

    per_device: nbs is each device's, and the window grows with their number: accumulate = max(1, round(nbs / batch)).
    images: those of an epoch, which no window exceeds: what follows from its size is that of steps that happen.
    """
    share = batch if per_device else batch * devices
    cut = Cut(batch, max(1, int(nbs / share + 0.5)), devices)
    if images is None or cut.window <= images:
        return cut
    batch = min(batch, -(-images // devices))
    return Cut(batch, -(-images // (batch * devices)), devices)


def enough_steps(images: float, epochs: int) -> int:
    """The nominal batch of a run on so many images an epoch: the largest of 64, 32 and 16 that makes ENOUGH_STEPS.

    16 where none does: a smaller one would make BatchNorm's statistics of fewer images.
    """
    for nbs in (NOMINAL, NOMINAL // 2):
        if math.ceil(images / nbs) * epochs >= ENOUGH_STEPS:
            return nbs
    return NOMINAL // 4


def lr_factor(cut: Cut, nbs: int, rule: Literal["none", "linear", "sqrt"], per_device: bool = False) -> float:
    """What lr0 is multiplied by where the window is larger than the batch it was tuned for.

    Up to batch * devices = nbs accumulation keeps the window near nbs and the factor is 1. Beyond, and where nbs is
    each device's, it is window / nbs (linear) or the square root of it. Goyal et al., "Accurate, large minibatch SGD"
    (2017).
    """
    if rule == "none" or (cut.batch * cut.devices <= nbs and not (per_device and cut.devices > 1)):
        return 1.0
    ratio = cut.window / nbs
    return ratio if rule == "linear" else ratio**0.5


def spread(images: int, parts: int) -> list[int]:
    """`images` over `parts` as evenly as they go, the larger parts first: 61 over 4 is 16, 15, 15, 15."""
    quotient, remainder = divmod(images, parts)
    return [quotient + (part < remainder) for part in range(parts)]


def next_window(remaining: int, nominal: int) -> int:
    """Images of the next window when `remaining` of the epoch are left.

    They are spread evenly over as few windows of at most `nominal` as hold them. Asking again after each window gives
    the same even spread, so a position inside an epoch is all that a plan needs.
    """
    windows = -(-remaining // nominal)
    return -(-remaining // windows)


def ramped(cut: Cut, progress: float, warmup: float) -> Cut:
    """The cut at `progress` epochs: from one micro-batch per device to all of them over `warmup` epochs, linearly."""
    if progress >= warmup:
        return cut
    return Cut(cut.batch, max(1, round(1 + (cut.accumulate - 1) * progress / warmup)), cut.devices)


def split(samples: Sequence[int], batch: int, devices: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """A window's samples as devices x micro-batches.

    The devices' shares are as even as they go, and so are the micro-batches of a share. Every device gets equally many
    micro-batches, none larger than `batch`.
    """
    shares = spread(len(samples), devices)
    micro_batches = -(-shares[0] // batch)
    cut, start = [], 0
    for share in shares:
        device = []
        for size in spread(share, micro_batches):
            device.append(tuple(int(sample) for sample in samples[start : start + size]))
            start += size
        cut.append(tuple(device))
    return tuple(cut)


def recut(window: Window, batch: int) -> Window:
    """The same images on the same devices, in micro-batches of at most `batch`."""
    samples = [sample for device in window.micro_batches for micro in device for sample in micro]
    return replace(window, micro_batches=split(samples, batch, len(window.micro_batches)))


def epoch_windows(
    images: int,
    cut: Cut,
    seed: int,
    epoch: int,
    done: int = 0,
    warmup: float = 0.0,
    batch: int | None = None,
    devices: int | None = None,
) -> Iterator[Window]:
    """The windows of an epoch from position `done` on.

    warmup: epochs over which the window ramps up; 0 for none. batch and devices: how the windows are cut where that is
    another way than `cut` was planned for; their images stay the same.
    """
    order = epoch_order(images, seed, epoch)
    while done < images:
        now = ramped(cut, epoch + done / images, warmup)
        size = next_window(images - done, now.window)
        yield Window(epoch, done, split(order[done : done + size], batch or cut.batch, devices or cut.devices))
        done += size


def input_sides(imgsz: int, multi_scale: float, stride: int) -> tuple[int, int]:
    """The smallest and the largest side of the network's input: imgsz -+ its share, down to multiples of the stride."""
    if not multi_scale:
        return imgsz, imgsz
    low, high = (int(imgsz * share / stride + 1e-9) * stride for share in (1 - multi_scale, 1 + multi_scale))
    return max(low, stride), high


def input_side(imgsz: int, multi_scale: float, stride: int, seed: int, window: Window) -> int:
    """The side of all images of a window; a function of (seed, epoch, images done) alone, so every cut has the same."""
    low, high = input_sides(imgsz, multi_scale, stride)
    if low == high:
        return low
    draw = generator(seed, Purpose.SIDE, window.epoch, window.done)
    return stride * int(draw.integers(low // stride, high // stride + 1))


def count_steps(images: int, cut: Cut, epochs: int, warmup: float = 0.0) -> int:
    """Optimizer steps of a whole run."""
    steps = 0
    for epoch in range(epochs):
        if epoch >= warmup:
            return steps + (epochs - epoch) * -(-images // cut.window)
        done = 0
        while done < images:
            done += next_window(images - done, ramped(cut, epoch + done / images, warmup).window)
            steps += 1
    return steps
