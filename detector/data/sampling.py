"""What is done about rare classes: their images come more often, and their weight in the loss is larger.

Legend: n images, C classes.
"""

from typing import Literal

import numpy as np

from detector.data.index import Index
from detector.rng import Purpose, generator

BALANCED = 0.5  # the power that `balanced` stands for: the square root of Gupta et al.


def class_weights(index: Index, power: float) -> np.ndarray:
    """(C,) float64 weights of the classes in the loss, their mean 1: boxes^-power over its mean.

    The mean is over the classes that have boxes; one without any has weight 1. With power 0 all are 1, and with power 1
    each class's boxes weigh, together, as much as another's.
    """
    counts = np.bincount(index.classes, minlength=len(index.names)).astype(np.float64)
    there = counts > 0
    weights = np.ones(len(counts))
    weights[there] = counts[there] ** -power
    weights[there] /= weights[there].mean() if there.any() else 1
    return weights


def repeat_factors(index: Index, power: float) -> np.ndarray:
    """(n,) float64 of at least 1: how much more often each image is to come than one of the most frequent class alone.

    A class that f of the images show has the factor (largest f / f)^power, an image the largest factor of its classes,
    a background image 1. It is the repeat factor of Gupta et al., "LVIS" (2019), max(1, sqrt(t / f)), whose threshold t
    is the largest f here instead of 0.001: data sets have few classes, and then even the rarest are above that.
    """
    factors = np.ones(len(index))
    if not power:
        return factors
    pairs = np.unique(index.image_of_box * len(index.names) + index.classes)  # one number each: sorted in a tenth
    image_of, classes = np.divmod(pairs, len(index.names))
    shown = np.bincount(classes, minlength=len(index.names))  # images of each class
    if len(classes):
        np.maximum.at(factors, image_of, (shown.max() / shown[classes]) ** power)
    return factors


class Sampling:
    """Which image each slot of an epoch holds; a function of (seed, epoch) alone.

    An epoch has as many slots as there are images. Each image comes n * factor / (sum of factors) times, rounded down
    or up by chance, so that over many epochs it comes as often as it should. Equal factors: every image once.
    """

    def __init__(self, factors: np.ndarray, seed: int) -> None:
        """`factors` (n,) float64 above 0: how often the images are to come, beside one another."""
        self.seed = seed
        self.expected = None if (factors == factors[0]).all() else len(factors) * factors / factors.sum()
        self._images = np.arange(len(factors))
        self._last = (-1, self._images)  # the epoch that was asked for last, and its images

    def drawn(self, epoch: int) -> np.ndarray:
        """(n,) int64, the image in each slot of an epoch, ascending; not to be written to.

        Systematic sampling: the expected numbers, in random order, lie end to end on a line, and every whole step from
        a random start on it is a slot.
        """
        if self.expected is None:
            return self._images
        if self._last[0] != epoch:
            self._last = epoch, self._draw(epoch)
        return self._last[1]

    def _draw(self, epoch: int) -> np.ndarray:
        random = generator(self.seed, Purpose.DRAW, epoch)
        order = random.permutation(len(self.expected))
        steps = np.floor(np.cumsum(self.expected[order]) + random.random()).astype(np.int64)
        np.minimum(steps, len(steps), out=steps)
        steps[-1] = len(steps)  # whatever rounding made of it
        counts = np.empty_like(steps)
        counts[order] = np.diff(steps, prepend=0)
        return np.repeat(self._images, counts)


def sampling_of(index: Index, rule: Literal["uniform", "balanced"] | float, seed: int) -> Sampling:
    """The sampling of an index by a rule: a word, or the power of `repeat_factors`."""
    power = {"uniform": 0.0, "balanced": BALANCED}.get(rule, rule)
    return Sampling(repeat_factors(index, power), seed)
