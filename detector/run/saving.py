"""What a run leaves: when it is saved, where, and what happens when it cannot be. Only the main process writes.

A checkpoint is copied at the edge of a window; a thread then writes it while the run goes on, file after file in a
fixed order. One save at a time: the next one waits for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from detector import checkpoint_file, distributed
from detector.errors import TrainingError
from detector.reporting.journal import STEPS
from detector.reporting.plots import plot_history
from detector.reporting.table import write_csv
from detector.run.run import Run

# What best.pt holds: the averaged weights and what rebuilds their network, no state to go on from.
LEAN = ("description", "names", "imgsz", "settings", "metrics", "ema", "epoch")
CURVES_SECONDS = 60.0  # drawing them takes half a second


def due(run: Run) -> bool:
    """Whether to save now, inside an epoch: `save_minutes` have passed, or an epoch's end was put off.

    Not after a step that was not finite: what follows may show that the weights of the step before were to blame, and
    then the file from before it is the last good one.
    """
    minutes = run.settings.save_minutes
    passed = minutes > 0 and time.monotonic() - run.last_save >= 60 * minutes
    return (passed or run.put_off) and not run.state.skipped_in_a_row


class Piece(NamedTuple):
    """A file of a save, and what writes it."""

    path: Path
    write: Callable[[], None]


class Problem(NamedTuple):
    """A file that could not be written, and why."""

    path: Path
    error: OSError


def save(run: Run) -> None:
    """Write last.pt as of now; the one before stays as last.prev.pt."""
    write(run, [journal_piece(run), last_piece(run, contents_of(run))])


def save_epoch(run: Run) -> None:
    """Write all that a finished epoch leaves: last.pt and, where they are due, best.pt and epochN.pt; then the table.

    best.pt comes after last.pt, of which it is a part: where one is missing after a crash, it is made from the other.
    After a step that was not finite last.pt is put off until one that is, but for the end of the run.
    """
    state, settings, contents = run.state, run.settings, contents_of(run)
    pieces = [journal_piece(run)]
    if settings.save_period > 0 and state.epoch % settings.save_period == 0:
        pieces.append(piece(run, epoch_file(run, state.epoch), contents))
    if state.skipped_in_a_row and state.epoch < settings.epochs:
        run.put_off = True
    else:
        pieces.append(last_piece(run, contents))
    if state.best.epoch == state.epoch:
        pieces.append(best_piece(run, contents))
    write(run, [*pieces, *table_pieces(run)])


def save_table(run: Run, curves: bool = False) -> None:
    """Write metrics.csv: what the state says of the finished epochs. `curves`: and draw them, be it soon after."""
    write(run, table_pieces(run, curves))


def journal_piece(run: Run) -> Piece:
    """The lines of the windows before a checkpoint: the disk holds them first, so that none is missing after it."""
    return Piece(run.folder / STEPS, run.reports.sync)


def epoch_file(run: Run, epoch: int) -> Path:
    """Where `save_period` keeps an epoch's checkpoint."""
    return run.folder / "weights" / f"epoch{epoch}.pt"


def save_best(run: Run, contents: dict[str, Any]) -> None:
    """Make best.pt the averaged weights of a checkpoint's contents."""
    write(run, [best_piece(run, contents)])


def best_piece(run: Run, contents: dict[str, Any]) -> Piece:
    return piece(run, run.best, {key: contents[key] for key in LEAN})


def last_piece(run: Run, contents: dict[str, Any]) -> Piece:
    run.last_save, run.put_off = time.monotonic(), False
    return piece(run, run.last, contents, keep_previous=True)


def piece(run: Run, path: Path, contents: dict[str, Any], keep_previous: bool = False) -> Piece:
    return Piece(path, partial(write_finite, run.folder, path, contents, keep_previous))


def write_finite(folder: Path, path: Path, contents: dict[str, Any], keep_previous: bool) -> None:
    """Write a checkpoint of the run in a folder. TrainingError where it holds values that are not finite."""
    if name := checkpoint_file.not_finite(contents):
        raise TrainingError(
            f"{name} holds values that are not finite, and a run cannot recover from that; nothing was saved. "
            f"Go on from the last good checkpoint with a lower lr0: detector train resume={folder} lr0=..."
        )
    checkpoint_file.write(path, contents, keep_previous)


def table_pieces(run: Run, curves: bool = False) -> list[Piece]:
    """metrics.csv and the curves, which are drawn again at most every CURVES_SECONDS."""
    history, path = list(run.state.history), run.folder / "metrics.csv"
    if not history:
        return []
    pieces = [Piece(path, partial(write_csv, path, history))]
    if run.settings.plots and (curves or time.monotonic() - run.last_curves >= CURVES_SECONDS):
        run.last_curves, picture = time.monotonic(), run.folder / "curves.png"
        pieces.append(Piece(picture, partial(plot_history, history, picture, run.terms)))
    return pieces


def contents_of(run: Run) -> dict[str, Any]:
    """A checkpoint's contents as of now, copied where they are to be written."""
    state, settings = run.state, run.settings
    contents = {
        "description": state.network.description,
        "names": list(run.names),
        "imgsz": settings.imgsz,
        "images": len(run.training),
        "image_names": run.training.index.digest,
        "settings": settings.model_dump(mode="json"),
        "metrics": state.history[-1] if state.history else {},
        **state.state_dict(),  # which all ranks make together
    }
    settle(run)  # there is one copy at a time
    return checkpoint_file.copied(contents) if distributed.is_main() else contents


def write(run: Run, pieces: Sequence[Piece]) -> None:
    """Have the run's thread write the pieces, once the save before is finished."""
    settle(run)
    if distributed.is_main():
        run.beside.start(partial(written, pieces, run.settings.on_save_error == "warn"))


def written(pieces: Sequence[Piece], go_on: bool) -> list[Problem]:
    """Write the pieces. Returns those that could not be; unless we `go_on` after one, it is the last that was tried."""
    problems = []
    for one in pieces:
        if problems and not go_on:
            break
        try:
            one.write()
        except OSError as error:
            problems.append(Problem(one.path, error))
    return problems


def settle(run: Run, wait: bool = True) -> None:
    """Tell what came of the save before, once it is finished; `wait` false: if it is.

    TrainingError where a tensor was not finite, or by the run's `on_save_error` where a file could not be written.
    """
    for problem in (run.beside.wait() if wait else run.beside.done()) or ():
        refused(run, problem)


def refused(run: Run, problem: Problem) -> None:
    """What becomes of a full disk is the run's `on_save_error`."""
    said = f"{problem.path}: cannot be written: {problem.error.strerror}; the file that was there is kept"
    if run.settings.on_save_error == "stop":
        raise TrainingError(f"{said}. Make room and go on with resume={run.folder}") from problem.error
    run.event("save", f"warning: {said}, and the run goes on (on_save_error: warn)")


@contextmanager
def writing(run: Run, path: Path) -> Iterator[None]:
    """A context that writes into the run's folder itself."""
    try:
        yield
    except OSError as error:
        refused(run, Problem(path, error))
