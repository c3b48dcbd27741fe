"""One trial: a training run in a folder of its own, whose epochs Optuna is told."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detector import checkpoint_file
from detector.config.settings import Settings, validated
from detector.errors import ConfigError, StopTraining, TrainingError
from detector.memory import is_out_of_memory
from detector.reporting.progress import Bar
from detector.run.build import Images
from detector.run.loop import TrainResult
from detector.run.resume import Resume, take_up
from detector.run.run import Say, Watch
from detector.search.objectives import LATENCY, Objective, latency

if TYPE_CHECKING:
    from optuna.trial import Trial

TRIES = 5  # of a trial that ends its process, as where the system has no memory left, before it counts as failed
SHOWN = "{desc}  epoch {n_fmt}/{total_fmt} {bar:16} {elapsed}"  # on a terminal, while a trial is trained
Train = Callable[[Settings, Resume | None, Say, Watch, Images], TrainResult]


@dataclass(frozen=True)
class Outcome:
    """What came of a trial."""

    values: tuple[float, ...] = ()  # one an objective; none of a trial that did not come to its end
    pruned: str = ""  # when, of a trial that was ended early
    failed: str = ""  # why


def folder_name(number: int) -> str:
    return f"trial{number:03d}"


def settings_of(common: Mapping[str, Any], params: Mapping[str, Any], folder: Path) -> Settings:
    """The settings of the trial in a folder: those of all trials, no pictures unless they say so, and its own."""
    place = {"project": str(folder.parent), "name": folder.name}
    return validated(Settings, {"plots": False, **common, **params, **place}, {}, folder.name)


def begin(settings: Settings, folder: Path, machine: Mapping[str, Any]) -> tuple[Settings, Resume | None]:
    """The settings to train by, and the checkpoint to go on from where the trial has one.

    One that was killed before its first starts again. CheckpointError where there is one that cannot be read.
    """
    if any((folder / "weights").glob("*.pt")):
        return take_up(validated(Settings, {**machine, "resume": str(folder)}, {}, folder.name))
    if folder.exists():
        shutil.rmtree(folder)
    return settings, None


class Reporting:
    """What a run's epochs are told by, each once, and what ends the run of a trial that is not worth going on with."""

    def __init__(self, trial: "Trial", objective: Objective | None, epochs: int) -> None:
        """`objective`: None where there are several, of which Optuna wants no reports and prunes none."""
        self.trial, self.objective, self.epochs = trial, objective, epochs
        self.pruned = ""
        told = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._last = max(told, default=0)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics.csv. Raises StopTraining where the pruner says so; never after the last epoch."""
        epoch = int(row["epoch"])
        if self.objective is None or epoch < self._last:  # told, and decided, before the run was resumed
            return
        value = row.get(self.objective.name, math.nan)
        if not math.isfinite(value):
            return
        if epoch > self._last:
            self.trial.report(value, epoch)
            self._last = epoch
        if epoch < self.epochs and self.trial.should_prune():
            self.pruned = f"after epoch {epoch} with {self.objective.name} {self.objective.text(value)}"
            raise StopTraining("the pruner")

    def beside(self, bar: Bar) -> Callable[[Mapping[str, Any]], None]:
        """The same, with a bar that shows the epochs."""
        bar.update(self._last)

        def take(row: Mapping[str, Any]) -> None:
            bar.update(int(row["epoch"]) - bar.n)
            self(row)

        return take

    def catch_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take the rows that a run has when it is resumed: it may have been killed before they were told."""
        try:
            for row in rows:
                self(row)
        except StopTraining:
            pass


def run_trial(
    trial: "Trial",
    settings: Settings,
    machine: Mapping[str, Any],
    objectives: Sequence[Objective],
    train: Train,
    images: Images,
    say: Say,
) -> Outcome:
    """Train a trial, from where it stands. Settings with which no training is possible are a failed trial.

    What is nothing of the trial's own, as damaged data or a full disk, is raised, and so is Interrupted.
    """
    folder = Path(settings.project) / str(settings.name)
    try:
        settings, resume = begin(settings, folder, machine)
        reporting = Reporting(trial, objectives[0] if len(objectives) == 1 else None, settings.epochs)
        if tries(trial, resume.saved["step"] if resume else 0) > TRIES:
            return Outcome(failed=f"begun {TRIES} times at the same place, and each time its process was ended there")
        if resume:
            say(f"{folder.name}  goes on, with {resume.saved['epoch']} of {settings.epochs} epochs done")
            reporting.catch_up(resume.saved["history"])
        if not reporting.pruned:
            with Bar(desc=folder.name, total=settings.epochs, disable=None, leave=False, bar_format=SHOWN) as bar:
                watch = Watch(on_epoch=reporting.beside(bar), bars=False)
                result = train(settings, resume, _warnings(say, folder.name, bar), watch, images)
        if reporting.pruned:
            return Outcome(pruned=reporting.pruned)
        return _measured(result, settings, objectives, images)
    except (TrainingError, ConfigError) as error:
        if isinstance(error.__cause__, OSError):
            raise
        return Outcome(failed=f"{type(error).__name__}: {error}")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Outcome(failed="out of memory before its first step; a smaller imgsz or model")


def tries(trial: "Trial", step: int) -> int:
    """How many times the trial was begun at this step, this time among them: no progress was saved in between."""
    at, count = trial.user_attrs.get("begun", (None, 0))
    count = count + 1 if at == step else 1
    trial.set_user_attr("begun", [step, count])
    return count


def _measured(result: TrainResult, settings: Settings, objectives: Sequence[Objective], images: Images) -> Outcome:
    """What the trial's best.pt has of the objectives."""
    row, values = checkpoint_file.read(result.best)["metrics"], []
    for one in objectives:
        if one.name == LATENCY:
            values.append(latency(result.best, settings, images.indices(settings, lambda text: None)[1]))
        else:
            values.append(float(row.get(one.name, math.nan)))
        if not math.isfinite(values[-1]):
            return Outcome(failed=f"metrics.csv has no number for {one.name} in epoch {row.get('epoch')}")
    return Outcome(tuple(values))


def _warnings(say: Say, name: str, bar: Bar) -> Say:
    """Who says of a run only what is wrong with it, each kind of line once."""
    said: set[str] = set()

    def warn(text: str) -> None:
        if text.startswith(("warning: ", "memory    ran out")) and text not in said:
            said.add(text)
            with bar.external_write_mode():
                say(f"{name}  {text}")

    return warn
