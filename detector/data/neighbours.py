"""Which samples of an epoch may be each other's partners in a mosaic, mixup or cutmix: those near in its order."""

import numpy as np

from detector.rng import epoch_order

NEAR = 64  # samples among which partners are drawn


class Neighbours:
    """The samples of an epoch at the places before a sample's own, and itself; of the first ones, those after, too.

    The order of an epoch is random, so they are a random choice of the whole set. As they follow one another, an image
    that was decoded as a sample is at hand when it is drawn as a partner. They are a function of (seed, epoch, sample)
    alone: no batch, rank or worker enters.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed, self.near = samples, seed, min(NEAR, samples)
        self._epoch = -1  # whose order is at hand

    def place(self, epoch: int, sample: int) -> int:
        """Where a sample stands in the order of all epochs."""
        self._turn_to(epoch)
        return epoch * self.samples + int(self._places[sample])

    def partner(self, place: int, number: int) -> tuple[int, int]:
        """Of the `near` samples near a place the one with this number: its place, and which it is."""
        epoch, here = divmod(place, self.samples)
        self._turn_to(epoch)
        other = max(here + 1 - self.near, 0) + number
        return epoch * self.samples + other, int(self._order[other])

    def _turn_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._order = epoch_order(self.samples, self.seed, epoch)
            self._places = np.empty_like(self._order)
            self._places[self._order] = np.arange(self.samples)
            self._epoch = epoch
