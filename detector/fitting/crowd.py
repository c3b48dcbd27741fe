"""The heaviest training image that a data set makes: what memory is measured with."""

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
    training = training_set(index.take(crowded), settings)
    positions = [(epoch, i) for epoch in range(EPOCHS) for i in range(len(training))]
    return max((training[position] for position in positions), key=lambda sample: (sample.good, len(sample.classes)))
