"""A search, read as a table of contents: trial after trial, by as many workers as there are."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from detector.config.settings import Settings, validated
from detector.errors import ConfigError
from detector.run.build import Images
from detector.run.run import Say
from detector.search.objectives import Objective
from detector.search.space import Space
from detector.search.study import asked, kept, optuna, running
from detector.search.telling import introduce, trial_line
from detector.search.trial import Outcome, Train, folder_name, run_trial, settings_of
from detector.search.turns import claim, turn

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

FAILURES = 5  # in a row, after which the fault is not one trial's


@dataclass(frozen=True)
class Search:
    """A search as one worker sees it."""

    folder: Path
    study: "Study"
    space: Space
    objectives: tuple[Objective, ...]
    common: Mapping[str, Any]  # settings of all trials, as far as they are written
    machine: Mapping[str, Any]  # those of them that another worker may have otherwise
    pruner: str  # in words
    total: int  # trials, by all workers
    say: Say

    @property
    def given(self) -> dict[str, Any]:
        """What all trials have in common, with what the space fixes."""
        return {**self.common, **self.machine, **self.space.fixed}


def run(search: Search, train: Train, images: Images) -> None:
    """Train trials until there are as many as there are to be, and none is left that nobody is at.

    Whatever ends it before, Ctrl-C or an error, the trial in work is left to be gone on with.
    """
    introduce(search)
    try:
        run_trials(search, train, images)
    except BaseException:
        search.say(f"stopped   to go on: detector search resume={search.folder}")
        raise


def run_trials(search: Search, train: Train, images: Images) -> None:
    failures = 0
    while (taken := next_trial(search)) is not None:
        trial, held = taken
        start = time.monotonic()
        with closing(held), kept(search.folder):
            settings = settings_of(search.given, trial.params, search.folder / folder_name(trial.number))
            outcome = run_trial(trial, settings, search.machine, search.objectives, train, images, search.say)
            tell(search, trial, outcome)
        search.say(trial_line(search, trial.number, outcome, time.monotonic() - start))
        failures = failures + 1 if outcome.failed else 0
        if failures == FAILURES:
            raise ConfigError(
                f"{search.folder}: {failures} trials in a row failed, the last with\n    {outcome.failed}\n"
                "mend what is wrong and go on, or begin a search of another space"
            )


def next_trial(search: Search) -> "tuple[Trial, BinaryIO] | None":
    """The trial to train next, and the claim to it; None: there is none.

    First those that a worker left which is gone; then new ones, up to the total.
    """
    settings = validated(Settings, search.given, {}, "search").model_dump(mode="json")
    with turn(search.folder), kept(search.folder):
        left = [one.number for one in running(search.study)]
        count = len(search.study.get_trials(deepcopy=False))
        for number in [*left, *([count] if count < search.total else [])]:
            held = claim(search.folder, number)
            if held is not None:
                old = number if number < count else None
                return asked(search.study, search.space, settings, settings["seed"], old), held
    return None


def tell(search: Search, trial: "Trial", outcome: Outcome) -> None:
    """Have the study keep what came of a trial."""
    states = optuna().trial.TrialState
    if outcome.failed:
        trial.set_user_attr("failed", outcome.failed)
        search.study.tell(trial, state=states.FAIL)
    elif outcome.pruned:
        search.study.tell(trial, state=states.PRUNED)
    else:
        search.study.tell(trial, list(outcome.values))
