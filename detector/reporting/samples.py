"""Pictures of what the network is trained on and of what it finds. Legend: B images, N boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detector.drawing import draw_boxes, grid
from detector.model.selection import Detections

SHOWN_CONFIDENCE = 0.25
CELL = 512  # pixels of a cell's long side


def training_batch_image(
    images: ArrayLike,
    boxes_xyxy: ArrayLike,
    classes: ArrayLike,
    image_index: ArrayLike,
    names: Sequence[str],
    max_images: int = 16,
) -> NDArray[np.uint8]:
    """A page with the first images of a micro-batch as the network sees them, and their boxes.

    (B, H, W, 3) uint8 RGB, (N, 4) boxes in pixels of the network input, (N,) classes and (N,) the image of each box.
    Arrays or CPU tensors.
    """
    pixels = np.asarray(images)[:max_images]
    boxes, labels, owner = np.asarray(boxes_xyxy), np.asarray(classes), np.asarray(image_index)
    cells = []
    for i, image in enumerate(pixels):
        mine = owner == i
        cells.append(draw_boxes(image, boxes[mine], labels[mine], names, long_side=CELL))
    return grid(cells, columns=math.ceil(math.sqrt(len(cells))))


def validation_image(
    images: Sequence[NDArray[np.uint8]],
    truth_xyxy: Sequence[ArrayLike],
    truth_classes: Sequence[ArrayLike],
    detections: Sequence[Detections],
    names: Sequence[str],
    titles: Sequence[str] | None = None,
    confidence: float = SHOWN_CONFIDENCE,
    max_images: int = 8,
) -> NDArray[np.uint8]:
    """A page with two cells per image: the ground truth left, the detections with at least `confidence` right.

    Images may differ in size; boxes are in their pixels. `titles` names the images, for example by file.
    """
    cells, captions = [], []
    shown = min(max_images, len(images))
    for i in range(shown):
        name = f"image {i + 1}" if titles is None else titles[i]
        found = detections[i].cpu().above(confidence)
        cells.append(draw_boxes(images[i], truth_xyxy[i], truth_classes[i], names, long_side=CELL))
        cells.append(
            draw_boxes(
                images[i],
                found.boxes_xyxy.numpy(),
                found.classes.numpy(),
                names,
                found.scores.numpy(),
                long_side=CELL,
            )
        )
        captions += [
            f"truth · {np.size(truth_classes[i])} · {name}",
            f"found · {len(found.scores)} at ≥ {confidence:g} · {name}",
        ]
    return grid(cells, columns=2 if shown <= 2 else 4, titles=captions)
