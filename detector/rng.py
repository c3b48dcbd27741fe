"""Random generators that are a function of what they are for.

Nothing in the project draws from a global generator. What sample i of epoch e looks like depends on (seed, e, i) alone,
so it is the same for every batch size, worker count, rank count and after every interruption.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream of random numbers is for; streams of different purposes are independent."""

    ORDER = 1  # the order of an epoch's images
    SAMPLE = 2  # everything random about one training sample
    WEIGHTS = 3  # a network's initial weights
    SCENE = 4  # a drawn scene of a synthetic data set
    FRACTION = 5  # the part of its images that a run trains on
    DRAW = 6  # the images of an epoch where some come more often than others
    SIDE = 7  # the size of a step's images
    RESAMPLE = 8  # the images of a draw, by which the noise of a metric is measured


def generator(seed: int, purpose: Purpose, *position: int) -> np.random.Generator:
    """A fresh generator for (seed, purpose, position...), for example (0, SAMPLE, epoch, index).

    Built on numpy's SeedSequence, whose hash keeps streams of neighbouring positions independent.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, int(purpose), *position))))


def epoch_order(images: int, seed: int, epoch: int) -> np.ndarray:
    """(images,) the order of the samples in an epoch; a function of (seed, epoch) alone."""
    return generator(seed, Purpose.ORDER, epoch).permutation(images)
