"""What a run tells while it trains: its journal and loggers, and the functions of whoever called it.

All of it on the main process; the others pass through.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from detector import distributed
from detector.errors import Interrupted, StopTraining
from detector.reporting.journal import ENDINGS, Journal, WindowRow, read_events
from detector.reporting.progress import process_memory
from detector.reporting.reports import EpochRow, Facts
from detector.run.resume import Resume
from detector.run.run import Run
from detector.step.plan import Window, recut
from detector.step.schedule import Rates
from detector.step.step import StepReport

LAST = ("last.pt", "last.prev.pt")  # the checkpoints by which a run goes on as it would have


def begin_reports(run: Run, resume: Resume | None, identity: str) -> None:
    """Have the reports stand where the run does, whose folder is there now."""
    state = run.state
    before = read_events(run.folder) if resume else []
    run.reports.journal = Journal(run.folder)
    left = resume is not None and (bool(resume.changes) or resume.path.name not in LAST)
    facts = Facts(identity, run.folder, run.settings.model_dump(mode="json"), left)
    run.reports.begin(facts, state.epoch + 1, state.done, state.history, state.step + state.skipped)
    if resume is None:
        run.note("begun", "")
        return
    killed = ["after it was killed"] if before and before[-1].kind not in ENDINGS else []
    changes = [f"{key} {was} -> {now}" for key, (was, now) in sorted(resume.changes.items())]
    run.note("resumed", ", ".join([f"from {resume.path.name}", *killed, *changes]))


def tell_window(run: Run, window: Window, report: StepReport, rates: Rates, seconds: float, waited: float) -> None:
    """A window is done, after so many seconds, of which a share was waited for images."""
    if not distributed.is_main():
        return
    state = run.state
    row = WindowRow(
        window=run.reports.windows + 1,
        epoch=state.epoch + 1,
        done=state.done,
        step=state.step,
        images=report.images,
        cut=[[len(micro) for micro in replica] for replica in recut(window, state.batch).micro_batches],
        applied=report.applied,
        losses=dict(zip(run.terms, report.losses, strict=True)),
        weight=report.weight,
        norm=report.norm,
        lr=rates.lr["weights"],
        loss_scale=state.scaler.get_scale(),
        seconds=seconds,
        waited=waited,
        memory=gpu_memory(run.device) or process_memory(),
        time=round(time.time(), 3),
    )
    run.reports.window(row)
    if run.watch.on_window:
        call(run, run.watch.on_window, asdict(row))


def tell_epoch(run: Run, row: EpochRow) -> None:
    """An epoch is done; `row` is its line of metrics.csv."""
    if not distributed.is_main():
        return
    run.reports.epoch(row)
    if run.watch.on_epoch:
        call(run, run.watch.on_epoch, dict(row))


def call(run: Run, function: Callable[[dict[str, Any]], None], row: dict[str, Any]) -> None:
    """Hand a row to the caller's function, which may ask the run to stop."""
    try:
        function(row)
    except StopTraining as stop:
        run.stopping = str(stop) or "a callback"


def tell_failure(run: Run, error: BaseException) -> None:
    """The run is over, by a signal or an error."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        kind, text = "stopped", str(error) or "by Ctrl-C"
    else:
        kind, text = "failed", f"{type(error).__name__}: {error}"
    run.note(kind, text)
    run.reports.end(kind)


def tell_end(run: Run, kind: str, text: str) -> None:
    """The run is over, with its results in its folder."""
    run.note(kind, text)
    run.reports.end(kind, [*run.folder.glob("*.png"), *run.folder.glob("*.jpg")])


def gpu_memory(device: torch.device) -> int | None:
    """Bytes that were allocated at most; None where the device is no GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
