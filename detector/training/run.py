"""A run, read as a table of contents."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from detector import distributed
from detector.config import Settings
from detector.data.batch import Batch, blank_batch
from detector.data.loader import TrainingLoader, training_loader, validation_batches
from detector.errors import ConfigError, DetectorError
from detector.evaluation.coco import GroundTruth
from detector.evaluation.evaluate import Evaluation, detect, ground_truth_of, judge
from detector.loss.criterion import TERMS
from detector.model.norm import renorm_limits, set_renorm_limits
from detector.reporting.draw import save_image
from detector.reporting.plots import plot_history
from detector.reporting.progress import Progress
from detector.reporting.samples import training_batch_image
from detector.reporting.summary import draw_evaluation
from detector.reporting.table import format_class_table, write_csv
from detector.training import checkpoint
from detector.training.norms import set_modes
from detector.training.optim import Rates
from detector.training.plan import Window, epoch_windows
from detector.training.precision import choose_device
from detector.training.setup import Parts, Say, prepare
from detector.training.state import Best, TrainState
from detector.training.step import train_window

FITNESS = "mAP50-95"
Result = TypeVar("Result")


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
    settings: Settings, resume_from: Path | None = None, saved: dict[str, Any] | None = None, say: Say = say_now
) -> TrainResult:
    """Train by the settings, from the start or from the checkpoint `saved`, which was read from `resume_from`.

    Under torchrun every process calls this alike. Raises ConfigError, DataError or CheckpointError before anything is
    written.
    """
    with distributed.process_group(choose_device(settings.device)):
        if not distributed.is_main():
            say = silent
        parts, state, folder = together(lambda: begin(settings, resume_from, saved, say))
        model = distributed.parallel(state.network, parts.device)
        loader = training_loader(parts.training, parts.workers, pin_memory=parts.device.type == "cuda")
        truth = ground_truth_of(parts.validation.index)
        try:
            while state.epoch < settings.epochs and not out_of_patience(state, settings.patience):
                start = time.perf_counter()
                row = train_epoch(parts, state, model, loader, folder)
                if settings.val and (evaluation := validate(parts, state, truth)):
                    row |= evaluation.row()
                row["seconds"] = time.perf_counter() - start
                row = distributed.from_main(row)
                record(parts, state, row, folder)
                say(progress_line(row, state, settings.epochs))
        except BaseException:
            if state.epoch:
                say(f"go on with: detector train resume={folder}")
            raise
        if out_of_patience(state, settings.patience):
            say(f"stopped early: no better {FITNESS} in {settings.patience} epochs")
        return finish(parts, state, truth, folder, say)


def silent(text: str) -> None:
    """What other ranks than the main one say."""


def together(action: Callable[[], Result]) -> Result:
    """The action's result; where it fails on any rank, its error on every rank."""
    result, error = None, None
    try:
        result = action()
    except DetectorError as failed:
        error = failed
    distributed.fail_together(error)
    return cast(Result, result)


def begin(
    settings: Settings, resume_from: Path | None, saved: dict[str, Any] | None, say: Say
) -> tuple[Parts, TrainState, Path]:
    """Everything checked and built, and then the run's folder."""
    parts, state = prepare(settings, saved, say)
    folder = Path()
    if distributed.is_main():
        if resume_from:
            folder = resume_from.parent.parent
        else:
            folder = create_folder(settings.project, settings.name, "train", settings.exist_ok)
        (folder / "weights").mkdir(exist_ok=True)
        (folder / "settings.yaml").write_text(parts.settings.to_yaml(), encoding="utf-8")
        say(f"run       {folder}")
    return parts, state, folder


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


def train_epoch(
    parts: Parts, state: TrainState, model: nn.Module, loader: TrainingLoader, folder: Path
) -> dict[str, float]:
    """Train from the state's position to the end of its epoch; returns the epoch's row of metrics."""
    settings, images = parts.settings, len(parts.training)
    windows = list(epoch_windows(images, parts.cut, settings.seed, state.epoch, state.done, parts.ramp))
    batches = my_micro_batches(parts, state.epoch, windows, loader)
    if settings.plots and distributed.is_main() and wants_pictures(state.epoch, settings):
        batches = pictured(batches, parts.names, folder, state.epoch)
    set_modes(state.network, settings.norm == "frozen")

    sums = torch.zeros(len(TERMS), dtype=torch.float64)
    trained = 0
    with Progress(state.epoch, settings.epochs, images, state.done, shown=distributed.is_main()) as bar:
        for window in windows:
            progress = state.epoch + (window.done + window.images) / images
            rates = rates_at(parts, progress)
            set_renorm_limits(state.network, *renorm_limits(progress, parts.warmup))
            micro_batches = (batch.to(parts.device) for batch in islice(batches, window.accumulate))
            report = train_window(state, model, parts.rules, window, micro_batches, rates)
            state.done = window.done + window.images
            trained += window.images
            sums += torch.tensor(report.losses, dtype=torch.float64) * window.images
            bar.update(state.done, named(report.losses), rates.lr, window.accumulate, gpu_memory(parts.device))
    state.epoch, state.done = state.epoch + 1, 0
    losses = named((sums / max(trained, 1)).tolist())
    return {"epoch": state.epoch, "step": state.step, **losses, "lr": rates_at(parts, state.epoch).lr}


def my_micro_batches(parts: Parts, epoch: int, windows: Sequence[Window], loader: TrainingLoader) -> Iterator[Batch]:
    """This rank's micro-batches of the windows, a blank one where it has no image."""
    mine = [micro for window in windows for micro in window.micro_batches[distributed.rank()]]
    batches = loader.batches((epoch, micro) for micro in mine if micro)
    for micro in mine:
        yield next(batches) if micro else blank_batch(parts.settings.imgsz)


def rates_at(parts: Parts, progress: float) -> Rates:
    schedule = parts.schedule
    return Rates(schedule.lr(progress), schedule.lr(progress, bias=True), schedule.momentum_at(progress))


def named(losses: Sequence[float]) -> dict[str, float]:
    return dict(zip(TERMS, losses, strict=True))


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


def validate(parts: Parts, state: TrainState, truth: GroundTruth) -> Evaluation | None:
    """The averaged network's evaluation on the validation images, on the main rank; all ranks share the work."""
    batches = validation_batches(
        parts.validation, parts.settings.batch, parts.workers, distributed.rank(), distributed.world_size()
    )
    found = dict(detect(state.ema.network, batches, device=parts.device, autocast=parts.rules.precision.autocast))
    everywhere = {index: one for part in distributed.gather(found) for index, one in part.items()}
    if not distributed.is_main():
        return None
    return judge(truth, [everywhere[index] for index in range(len(truth))], parts.names)


def record(parts: Parts, state: TrainState, row: dict[str, float], folder: Path) -> None:
    """Take a finished epoch into the history, the table, the curves and the checkpoints."""
    state.history.append(row)
    fitness = row.get(FITNESS, float(state.epoch))  # without validation the last epoch counts as the best
    better = state.best.epoch < 0 or fitness > state.best.fitness  # the first counts even where it is not a number
    if better:
        state.best = Best(fitness, state.epoch)
    if not distributed.is_main():
        return
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
    losses = "  ".join(f"{name} {row[name]:.3f}" for name in TERMS)
    metrics = "  ".join(f"{name} {row[name]:.3f}" for name in ("mAP50", FITNESS) if name in row)
    mark = "  best" if state.best.epoch == state.epoch else ""
    skipped = f"  {state.skipped} steps skipped" if state.skipped else ""
    return f"epoch {state.epoch}/{epochs}  {losses}  {metrics}  {row['seconds']:.1f} s{mark}{skipped}"


def finish(parts: Parts, state: TrainState, truth: GroundTruth, folder: Path, say: Say) -> TrainResult:
    """Measure the best checkpoint once more, print its table and draw its curves."""
    best, last = folder / "weights" / "best.pt", folder / "weights" / "last.pt"
    weights = checkpoint.read(best)["ema"] if distributed.is_main() else None
    state.ema.network.load_state_dict(distributed.from_main(weights))
    evaluation = validate(parts, state, truth)
    if evaluation is None:
        return TrainResult(folder, best, last, {})
    say(format_class_table(evaluation, parts.names))
    if parts.settings.plots:
        draw_evaluation(evaluation, parts.validation, parts.names, folder)
    say(f"best      {best} (epoch {state.best.epoch})")
    say(f"pictures  {folder}")
    return TrainResult(folder, best, last, evaluation.row())
