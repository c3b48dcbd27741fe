"""What a run is: one object that the functions of this room hand to one another."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from detector.config.settings import Settings
from detector.data.choosing import class_numbers
from detector.data.dataset import TrainingSet, ValidationSet
from detector.data.loader import Loaders
from detector.evaluation.coco import GroundTruth
from detector.evaluation.evaluate import ground_truth_of
from detector.mesh import Mesh
from detector.reporting.progress import Pace
from detector.reporting.reports import Reports
from detector.run.background import Background
from detector.run.interrupt import Interruption
from detector.run.state import RunState
from detector.step.gradients import GradientSum
from detector.step.schedule import Schedule
from detector.step.step import StepRules

Say = Callable[[str], None]


def silent(text: str) -> None:
    """What is said by who has nothing to tell: other ranks than the main one, and trials."""


@dataclass(frozen=True)
class Watch:
    """Functions that a run calls on its main process, with plain values, and whether it shows how epochs get on."""

    on_window: Callable[[dict[str, Any]], None] | None = None  # gets a line of steps.jsonl
    on_epoch: Callable[[dict[str, Any]], None] | None = None  # gets a line of metrics.csv
    bars: bool = True


NOBODY = Watch()


@dataclass
class Run:
    """A run of training. What is not its state follows from its settings, and is made again on a resume."""

    settings: Settings  # resolved: what `auto` came to is written in
    device: torch.device
    mesh: Mesh
    names: tuple[str, ...]  # of the classes
    training: TrainingSet
    validation: ValidationSet
    workers: int  # loader processes
    schedule: Schedule
    rules: StepRules
    state: RunState
    gradients: GradientSum
    say: Say
    interruption: Interruption
    reports: Reports
    watch: Watch = NOBODY
    pace: Pace = field(default_factory=Pace)
    stopping: str = ""  # who asked for the run to stop, other than by a signal
    loaders: Loaders | None = None  # while it trains
    folder: Path = Path()  # known once all else is
    last_save: float = field(default_factory=time.monotonic)
    put_off: bool = False  # whether the last epoch's last.pt is still to be written
    last_curves: float = -math.inf  # when they were drawn
    beside: Background[Any] = field(default_factory=Background)  # what writes files

    def event(self, kind: str, text: str) -> None:
        """Say what happened, and write it down under one of the journal's kinds."""
        self.say(text)
        self.note(kind, text.removeprefix("warning: "))

    def note(self, kind: str, text: str) -> None:
        """Write down what happened."""
        self.reports.event(kind, text, self.state.epoch + 1, self.state.step)

    @property
    def last(self) -> Path:
        """The checkpoint that holds all there is to go on."""
        return self.folder / "weights" / "last.pt"

    @property
    def best(self) -> Path:
        """The averaged weights of the best epoch."""
        return self.folder / "weights" / "best.pt"

    @property
    def ramp(self) -> float:
        """Epochs over which the window grows."""
        return self.schedule.warmup if self.settings.accumulate_warmup else 0.0

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss terms."""
        return self.state.network.head.terms

    @cached_property
    def judged(self) -> frozenset[int] | None:
        """The classes whose detections count in validation; None: all."""
        classes = None if self.settings.single_cls else self.settings.classes
        return None if classes is None else class_numbers(classes, self.names)

    @cached_property
    def truth(self) -> GroundTruth:
        """The true boxes of the validation images."""
        return ground_truth_of(self.validation.index)
