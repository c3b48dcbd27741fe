"""A run, read as a table of contents."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from detector.config import Settings
from detector.data.batch import Batch
from detector.data.loader import TrainingLoader, training_loader, validation_batches
from detector.errors import ConfigError
from detector.evaluation.coco import GroundTruth
from detector.evaluation.evaluate import Evaluation, evaluate_network, ground_truth_of
from detector.reporting.draw import save_image
from detector.reporting.plots import plot_history
from detector.reporting.progress import Progress
from detector.reporting.samples import training_batch_image
from detector.reporting.summary import draw_evaluation
from detector.reporting.table import format_class_table, write_csv
from detector.training import checkpoint
from detector.training.optim import Rates
from detector.training.plan import epoch_windows
from detector.training.setup import Parts, Say, prepare, set_modes
from detector.training.state import Best, TrainState
from detector.training.step import StepReport, train_window

FITNESS = "mAP50-95"


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left behind."""

    folder: Path
    best: Path  # the checkpoint with the best validation
    last: Path
    metrics: dict[str, float]  # of the best checkpoint


def say_now(text: str) -> None:
    """Print at once, also into a file or a pipe."""
    print(text, flush=True)


def train(
    settings: Settings,
    resume_from: Path | None = None,
    saved: dict[str, Any] | None = None,
    say: Say = say_now,
) -> TrainResult:
    """Train by the settings, from the start or from the checkpoint `saved`, which was read from `resume_from`.

    Raises ConfigError, DataError or CheckpointError before anything is written.
    """
    parts, state = prepare(settings, saved, say)
    folder = (
        resume_from.parent.parent
        if resume_from
        else create_folder(settings.project, settings.name, "train", settings.exist_ok)
    )
    (folder / "weights").mkdir(exist_ok=True)
    (folder / "settings.yaml").write_text(parts.settings.to_yaml(), encoding="utf-8")
    say(f"run       {folder}")

    loader = training_loader(parts.training, parts.workers, pin_memory=parts.device.type == "cuda")
    truth = ground_truth_of(parts.validation.index)
    try:
        while state.epoch < settings.epochs and not out_of_patience(state, settings.patience):
            start = time.perf_counter()
            row = train_epoch(parts, state, loader, folder)
            if settings.val:
                row |= validate(parts, state, truth).row()
            row["seconds"] = time.perf_counter() - start
            record(parts, state, row, folder)
            say(progress_line(row, state, settings.epochs))
    except BaseException:
        if state.epoch:
            say(f"go on with: detector train resume={folder}")
        raise
    if out_of_patience(state, settings.patience):
        say(f"stopped early: no better {FITNESS} in {settings.patience} epochs")
    return finish(parts, state, truth, folder, say)


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


def train_epoch(parts: Parts, state: TrainState, loader: TrainingLoader, folder: Path) -> dict[str, float]:
    """Train from the state's position to the end of its epoch; returns the epoch's row of metrics."""
    settings, images = parts.settings, len(parts.training)
    windows = list(epoch_windows(images, parts.cut, settings.seed, state.epoch, state.done, parts.ramp))
    batches = loader.batches((state.epoch, micro) for window in windows for micro in window.micro_batches[0])
    if settings.plots and wants_pictures(state.epoch, settings):
        batches = pictured(batches, parts.names, folder, state.epoch)
    set_modes(state.network, settings.freeze_bn)

    sums = torch.zeros(3, dtype=torch.float64)
    trained = 0
    with Progress(state.epoch, settings.epochs, images, start=state.done) as bar:
        for window in windows:
            progress = state.epoch + (window.done + window.images) / images
            rates = rates_at(parts, progress)
            micro_batches = (batch.to(parts.device) for batch in islice(batches, window.accumulate))
            report = train_window(
                state, parts.criterion, window, micro_batches, rates, parts.precision, settings.clip_norm
            )
            state.done = window.done + window.images
            trained += window.images
            sums += torch.tensor(report.losses, dtype=torch.float64) * window.images
            bar.update(state.done, shown(report), rates.lr, window.accumulate, gpu_memory(parts.device))
    box, cls, dfl = (sums / max(trained, 1)).tolist()
    state.epoch, state.done = state.epoch + 1, 0
    return {
        "epoch": state.epoch,
        "step": state.step,
        "box": box,
        "cls": cls,
        "dfl": dfl,
        "lr": rates_at(parts, state.epoch).lr,
    }


def rates_at(parts: Parts, progress: float) -> Rates:
    schedule = parts.schedule
    return Rates(schedule.lr(progress), schedule.lr(progress, bias=True), schedule.momentum_at(progress))


def shown(report: StepReport) -> dict[str, float]:
    return dict(zip(("box", "cls", "dfl"), report.losses, strict=True))


def gpu_memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def wants_pictures(epoch: int, settings: Settings) -> bool:
    """The first epoch, and the first after mosaic closes."""
    return epoch in (0, settings.epochs - settings.close_mosaic)


def pictured(
    batches: Iterable[Batch], names: tuple[str, ...], folder: Path, epoch: int, most: int = 3
) -> Iterator[Batch]:
    """The same batches; the first few are also drawn into the run folder."""
    for number, batch in enumerate(batches):
        if number < most:
            picture = training_batch_image(batch.images, batch.boxes_xyxy, batch.classes, batch.image_index, names)
            save_image(folder / f"train_epoch{epoch + 1}_batch{number}.jpg", picture)
        yield batch


def validate(parts: Parts, state: TrainState, truth: GroundTruth) -> Evaluation:
    """The averaged network's COCO metrics on the validation images."""
    return evaluate_network(
        state.ema.network,
        validation_batches(parts.validation, parts.settings.batch, parts.workers),
        truth,
        parts.names,
        device=parts.device,
        autocast=parts.precision.autocast,
    )


def record(parts: Parts, state: TrainState, row: dict[str, float], folder: Path) -> None:
    """Take a finished epoch into the history, the table, the curves and the checkpoints."""
    state.history.append(row)
    fitness = row.get(FITNESS, float(state.epoch))  # without validation the last epoch counts as the best
    better = fitness > state.best.fitness
    if better:
        state.best = Best(fitness, state.epoch)
    about = {
        "description": state.network.description,
        "names": list(parts.names),
        "imgsz": parts.settings.imgsz,
        "settings": parts.settings.model_dump(mode="json"),
        "metrics": row,
    }
    contents = {**about, **state.state_dict()}
    checkpoint.write(folder / "weights" / "last.pt", contents)
    if better:
        lean = {**about, **{key: contents[key] for key in ("model", "ema", "epoch")}}
        checkpoint.write(folder / "weights" / "best.pt", lean)
    if parts.settings.save_period > 0 and state.epoch % parts.settings.save_period == 0:
        checkpoint.write(folder / "weights" / f"epoch{state.epoch}.pt", contents)
    write_csv(folder / "metrics.csv", state.history)
    if parts.settings.plots:
        plot_history(state.history, folder / "curves.png")


def out_of_patience(state: TrainState, patience: int) -> bool:
    return bool(patience) and state.epoch - max(state.best.epoch, 0) >= patience


def progress_line(row: dict[str, float], state: TrainState, epochs: int) -> str:
    losses = "  ".join(f"{name} {row[name]:.3f}" for name in ("box", "cls", "dfl"))
    metrics = "  ".join(f"{name} {row[name]:.3f}" for name in ("mAP50", FITNESS) if name in row)
    mark = "  best" if state.best.epoch == state.epoch else ""
    skipped = f"  {state.skipped} steps skipped" if state.skipped else ""
    return f"epoch {state.epoch}/{epochs}  {losses}  {metrics}  {row['seconds']:.1f} s{mark}{skipped}"


def finish(parts: Parts, state: TrainState, truth: GroundTruth, folder: Path, say: Say) -> TrainResult:
    """Measure the best checkpoint once more, print its table and draw its curves."""
    best, last = folder / "weights" / "best.pt", folder / "weights" / "last.pt"
    state.ema.network.load_state_dict(checkpoint.read(best)["ema"])
    evaluation = validate(parts, state, truth)
    say(format_class_table(evaluation, parts.names))
    if parts.settings.plots:
        draw_evaluation(evaluation, parts.validation, parts.names, folder)
    say(f"best      {best} (epoch {state.best.epoch})")
    say(f"pictures  {folder}")
    return TrainResult(folder, best, last, evaluation.row())
