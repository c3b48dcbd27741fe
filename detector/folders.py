"""Folders of results: runs/train, runs/train2, ..."""

from contextlib import suppress
from itertools import count
from pathlib import Path

from detector.errors import ConfigError


def create_folder(project: Path, name: str | None, default: str, exist_ok: bool) -> Path:
    """A new run folder project/name, or the next free project/default, default2, ...

    Raises ConfigError where the named folder exists and `exist_ok` is off.
    """
    project = project.resolve()
    try:
        if name is not None:
            folder = project / name
            folder.mkdir(parents=True, exist_ok=exist_ok)
            return folder
        for number in count(1):
            folder = project / (default if number == 1 else f"{default}{number}")
            with suppress(FileExistsError):  # made by another run meanwhile: take the next
                folder.mkdir(parents=True)
                return folder
    except FileExistsError:
        raise ConfigError(
            f"{folder}: this run folder exists; choose another name=, go on with resume={folder}, "
            "or write into it with exist_ok=true"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{project}: cannot make a run folder here: {error.strerror}; choose another project="
        ) from None
    raise AssertionError("unreachable")
