"""Everything of a run that must survive a crash, and nothing else.

What is derived from the settings (schedules, plans, the data index) is made again. What only this run knows is a field
here and is saved and restored by name: a field without an entry in the checkpoint is an error, never a fresh start.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from detector.step.plan import Cut
from detector.step.schedule import Leg, Legs
from detector.step.state import TrainState
from detector.step.step import StepReport

# Fields whose value is plain data, saved as it is.
PLAIN = ("epoch", "done", "batch", "fitting_steps", "loss_sums", "loss_images", "bad_images", "history")


@dataclass
class Best:
    """The best epoch so far, counted from 1; 0 before there is one.

    One rule: the highest fitness, the first of equals, among the epochs that have one. As long as none has (no
    validation yet, or nothing finite), the last epoch stands in.
    """

    epoch: int = 0
    fitness: float | None = None  # higher is better

    def take(self, epoch: int, fitness: float | None) -> None:
        """An epoch is finished; fitness None or not finite: it has none."""
        if fitness is not None and math.isfinite(fitness):
            if self.fitness is None or fitness > self.fitness:
                self.epoch, self.fitness = epoch, fitness
        elif self.fitness is None:
            self.epoch = epoch


def fitness_of(row: Mapping[str, float], metric: str, terms: Collection[str]) -> float | None:
    """How good an epoch with these metrics is, higher is better: `metric`, or a loss term turned round.

    None where the epoch has no such metric.
    """
    value = row.get(metric)
    return -value if value is not None and metric in terms else value


@dataclass
class RunState(TrainState):
    """The living state of a run. Position: `done` images of epoch `epoch` (counted from 0) are trained."""

    epoch: int = 0
    done: int = 0
    # How the windows are planned; they stay when a run goes on at another batch.
    cut: Cut = field(default_factory=lambda: Cut(1, 1))
    batch: int = 1  # images of a micro-batch, no more than the settings' `batch`: less where memory ran out
    fitting_steps: int = 0  # since memory last ran out
    legs: Legs = ()  # how the learning rate goes; a new one each time the run is extended
    loss_sums: list[float] = field(default_factory=list)  # losses * images of this epoch so far, one a term
    loss_images: int = 0  # that they are of: those of skipped steps do not count
    # Images found damaged so far, by their numbers in their split.
    bad_images: dict[str, list[int]] = field(default_factory=lambda: {"train": [], "val": []})
    best: Best = field(default_factory=Best)
    history: list[dict[str, float]] = field(default_factory=list)  # one row of metrics an epoch

    def learned(self, report: StepReport) -> None:
        """Take an applied step into the epoch's losses."""
        before = self.loss_sums or [0.0] * len(report.losses)
        self.loss_sums = [a + b * report.images for a, b in zip(before, report.losses, strict=True)]
        self.loss_images += report.images

    def end_epoch(self, row: dict[str, float], fitness: float | None) -> None:
        """Take a finished epoch, with its row of metrics, and stand at the beginning of the next."""
        self.history.append(row)
        self.epoch, self.done, self.loss_sums, self.loss_images = self.epoch + 1, 0, [], 0
        self.best.take(self.epoch, fitness)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            **{name: getattr(self, name) for name in PLAIN},
            "cut": [self.cut.batch, self.cut.accumulate, self.cut.devices],
            "legs": [[leg.start, leg.end, leg.curve] for leg in self.legs],
            "best": asdict(self.best),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for name in PLAIN:
            setattr(self, name, saved[name])
        self.best = Best(**saved["best"])
        self.cut = Cut(*saved["cut"])
        self.legs = tuple(Leg(*leg) for leg in saved["legs"])
