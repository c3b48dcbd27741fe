"""Checkpoints of a run: when it is saved, where, and what happens when it cannot be. Only the main process writes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from detector import checkpoint_file, distributed
from detector.errors import TrainingError
from detector.reporting.plots import plot_history
from detector.reporting.table import write_csv
from detector.run.run import Run

# What best.pt holds: the averaged weights and what rebuilds their network, no state to go on from.
LEAN = ("description", "names", "imgsz", "settings", "metrics", "ema", "epoch")


def due(run: Run) -> bool:
    """Whether to save now, inside an epoch: `save_minutes` have passed, or an epoch's end was put off.

    Not after a step that was not finite: what follows may show that the weights of the step before were to blame, and
    then the file from before it is the last good one.
    """
    minutes = run.settings.save_minutes
    passed = minutes > 0 and time.monotonic() - run.last_save >= 60 * minutes
    return (passed or run.put_off) and not run.state.skipped_in_a_row


def save(run: Run) -> None:
    """Write last.pt as of now; the one before stays as last.prev.pt."""
    save_last(run, contents_of(run))


def save_epoch(run: Run) -> None:
    """Write all that a finished epoch leaves: last.pt and, where they are due, best.pt and epochN.pt.

    best.pt comes after last.pt, of which it is a part: where one is missing after a crash, it is made from the other.
    After a step that was not finite last.pt is put off until one that is, but for the end of the run.
    """
    state, settings, contents = run.state, run.settings, contents_of(run)
    if settings.save_period > 0 and state.epoch % settings.save_period == 0:
        write(run, epoch_file(run, state.epoch), contents)
    if state.skipped_in_a_row and state.epoch < settings.epochs:
        run.put_off = True
    else:
        save_last(run, contents)
    if state.best.epoch == state.epoch:
        save_best(run, contents)


def epoch_file(run: Run, epoch: int) -> Path:
    """Where `save_period` keeps an epoch's checkpoint."""
    return run.folder / "weights" / f"epoch{epoch}.pt"


def save_best(run: Run, contents: dict[str, Any]) -> None:
    """Make best.pt the averaged weights of a checkpoint's contents."""
    write(run, run.best, {key: contents[key] for key in LEAN})


def save_last(run: Run, contents: dict[str, Any]) -> None:
    write(run, run.last, contents, keep_previous=True)
    run.last_save, run.put_off = time.monotonic(), False


def save_table(run: Run) -> None:
    """Write metrics.csv and the curves: what the state says of the finished epochs."""
    history = run.state.history
    if not distributed.is_main() or not history:
        return
    with writing(run, run.folder / "metrics.csv"):
        write_csv(run.folder / "metrics.csv", history)
        if run.settings.plots:
            plot_history(history, run.folder / "curves.png", run.terms)


def contents_of(run: Run) -> dict[str, Any]:
    """A checkpoint's contents as of now. TrainingError where they hold values that are not finite."""
    state, settings = run.state, run.settings
    contents = {
        "description": state.network.description,
        "names": list(run.names),
        "imgsz": settings.imgsz,
        "images": len(run.training),
        "image_names": run.training.index.digest,
        "settings": settings.model_dump(mode="json"),
        "metrics": state.history[-1] if state.history else {},
        **state.state_dict(),
    }
    if name := checkpoint_file.not_finite(contents):
        raise TrainingError(
            f"{name} holds values that are not finite, and a run cannot recover from that; nothing was saved. "
            f"Go on from the last good checkpoint with a lower lr0: detector train resume={run.folder} lr0=..."
        )
    return contents


def write(run: Run, path: Path, contents: dict[str, Any], keep_previous: bool = False) -> None:
    if distributed.is_main():
        with writing(run, path):
            checkpoint_file.write(path, contents, keep_previous)


@contextmanager
def writing(run: Run, path: Path) -> Iterator[None]:
    """A context that writes into the run's folder; what becomes of a full disk is the run's `on_save_error`."""
    try:
        yield
    except OSError as error:
        problem = f"{path}: cannot be written: {error.strerror}; the file that was there is kept"
        if run.settings.on_save_error == "stop":
            raise TrainingError(f"{problem}. Make room and go on with resume={run.folder}") from None
        run.say(f"warning: {problem}, and the run goes on (on_save_error: warn)")
