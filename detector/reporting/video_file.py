"""Videos of results: H.264 in an .mp4, which players and browsers open."""

from __future__ import annotations

import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from detector.files import unfinished
from detector.inference.sources.video import library

CODECS = ("libx264", "libopenh264", "mpeg4")  # the first that is there; the last plays in most places, not in browsers
TICKS = 90_000  # a second: times of any rate come out as they went in


class VideoFile:
    """Frames in, a video out that shows them at their times. It takes its place, whole, when it is closed.

    Raises DataError without PyAV, and OSError where the file cannot be written.
    """

    def __init__(self, path: Path, rate: float | None) -> None:
        av = library(str(path))
        self.path = path
        self._frame = av.VideoFrame
        self._container = av.open(str(unfinished(path)), "w", format="mp4")
        codec = next(name for name in CODECS if name in av.codecs_available)
        self._stream = self._container.add_stream(codec, rate=Fraction(rate or 30).limit_denominator(1001))
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = Fraction(1, TICKS)
        if codec == "libx264":
            self._stream.options = {"preset": "veryfast", "crf": "21"}
        self._last: int | None = None
        self._step, self._next = 1 / (rate or 30), 0.0  # seconds

    def write(self, rgb: NDArray[np.uint8], time: float | None) -> None:
        """Add an (H, W, 3) frame, shown from `time` (seconds) on, or after the one before; sizes are the first's."""
        if self._last is None:
            height, width = rgb.shape[:2]
            self._stream.height, self._stream.width = height + height % 2, width + width % 2  # as the codec needs it
        size = self._stream.height, self._stream.width
        if (rgb.shape[0] + rgb.shape[0] % 2, rgb.shape[1] + rgb.shape[1] % 2) != size:
            rgb = cv2.resize(rgb, size[::-1], interpolation=cv2.INTER_AREA)
        rows, columns = size[0] - rgb.shape[0], size[1] - rgb.shape[1]
        if rows or columns:
            rgb = np.pad(rgb, ((0, rows), (0, columns), (0, 0)), mode="edge")
        frame = self._frame.from_ndarray(np.ascontiguousarray(rgb), "rgb24")
        after = 0 if self._last is None else self._last + 1
        self._last = max(after, round(TICKS * (self._next if time is None else time)))
        self._next = self._last / TICKS + self._step
        frame.pts, frame.time_base = self._last, Fraction(1, TICKS)
        self._container.mux(self._stream.encode(frame))

    def discard(self) -> None:
        """Leave nothing of a file that is not finished."""
        if self._container is not None:
            container, self._container = self._container, None
            with suppress(Exception):  # what it has still to write may not fit
                container.close()
            unfinished(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Finish the file; called again it does nothing."""
        if self._container is None:
            return
        container, self._container = self._container, None
        try:
            if self._last is not None:
                container.mux(self._stream.encode())
        finally:
            container.close()
        os.replace(unfinished(self.path), self.path)
