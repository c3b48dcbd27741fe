"""Run in a process of its own: assigns crowded images and prints the bytes that it took at the peak.

Usage: assign_worker.py IMAGES BOXES, at 640 pixels with sides of 8 to 200.
"""

import sys
from pathlib import Path

import torch

from detector.boxes import anchor_points, ltrb_to_xyxy
from detector.loss.assign import assign

SHAPES, STRIDES, SIDE, CLASSES = ((80, 80), (40, 40), (20, 20)), (8, 16, 32), 640, 4


def scene(images: int, boxes: int) -> tuple:
    """The arguments of `assign`: predictions that overlap the boxes more or less, and `boxes` boxes an image."""
    rng = torch.Generator().manual_seed(0)
    points, strides = anchor_points(SHAPES, STRIDES, "cpu", torch.float32)
    ltrb = torch.rand(images, len(points), 4, generator=rng) * 5
    boxes_xyxy = ltrb_to_xyxy(ltrb, points) * strides[:, None]
    logits = torch.randn(images, CLASSES, len(points), generator=rng)
    side = torch.rand(images * boxes, 2, generator=rng) * 192 + 8
    low = torch.rand(images * boxes, 2, generator=rng) * (SIDE - side)
    classes = torch.randint(CLASSES, (images * boxes,), generator=rng)
    owner = torch.arange(images).repeat_interleave(boxes)
    return logits, boxes_xyxy, SHAPES, STRIDES, torch.cat((low, low + side), dim=1), classes, owner


def resident(field: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


if __name__ == "__main__":
    assign(*scene(1, 4))  # what torch loads on first use is not the assigner's
    arguments = scene(*map(int, sys.argv[1:]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    given = assign(*arguments)
    assert len(given.image) > 0
    print(resident("VmHWM") - before)
