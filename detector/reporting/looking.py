"""What is told while `detector predict` looks at images and videos: a line an image, of a video one now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from detector.inference.results import Result
from detector.inference.sources import Origin
from detector.reporting.progress import Bar
from detector.reporting.table import clock
from detector.terminal import is_terminal, say

EVERY = 10.0  # seconds between lines about a video


class Looking:
    """Lines on `out`, and a bar with the speed on `stream` where that is a terminal; a context manager.

    total: how many sources there are. Images among them, which may be of several pages, are counted by it; each video
    has a bar of its own, for as long as the file says that it is.
    """

    def __init__(
        self,
        total: int | None,
        out: TextIO | None = None,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = sys.stdout if out is None else out
        self.stream = sys.stderr if stream is None else stream
        self.images = self.objects = 0
        self._sources = 0  # that were begun
        self._total, self._now = total, now
        self._bar: Bar | None = None
        self._origin: Origin | None = None
        self._began = self._told = now()
        self._frames = self._objects = 0  # of the video

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_video()
        self._end_bar()

    def tell(self, result: Result) -> None:
        """A result is there."""
        new = result.origin is not self._origin
        if new:
            self._end_video()
            if result.origin.moves:  # which has a bar of its own
                self._end_bar()
            self._origin, self._sources = result.origin, self._sources + 1
            self._began = self._told = self._now()
            self._frames = self._objects = 0
        self._show_bar(result.origin, new)
        self.images, self.objects = self.images + 1, self.objects + len(result)
        self._frames, self._objects = self._frames + 1, self._objects + len(result)
        if not result.origin.moves:
            page = "" if result.frame is None else f", page {result.frame}"
            self.line(f"{result.path or result.origin.name}{page}: {result.summary()}")
        elif self._bar is None and self._now() - self._told >= EVERY:
            self._told = self._now()
            of = f" of about {result.origin.count:,}" if result.origin.count else ""
            at = "" if result.time is None else f", at {clock(result.time)}"
            self.line(f"{result.origin.name}: {self._frames:,} frames{of}{at}, {self._rate()}")

    def line(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line, above the bar where there is one."""
        stream = self.out if stream is None else stream
        if self._bar is None:
            say(text, stream)
        else:
            self._bar.clear()
            say(text, stream)
            self._bar.refresh()

    def _show_bar(self, origin: Origin, new: bool) -> None:
        if self._bar is None and is_terminal(self.stream):
            total = origin.count if origin.moves else self._total
            known = "{percentage:3.0f}% {bar:16} {n_fmt}/{total_fmt}" if total else "{n_fmt}"
            self._bar = Bar(
                total=total,
                initial=0 if origin.moves else self._sources - 1,
                file=self.stream,
                dynamic_ncols=True,
                mininterval=0.2,
                leave=False,
                unit=" frames" if origin.moves else " images",
                bar_format=known + "{unit}  {rate_noinv_fmt}  {elapsed}",
            )
        if self._bar is not None and (new or origin.moves):
            self._bar.update(1)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _end_video(self) -> None:
        """What was seen of a video that is over."""
        if self._origin is not None and self._origin.moves:
            self._end_bar()
            self.line(f"{self._origin.name}: {self._objects:,} objects in {self._frames:,} frames, {self._rate()}")
        self._origin = None

    def _rate(self) -> str:
        return f"{self._frames / max(self._now() - self._began, 1e-9):.1f} frames/s"
