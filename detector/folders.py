"""Folders of results: runs/train, runs/train2, ..."""

from contextlib import suppress
from itertools import count
from pathlib import Path

from detector.errors import ConfigError

# All that a training run may leave in its folder, but for settings.yaml and the lock, which the next one replaces.
RUN_FILES = (
    "weights/last.pt",
    "weights/last.prev.pt",
    "weights/best.pt",
    "weights/epoch[0-9]*.pt",
    "metrics.csv",
    "steps.jsonl",
    "events.jsonl",
    "report.html",
    "tensorboard/events.out.tfevents.*",
    "curves.png",
    "precision_recall.png",
    "f1.png",
    "confusion.png",
    "validation.jpg",
    "train_epoch[0-9]*_batch[0-9]*.jpg",
)


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
            "or put the new run in its place with exist_ok=true"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{project}: cannot make a run folder here: {error.strerror}; choose another project="
        ) from None
    raise AssertionError("unreachable")


def remove_run(folder: Path) -> int:
    """Remove what an earlier training run wrote into a folder, so that nothing of it stands among the new run's files.

    Other files stay. To be called with the folder's lock held. Returns how many files that were; ConfigError where one
    cannot be removed.
    """
    old = [file for pattern in RUN_FILES for file in sorted(folder.glob(pattern)) if file.is_file()]
    try:
        for file in old:
            file.unlink()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: of an earlier run, cannot be removed: {error.strerror}; choose another name="
        ) from None
    return len(old)


def last_run(project: Path) -> Path:
    """The run in a folder of runs that was saved last. Raises ConfigError where there is none."""
    saved = [*project.resolve().glob("*/weights/last.pt"), *project.resolve().glob("*/weights/last.prev.pt")]
    if not saved:
        raise ConfigError(f"resume=true: no run in {project}; name the run's folder: resume=runs/train")
    return max(saved, key=lambda file: file.stat().st_mtime).parent.parent
