"""Errors a user can mend. Each message carries the place, the value, the rule and the remedy."""

import difflib
from collections.abc import Iterable


class DetectorError(ValueError):
    """Base of every error that is the input's fault and not the program's."""


class ConfigError(DetectorError):
    """A setting, a run config or a model description is wrong."""


class DataError(DetectorError):
    """A data-set description, an image or a label file is wrong."""


class CheckpointError(DetectorError):
    """A checkpoint is missing, damaged or made for something else."""


class TrainingError(DetectorError):
    """A run cannot go on: its numbers are not finite, or its checkpoint cannot be written."""


class OutputError(DetectorError):
    """A result cannot be written: the disk is full, or the place is not one to write to."""


class Interrupted(BaseException):
    """A signal asked the program to stop; not an error, and not to be caught on the way out."""

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.number = number


class StopTraining(Exception):  # noqa: N818 - says what to do
    """Raised by a function that a run calls (`on_epoch`, `on_window`): save, and end as a run that is finished."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the known word nearest to a misspelt or shortened one, or nothing.

    Near is a slip of the fingers, not a likeness: what is merely similar would send the reader the wrong way.
    """
    bare = {_bare(one): one for one in reversed(list(known))}
    wanted = _bare(word)
    near = difflib.get_close_matches(wanted, bare, n=1, cutoff=0.75)
    if not near and len(wanted) >= 3:  # warm for warmup_epochs, where nothing else begins so; data_path for data
        near = [one for one in bare if one.startswith(wanted)]
        near = near if len(near) == 1 else [one for one in bare if wanted.startswith((f"{one}_", f"{one}."))]
    return f" Did you mean {bare[near[0]]!r}?" if near else ""


def _bare(word: object) -> str:
    return str(word).lower().replace("-", "_")
