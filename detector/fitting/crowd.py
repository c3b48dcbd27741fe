"""The heaviest training image that a data set makes: what memory is measured with."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detector.config.settings import Settings
from detector.data.batch import Sample
from detector.data.index import Index
from detector.run.build import training_set

IMAGES, EPOCHS = 8, 8  # the most crowded images, and how often a sample is drawn around each


def heaviest(index: Index, settings: Settings) -> Sample:
    """The sample with the most boxes of many that are drawn, as in training, from the most crowded images alone.

    A mosaic of four of the most crowded images is rare, but a long run meets it; a step must fit then, too.
    """
    boxes = np.diff(index.box_offsets)
    crowded = np.argsort(-boxes, kind="stable")[:IMAGES]
    training = training_set(part(index, [int(i) for i in crowded]), settings)
    positions = [(epoch, i) for epoch in range(EPOCHS) for i in range(len(training))]
    return max((training[position] for position in positions), key=lambda sample: (sample.good, len(sample.classes)))


def part(index: Index, images: Sequence[int]) -> Index:
    """The index of some of the images, in this order."""
    paths, path_offsets = _packed(index.paths, index.path_offsets, images)
    boxes_xywh, box_offsets = _packed(index.boxes_xywh, index.box_offsets, images)
    classes, _ = _packed(index.classes, index.box_offsets, images)
    chosen = list(images)
    return replace(
        index,
        paths=paths,
        path_offsets=path_offsets,
        heights=index.heights[chosen],
        widths=index.widths[chosen],
        boxes_xywh=boxes_xywh,
        box_offsets=box_offsets,
        classes=classes,
    )


def _packed(values: np.ndarray, offsets: np.ndarray, images: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of some images, one after the other, and where each begins."""
    pieces = [values[offsets[i] : offsets[i + 1]] for i in images]
    return np.concatenate(pieces), np.cumsum([0, *(len(piece) for piece in pieces)])
