"""What an epoch shows while it runs: a bar on a terminal, one plain line per epoch in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from detector.memory import resident_memory
from detector.reporting.table import clock
from detector.terminal import is_terminal, write


class Bar(tqdm):
    """A bar without tqdm's thread that watches bars: a process with threads cannot fork its loaders safely."""

    monitor_interval = 0


@dataclass
class Pace:
    """What the last whole epoch took, by which the time that is left of a run is told."""

    per_image: float | None = None  # seconds of training
    besides: float = 0.0  # seconds of an epoch beside its training: validation, files

    def take(self, images: int, training: float, besides: float) -> None:
        """An epoch in which so many images were trained."""
        self.per_image, self.besides = training / max(images, 1), besides


class Progress:
    """The progress of one epoch, told once per step; a context manager.

    `epoch` counts from 0 and is shown from 1. `images` are those of a whole epoch, `start` those that were done before
    (an epoch that is resumed); speed and remaining time come from what is done here. On a terminal a bar is drawn and
    left standing; elsewhere nothing is written until the epoch is closed, then one line. By the `pace` of the epoch
    before, if there is one, the time that is left of the run is told, its last validation included.
    """

    def __init__(
        self,
        epoch: int,
        epochs: int,
        images: int,
        start: int = 0,
        stream: TextIO | None = None,
        shown: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self.stream = sys.stderr if stream is None else stream  # None where the program has no console
        self.epoch, self.epochs, self.images = epoch, epochs, images
        self.start = self.done = start
        self.began = time.perf_counter()
        self.waited = 0.0  # seconds
        self._lap = self.began, 0.0  # when the last lap ended, and what had been waited by then
        self.line = ""
        self.closed = not shown
        self.bar: Bar | None = None
        if shown and is_terminal(self.stream):
            self.bar = Bar(
                total=images,
                initial=start,
                file=self.stream,
                desc=self._title(),
                dynamic_ncols=True,
                mininterval=0.2,
                bar_format="{desc} {percentage:3.0f}% {bar:16} {n_fmt}/{total_fmt} images{postfix}",
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time in it is one of waiting for data, of which the share is shown."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start

    def lap(self) -> tuple[float, float]:
        """Seconds since the last call, or since the beginning, and the share of them that was waited for data."""
        (start, waited), now = self._lap, time.perf_counter()
        self._lap = now, self.waited
        return now - start, min((self.waited - waited) / max(now - start, 1e-9), 1.0)

    def update(
        self,
        images_done: int,
        losses: Mapping[str, float],
        lr: float,
        accumulate: int,
        memory_bytes: int | None = None,
    ) -> None:
        """Shows that `images_done` images of the epoch are done, the losses by name, learning rate and accumulate, and
        the share of the time that was waited for data.

        `memory_bytes` is what the GPU has allocated; without it the memory of this process is shown.
        """
        seconds = max(time.perf_counter() - self.began, 1e-9)
        rate = max(images_done - self.start, 0) / seconds
        memory = process_memory() if memory_bytes is None else memory_bytes
        parts = [
            " ".join(f"{name} {value:.3f}" for name, value in losses.items()),
            f"lr {lr:.2e}",
            f"acc {accumulate}",
            f"{rate:.1f} img/s",
            f"waited {min(self.waited / seconds, 1):.0%}",
            f"{memory / 2**30:.2f} GiB",
        ]
        left, left_in_run = self._remaining(images_done, rate)
        advance, self.done = images_done - self.done, images_done
        self.line = "  ".join((*parts, f"took {clock(seconds)}", f"run {left_in_run} left"))
        if self.bar is not None:
            self.bar.set_postfix_str("  ".join((*parts, f"eta {left}", f"run {left_in_run}")), refresh=False)
            self.bar.update(advance)

    def close(self) -> None:
        """Ends the epoch's line; further calls do nothing."""
        if self.closed:
            return
        self.closed = True
        if self.bar is not None:
            self.bar.refresh()
            self.bar.close()
        else:
            write(f"{self._title()}  {self.done}/{self.images} images  {self.line}".rstrip() + "\n", self.stream)

    def _title(self) -> str:
        return f"epoch {self.epoch + 1}/{self.epochs}"

    def _remaining(self, images_done: int, rate: float) -> tuple[str, str]:
        """Time left for the epoch and for the run, at the epoch's speed so far or, for the run, the one before's."""
        if rate <= 0:
            return "?", "?"
        left, epochs = max(self.images - images_done, 0), self.epochs - self.epoch - 1
        training = (left + epochs * self.images) * (self.pace.per_image or 1 / rate)
        return clock(left / rate), clock(training + (epochs + 2) * self.pace.besides)


def process_memory() -> int:
    """Bytes of memory this process holds now, or where the system does not say so (not Linux) its peak, or 0."""
    if (held := resident_memory()) is not None:
        return held
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reading_bar(title: str, stream: TextIO | None = None) -> Callable[[int, int], None]:
    """What is told (images read, of so many) while a split is read; a bar on a terminal, where it takes a moment.

    `title` says what is read: the split, or its pixels.
    """
    stream = sys.stderr if stream is None else stream
    bar: Bar | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            shape = "reading {desc} {percentage:3.0f}% {bar:16} {n_fmt}/{total_fmt} images"
            hidden = not is_terminal(stream)
            bar = Bar(total=total, file=stream, desc=title, delay=1, leave=False, disable=hidden, bar_format=shape)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
