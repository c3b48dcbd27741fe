"""The study of a search on Optuna: where it is kept, what it was begun with, and how a trial's parameters are drawn.

A sampler of Optuna's has a generator that moves on with every draw, and is not saved. Here each draw has one of its
own, by the seed, the trial's number and the parameter: what a trial is depends on the trials before it alone, and not
on which process draws or on what it drew before. So a search that is killed and goes on is the one that was not.
"""

import hashlib
import importlib
import json
import math
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from detector.config.settings import Settings
from detector.errors import ConfigError, DetectorError, OutputError
from detector.search.space import MACHINE, NOT_SEARCHED, Space

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

NAME = "search"  # of the study in its storage; hyperband's brackets follow from it
FILES = {"sqlite": "study.db", "journal": "study.journal"}
BEGUN_WITH, MACHINES, TRIALS = "begun_with", "machine", "trials"  # attributes of the study
STARTUP = 5  # trials that come to their end before one is held against them
WAIT = 60  # seconds for another worker that writes
# What a worker may have otherwise than the one that began the search.
FREE = {name for name, reason in NOT_SEARCHED.items() if reason == MACHINE}


def optuna() -> ModuleType:
    """The package, told to say little. Raises ConfigError where it is not installed."""
    try:
        package = importlib.import_module("optuna")
    except ImportError:
        raise ConfigError("detector search needs optuna: pip install 'detector[search]'") from None
    package.logging.set_verbosity(package.logging.ERROR)
    warnings.filterwarnings("ignore", category=package.exceptions.ExperimentalWarning)
    return package


@dataclass(frozen=True)
class Definition:
    """What a search is: another one of these is another search."""

    common: dict[str, Any]  # settings of all trials
    space: dict[str, Any]
    objectives: list[str]
    pruner: str

    @classmethod
    def of(cls, common: Mapping[str, Any], space: Space, objectives: list[str], pruner: str) -> "Definition":
        mine = {key: value for key, value in sorted(common.items()) if key not in FREE}
        return cls(mine, space.described(), objectives, pruner)

    def text(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True)

    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    def flat(self) -> dict[str, Any]:
        """{what it is called: value} of all there is to compare."""
        return {
            **self.common,
            **{f"space: {name}": value for name, value in self.space.items()},
            "objectives": self.objectives,
            "pruner": self.pruner,
        }

    def differing(self, other: "Definition") -> list[str]:
        """A line for each thing that is otherwise in another one."""
        mine, others = self.flat(), other.flat()
        names = [name for name in {**mine, **others} if mine.get(name) != others.get(name)]
        return [f"    {name}: {_told(mine, name)} -> {_told(others, name)}" for name in names]


def _told(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "(not written)"


def kept_in(folder: Path) -> str | None:
    """The kind of storage that a search's folder has; None: it holds no search."""
    return next((kind for kind, file in FILES.items() if (folder / file).is_file()), None)


def open_study(folder: Path, kind: str, directions: list[str] | None = None) -> "Study":
    """The study in a folder; with `directions` it is begun where there is none. ConfigError where it is damaged."""
    package, file = optuna(), folder / FILES[kind]
    try:
        storage = _storage(package, file, kind)
        if directions is None:
            return package.load_study(study_name=NAME, storage=storage, sampler=package.samplers.RandomSampler())
        return package.create_study(study_name=NAME, storage=storage, directions=directions, load_if_exists=True)
    except DetectorError:
        raise
    except Exception as error:  # of SQLAlchemy, of Optuna or of reading JSON: they have no base in common
        said = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{file}: cannot be read as a search ({type(error).__name__}: {said}); "
            "put back a copy of it, or begin a new search under another name="
        ) from None


def _storage(package: ModuleType, file: Path, kind: str) -> "BaseStorage":
    if kind == "journal":
        lock = package.storages.journal.JournalFileOpenLock(str(file))
        _mend(file, lock)
        return package.storages.JournalStorage(package.storages.journal.JournalFileBackend(str(file), lock))
    connect = {
        "creator": lambda: sqlite3.connect(file, timeout=WAIT)
    }  # a path may have ? and % in it, as a URL may not
    return package.storages.RDBStorage("sqlite://", engine_kwargs=connect)


def _mend(journal: Path, lock: Any) -> None:
    """Cut off a line that was half written when its worker was killed, before another is written behind it."""
    lock.acquire()
    try:
        content = journal.read_bytes() if journal.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(journal, whole)
    finally:
        lock.release()


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """A context in which the study is written; that the disk refuses is told as OutputError."""
    package = optuna()
    try:
        yield
    except package.exceptions.StorageInternalError as error:
        said = str(error.__cause__ or error).splitlines()[0]
        raise OutputError(
            f"{folder}: the search cannot be written ({said}); make room, and go on with: "
            f"detector search resume={folder}"
        ) from None


def begun_with(study: "Study") -> Definition | None:
    """What the study was begun with; None: nobody has begun it."""
    text = study.user_attrs.get(BEGUN_WITH)
    return None if text is None else Definition(**json.loads(text["definition"]))


def begin(study: "Study", definition: Definition, folder: Path) -> None:
    """Begin a study, or take part in it. ConfigError, with what differs, where it was begun with something else."""
    before = begun_with(study)
    if before is None:
        kept_text = {"digest": definition.digest(), "definition": definition.text()}
        study.set_user_attr(BEGUN_WITH, kept_text)
        return
    if before.digest() != definition.digest():
        lines = "\n".join(before.differing(definition))
        raise ConfigError(
            f"{folder}: holds another search, and its trials would be no trials of this one:\n{lines}\n"
            f"choose another name=, or go on with that one: detector search resume={folder}"
        )


def prepare(study: "Study", pruner: str, common: Settings) -> str:
    """Give the study its pruner, and say which it is; none where there are several objectives, as Optuna has it."""
    pruners = optuna().pruners
    if pruner == "none" or len(study.directions) > 1:
        study.pruner = pruners.NopPruner()
        return "none" if pruner == "none" else "none: with several objectives no trial is ended early"
    if pruner == "hyperband":
        study.pruner = pruners.HyperbandPruner(min_resource=1, max_resource=common.epochs)
        return f"hyperband, over {common.epochs} epochs"
    warm = max(1, math.ceil(common.warmup()))
    study.pruner = pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warm)
    return f"median of the trials before, once there are {STARTUP}, from epoch {warm} on"


def asked(study: "Study", space: Space, settings: Mapping[str, Any], seed: int, number: int | None) -> "Trial":
    """A trial with its parameters: the one of this number, which stands as it was, or a new one.

    `settings`: all that the trials have in common, for the conditions of the space.
    """
    package = optuna()
    trials = study.get_trials(deepcopy=False)
    fresh = number is None
    number = len(trials) if fresh else number
    # A study of its own for each trial: one keeps the trials that it saw at its last `ask`.
    sampler, pruner = _sampler(package, seed, number), study.pruner
    study = package.load_study(study_name=NAME, storage=study._storage, sampler=sampler, pruner=pruner)
    # Optuna's own `ask` makes a trial so, too: one that is there has the parameters that were drawn already.
    trial = study.ask() if fresh else package.trial.Trial(study, trials[number]._trial_id)
    assert trial.number == number, "whoever asks has the turn"
    _ = trial.relative_params  # what is drawn together is drawn now, by the trial's sampler, and not when first wanted
    values = dict(settings)
    for parameter in space.parameters:
        if parameter.active(values):
            study.sampler = _sampler(package, seed, number, parameter.name)
            values[parameter.name] = parameter.suggested(trial)
    return trial


def _sampler(package: ModuleType, *words: Any) -> Any:
    """A sampler whose generator follows from the words."""
    seed = int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:4], "little")
    return package.samplers.TPESampler(seed=seed)


def running(study: "Study") -> list["FrozenTrial"]:
    """The trials that are begun and not finished, by whoever."""
    return [one for one in study.get_trials(deepcopy=False) if not one.state.is_finished()]
