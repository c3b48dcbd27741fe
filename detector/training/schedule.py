"""Pure functions of progress: nothing to save, nothing to fall out of step.

Progress is counted in epochs as a real number: images seen / images of an epoch. A step is rated at the progress it
ends at, so the first step of a warmup already moves and the last step of a run has the final rate.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Learning rates and momentum over a run.

    `warmup_bias_lr` is where the biases' rate starts (0 with Adam-like optimizers); all other rates start at 0.
    """

    epochs: int
    warmup: float  # epochs
    lr0: float
    lrf: float
    momentum: float
    warmup_momentum: float
    warmup_bias_lr: float
    cosine: bool = False

    def decay(self, progress: float) -> float:
        """Factor on lr0, from 1 at the start to lrf at the end, linear or half a cosine."""
        done = min(progress / self.epochs, 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if self.cosine else 1 - done
        return self.lrf + (1 - self.lrf) * left

    def lr(self, progress: float, bias: bool = False) -> float:
        """Learning rate of weights and norms, or of the biases."""
        target = self.lr0 * self.decay(progress)
        if progress >= self.warmup:
            return target
        start = self.warmup_bias_lr if bias else 0.0
        return start + (target - start) * progress / self.warmup

    def momentum_at(self, progress: float) -> float:
        if progress >= self.warmup:
            return self.momentum
        return self.warmup_momentum + (self.momentum - self.warmup_momentum) * progress / self.warmup


def ema_decay(step: int, limit: float = 0.9999, tau: float = 2000.0) -> float:
    """Decay of the weights' moving average after `step` applied steps (counted from 1): short at first."""
    return limit * (1 - math.exp(-step / tau))
