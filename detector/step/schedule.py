"""Learning-rate schedule, warmup and momentum: pure functions of progress, nothing to save or to fall out of step.

Progress is counted in epochs as a real number: images seen / images of an epoch. A step is rated at the progress it
ends at, so the first step of a warmup already moves and the last step of a run has the final rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

EMA_LIMIT = 0.9999  # the largest decay of the weights' average
EMA_SHARE = 0.1  # of the steps so far, those that it is over; measured, see docs/recipe.md

Gains = Sequence[Sequence[float]]  # of the loss terms, branch by branch
Extension = Literal["rescale", "constant-final", "restart-cosine"]

# Parameter groups, and what their rates are multiplied by. Not every optimizer has all of them, see optim.py.
KINDS = ("muon", "weights", "norms", "biases")
GROUPS = {kind: 1.0 for kind in KINDS} | {f"fast {kind}": 3.0 for kind in KINDS}


@dataclass(frozen=True)
class Leg:
    """A stretch of a run, from epoch `start` to epoch `end`. A run has one, and another each time it is extended."""

    start: int
    end: int
    curve: Literal["linear", "cosine", "constant"]

    def left(self, progress: float) -> float:
        """What is left of lr0 - lr0 * lrf at `progress` epochs: from 1 at the start to 0 at the end."""
        done = min(max((progress - self.start) / (self.end - self.start), 0.0), 1.0)
        if self.curve == "linear":
            return 1 - done
        return (1 + math.cos(math.pi * done)) / 2 if self.curve == "cosine" else 0.0


Legs = tuple[Leg, ...]


def extended(legs: Legs, epochs: int, rule: Extension) -> Legs:
    """The legs of a run that is to end at `epochs` instead.

    `rescale` stretches the last leg: from here on the rates are those of a run that was always meant to be so long.
    The other rules leave the legs as they are and add one: `constant-final` stays at lr0 * lrf, `restart-cosine` goes
    from lr0 to it once more. A run that is to end earlier is rescaled whatever the rule.
    """
    last = legs[-1]
    if epochs > last.end and rule != "rescale":
        return (*legs, Leg(last.end, epochs, "constant" if rule == "constant-final" else "cosine"))
    kept = tuple(leg for leg in legs if leg.start < epochs)
    return (*kept[:-1], replace(kept[-1], end=epochs))


class Rates(NamedTuple):
    """What one step runs at."""

    lr: Mapping[str, float]  # of each parameter group, by its name
    momentum: float
    gains: Gains | None = None  # None: all are 1


@dataclass(frozen=True)
class Schedule:
    """Learning rates, momentum and loss gains over a run.

    `warmup_bias_lr` is where the rates of biases start; all others start at 0. Each grows to its own group's. Adam's
    beta has no warmup: `warmup_momentum` is the momentum, then.

    `gains` are those of the first epoch; they move evenly, from epoch to epoch and not inside one, to `last_gains` in
    the last.
    """

    legs: Sequence[Leg]
    warmup: float  # epochs
    lr0: float
    lrf: float
    momentum: float
    warmup_momentum: float
    warmup_bias_lr: float
    gains: Gains | None = None
    last_gains: Gains | None = None  # None: the gains stay what they are

    def rates(self, progress: float) -> Rates:
        """What a step that ends at `progress` epochs runs at."""
        lr = {name: self.lr(progress, name.endswith("biases"), factor) for name, factor in GROUPS.items()}
        return Rates(lr, self.momentum_at(progress), self.gains_at(progress))

    def decay(self, progress: float) -> float:
        """Factor on lr0, from 1 at the start of a leg to lrf at its end."""
        leg = next((leg for leg in self.legs if progress <= leg.end), self.legs[-1])
        return self.lrf + (1 - self.lrf) * leg.left(progress)

    def lr(self, progress: float, bias: bool = False, factor: float = 1.0) -> float:
        """Learning rate of weights and norms, or of the biases, of a group with that factor."""
        target = self.lr0 * factor * self.decay(progress)
        if progress >= self.warmup:
            return target
        start = self.warmup_bias_lr if bias else 0.0
        return start + (target - start) * progress / self.warmup

    def momentum_at(self, progress: float) -> float:
        if progress >= self.warmup:
            return self.momentum
        return self.warmup_momentum + (self.momentum - self.warmup_momentum) * progress / self.warmup

    def gains_at(self, progress: float) -> Gains | None:
        """Gains in the epoch that a step ending at `progress` epochs belongs to; the last step of a run has the last.

        A run of one epoch stays with the first.
        """
        if self.gains is None or self.last_gains is None:
            return self.gains
        epoch, epochs = max(math.ceil(progress) - 1, 0), self.legs[-1].end
        moved = min(epoch / max(epochs - 1, 1), 1.0)
        pairs = zip(self.gains, self.last_gains, strict=True)
        return [[a + (b - a) * moved for a, b in zip(first, last, strict=True)] for first, last in pairs]


def ema_decay(step: int, tau: float | None = None) -> float:
    """Decay of the weights' moving average after `step` applied steps, counted from 1.

    tau None: the average is over about the last EMA_SHARE of the steps so far, in a short run as in a long one, and
    over 10,000 at most. A number of steps: 0.9999 is neared over so many, as other trainers do by 2,000; a run much
    shorter than that averages nothing.
    """
    if tau is None:
        return min(1 - 1 / (1 + EMA_SHARE * step), EMA_LIMIT)
    return EMA_LIMIT * (1 - math.exp(-step / tau))
