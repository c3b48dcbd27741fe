"""What a run tells while it trains: its journal and loggers, and the functions of whoever called it.

All of it on the main process; the others pass through.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from detector import checkpoint_file, distributed
from detector.errors import Interrupted, StopTraining
from detector.evaluation.evaluate import Evaluation
from detector.files import replaced
from detector.reporting.journal import ENDINGS, Journal, WindowRow, event_now, read_events
from detector.reporting.progress import process_memory
from detector.reporting.reports import EpochRow, Facts
from detector.reporting.run_page.page import Measured, page
from detector.reporting.run_page.record import read_record
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
        run.note("machine", machine(run))
        return
    killed = ["after it was killed"] if before and before[-1].kind not in ENDINGS else []
    changes = [f"{key} {was} -> {now}" for key, (was, now) in sorted(resume.changes.items())]
    run.note("resumed", ", ".join([f"from {resume.path.name}", *killed, *changes]))
    run.note("machine", machine(run))


def machine(run: Run) -> str:
    """What the run computes with; nothing that tells whose it is."""
    said = ", ".join(f"{name} {version}" for name, version in checkpoint_file.versions().items())
    name = f" ({torch.cuda.get_device_name(run.device)})" if run.device.type == "cuda" else ""
    return (
        f"{said}; {run.device.type}{name}, {run.state.precision.name}; processes: {run.mesh.size}, threads of each: "
        f"{torch.get_num_threads()}, loader processes of each: {run.workers}; {platform.system()}"
    )


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


def write_page(run: Run, evaluation: Evaluation | None, kind: str, text: str) -> None:
    """Write report.html, under `plots`, of a run that ended so; `evaluation` of its best checkpoint, if it has one.

    What keeps the page from being written, a full disk or anything else, is said: it costs the run nothing, and
    `detector report` writes the page again.
    """
    if not distributed.is_main() or not run.settings.plots:
        return
    path = run.folder / "report.html"
    try:
        record = read_record(run.folder)
        ending = event_now(kind, text, run.state.epoch + 1, run.state.step)
        measured = evaluation and Measured(evaluation, run.validation, run.names)
        whole = page(replace(record, events=[*record.events, ending]), measured, "No epoch was finished")
        with replaced(path) as beside:
            beside.write_text(whole, encoding="utf-8", errors="backslashreplace")
        run.say(f"report    {path}")
    except Exception as error:
        run.event("save", f"warning: {path}: not written: {error!r}; detector report {run.folder} tries again")


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
