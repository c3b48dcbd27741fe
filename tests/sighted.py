"""A runtime for tests of sources and results, which finds bright areas without a network; and videos for it."""

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from detector.inference.detector import Detector
from detector.model.selection import Detections


@dataclass
class Sighted:
    """Finds bright areas: of class 0, or 1 where they are higher than wide and `by_shape`; the larger, the surer."""

    stride: int = 32
    channels: int = 3
    value_range: tuple[float, float] | None = None
    by_shape: bool = True
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of the batches it looked at

    def check_side(self, imgsz):
        pass

    def find(self, images, limits):
        self.shapes.append(tuple(images.shape))
        return [self._find(image.numpy(), limits) for image in images]

    def _find(self, image, limits):
        bright = (image.max(axis=2) > 200).astype(np.uint8)
        _, _, stats, _ = cv2.connectedComponentsWithStats(bright)
        boxes = [(x, y, x + w, y + h) for x, y, w, h, _ in stats[1:].tolist()]
        scores = [1 - 1 / (1 + w * h) for _, _, w, h, _ in stats[1:].tolist()]
        classes = [int(self.by_shape and h >= w) for _, _, w, h, _ in stats[1:].tolist()]
        order = [i for i in np.argsort([-score for score in scores]) if scores[i] >= limits.conf][: limits.max_det]
        return Detections(
            torch.tensor([boxes[i] for i in order], dtype=torch.float32).reshape(-1, 4),
            torch.tensor([scores[i] for i in order], dtype=torch.float32),
            torch.tensor([classes[i] for i in order], dtype=torch.int64),
        )


def sighted(imgsz=64, **kwargs):
    return Detector(Sighted(**kwargs), ("wide", "high"), imgsz)


def picture(number=0, height=48, width=64):
    """Dark, with a bright bar whose place tells the number."""
    image = np.full((height, width, 3), 30, np.uint8)
    left = number * 2 % (width - 16)
    image[20:28, left : left + 16] = 250
    return image


def write_video(path: Path, images, codec="libx264", rate=30, times=None, options=None):
    """A video of (H, W, 3) RGB images; times: of each, seconds."""
    av = pytest.importorskip("av")

    with av.open(str(path), "w") as container:
        stream = None
        for number, image in enumerate(images):
            if stream is None:
                stream = container.add_stream(codec, rate=rate)
                stream.height, stream.width = image.shape[:2]
                stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
                stream.codec_context.time_base = Fraction(1, 1000) if times else Fraction(1, rate)
                stream.options = options or {}
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            frame.pts = round(times[number] * 1000) if times else number
            frame.time_base = stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
