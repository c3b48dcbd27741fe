"""How the sums of a window's micro-batches become one gradient. Both rules live here, so that `step.py` has one path.

`before` is the factor on a micro-batch's sums when it is run, `after` the factor on the window's gradient, when the
target weights are known. Whatever is a constant of the window may stand in either.
"""

from typing import Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    def before(self, weight: Tensor, images: int, scale: float) -> Tensor | float:
        """Factor on the sums of a micro-batch of `images` images with target weight `weight`; 0 for no images."""

    def after(self, weights: Tensor, images: Tensor, scale: float) -> Tensor:
        """(branches,) factors on the gradients of a window of `images` images with these target weights."""


class ByWindow:
    """Exact: images / weight of the whole window, the gradient of one big batch.

    `scale` only keeps the numbers of the backward pass in fp16's range and cancels out; it is a power of two, so that
    it does so to the bit.
    """

    def before(self, weight: Tensor, images: int, scale: float) -> Tensor | float:
        return 1 / scale if images else 0.0

    def after(self, weights: Tensor, images: Tensor, scale: float) -> Tensor:
        return images * scale / weights.clamp(min=1.0)


class ByMicroBatch:
    """The usual approximation, for comparison: each micro-batch by its own weight, times its images."""

    def before(self, weight: Tensor, images: int, scale: float) -> Tensor | float:
        return images / weight.clamp(min=1.0)

    def after(self, weights: Tensor, images: Tensor, scale: float) -> Tensor:
        return torch.ones_like(weights)


RULES: dict[str, Rule] = {"window": ByWindow(), "micro": ByMicroBatch()}
