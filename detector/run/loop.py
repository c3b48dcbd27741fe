"""A run, read as a table of contents."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

import torch

from detector import checkpoint_file, distributed
from detector.config import Settings
from detector.data.batch import Batch, blank_batch
from detector.data.dataset import damage
from detector.data.loader import TrainingLoader, training_loader, validation_batches
from detector.errors import DetectorError, Interrupted
from detector.evaluation.coco import GroundTruth
from detector.evaluation.evaluate import Evaluation, detect, ground_truth_of, judge_found
from detector.files import remove_unfinished
from detector.folders import create_folder
from detector.loss.criterion import TERMS
from detector.model.network import Network
from detector.model.norm import renorm_limits, set_renorm_limits
from detector.reporting.draw import save_image
from detector.reporting.progress import Progress
from detector.reporting.samples import training_batch_image
from detector.reporting.summary import draw_evaluation
from detector.reporting.table import format_class_table
from detector.run.build import Parts, Say, prepare
from detector.run.interrupt import Interruption
from detector.run.lock import locked
from detector.run.recover import Steps
from detector.run.resume import Resume
from detector.run.saving import Saver
from detector.step.optim import Rates
from detector.step.plan import Window, epoch_windows
from detector.step.state import Best, TrainState
from detector.step.statistics import set_modes

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


def train(settings: Settings, resume: Resume | None = None, say: Say = say_now) -> TrainResult:
    """Train by the settings, from the start or from a checkpoint.

    Under torchrun every process calls this alike, inside `distributed.process_group`. Raises ConfigError, DataError or
    CheckpointError before anything is written; TrainingError where a run cannot go on; Interrupted after Ctrl-C or
    SIGTERM, with everything saved.
    """
    with ExitStack() as stack:
        if not distributed.is_main():
            say = silent
        parts, state, folder = together(lambda: begin(settings, resume, say, stack))
        saver = Saver(folder, parts, say)
        if resume is None:
            saver.save(state)  # from the first second on a run can be resumed
        else:
            saver.save_table(state)  # which may be older, or newer, than the checkpoint
        truth = ground_truth_of(parts.validation.index)
        run = Run(parts, state, saver, truth, stack.enter_context(Interruption()), say)
        try:
            run_epochs(run)
            return finish(run)
        except BaseException:
            say(f"go on with: detector train resume={folder}")
            raise


@dataclass(frozen=True)
class Run:
    """What the functions below hand to one another."""

    parts: Parts
    state: TrainState
    saver: Saver
    truth: GroundTruth  # of the validation images
    interruption: Interruption
    say: Say

    def stop_if_asked(self) -> None:
        """At a window's edge, where the state is whole: save and leave if any rank got a signal."""
        number = distributed.largest_of_ranks(self.interruption.number or 0, self.parts.device)
        if number:
            self.saver.save(self.state)
            raise Interrupted(number)


def run_epochs(run: Run) -> None:
    """Train and validate, epoch by epoch, from the state's position to the end."""
    parts, state, settings = run.parts, run.state, run.parts.settings
    distributed.share([*state.network.state_dict().values(), *state.ema.network.state_dict().values()])
    steps = Steps(parts, state, distributed.GradientSum(state.network), run.saver.last, run.say)
    loader = training_loader(parts.training, parts.workers, pin_memory=parts.device.type == "cuda")
    while state.epoch < settings.epochs and not out_of_patience(state, settings.patience):
        start = time.perf_counter()
        train_epoch(run, steps, loader)
        run.stop_if_asked()
        evaluation = validate(run, state.ema.network) if settings.val else None
        row = distributed.from_main(epoch_row(parts, state, evaluation))
        record(run, row)
        run.say(progress_line(row, state, settings, time.perf_counter() - start))
        run.stop_if_asked()
    if state.epoch >= settings.epochs:
        run.say(f"finished  {state.epoch} epochs; to train on: detector train resume={run.saver.folder} epochs=...")
    elif out_of_patience(state, settings.patience):
        run.say(f"stopped early: no better {settings.metric} in {settings.patience} epochs")


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


def begin(settings: Settings, resume: Resume | None, say: Say, stack: ExitStack) -> tuple[Parts, TrainState, Path]:
    """Everything checked and built, and then the run's folder, locked until `stack` is left."""
    for line in resume.lines() if resume else ():
        say(line)
    parts, state = prepare(settings, resume, say)
    folder = Path()
    if distributed.is_main():
        new = settings.project, settings.name, "train", settings.exist_ok
        folder = resume.folder if resume else create_folder(*new)
        stack.enter_context(locked(folder))
        (folder / "weights").mkdir(exist_ok=True)
        remove_unfinished(folder)
        (folder / "settings.yaml").write_text(parts.settings.to_yaml(), encoding="utf-8")
        say(f"run       {folder}")
    return parts, state, folder


def train_epoch(run: Run, steps: Steps, loader: TrainingLoader) -> None:
    """Train from the state's position to the end of its epoch."""
    parts, state, settings = run.parts, run.state, run.parts.settings
    images, world = len(parts.training), distributed.world_size()
    position = state.epoch, state.done
    windows = list(epoch_windows(images, state.cut, settings.seed, *position, parts.ramp, state.batch, world))
    batches = my_micro_batches(parts, state.epoch, windows, loader)
    if settings.plots and distributed.is_main() and state.done == 0 and wants_pictures(state.epoch, settings):
        batches = pictured(batches, parts.names, run.saver, state.epoch)
    set_modes(state.network, settings.norm == "frozen")

    with Progress(state.epoch, settings.epochs, images, state.done, shown=distributed.is_main()) as bar:
        for window in windows:
            progress = state.epoch + (window.done + window.images) / images
            rates = rates_at(parts, progress)
            set_renorm_limits(state.network, *renorm_limits(progress, parts.schedule.warmup))
            held = list(islice(batches, window.accumulate))
            report = steps.take(window, held, rates)
            state.done = window.done + window.images
            if report.applied:
                state.loss_sums = [a + b * report.images for a, b in zip(state.loss_sums, report.losses, strict=True)]
                state.loss_images += report.images
            if report.images < window.images:  # on all ranks alike
                tell_bad(run, "train", [index for batch in held for index in batch.bad.tolist()])
            bar.update(state.done, named(report.losses), rates.lr, window.accumulate, gpu_memory(parts.device))
            if run.saver.due(state):
                run.saver.save(state)
            run.stop_if_asked()


def epoch_row(parts: Parts, state: TrainState, evaluation: Evaluation | None) -> dict[str, float]:
    """A finished epoch's row of metrics.csv."""
    epoch = state.epoch + 1
    losses = named([one / max(state.loss_images, 1) for one in state.loss_sums])
    row = {"epoch": epoch, "step": state.step, **losses, "lr": rates_at(parts, epoch).lr}
    return row | (evaluation.row() if evaluation else {})


def tell_bad(run: Run, split: str, indices: Sequence[int]) -> None:
    """Take this rank's newly met damaged images into the state of all, and name those that are new to the run."""
    index = (run.parts.training if split == "train" else run.parts.validation).index
    known = run.state.bad_images[split]
    found = {i for part in distributed.gather(list(indices)) for i in part}
    for i in sorted(found.difference(known)):
        if distributed.is_main():
            run.say(f"warning: {split}: {damage(index, i)}; it counts for nothing (bad_images: skip)")
    run.state.bad_images[split] = sorted(found.union(known))


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
    batches: Iterable[Batch], names: tuple[str, ...], saver: Saver, epoch: int, most: int = 3
) -> Iterator[Batch]:
    """The same batches; the first few are also drawn into the run folder."""
    for number, batch in enumerate(batches):
        if number < most:
            picture = training_batch_image(batch.images, batch.boxes_xyxy, batch.classes, batch.image_index, names)
            path = saver.folder / f"train_epoch{epoch + 1}_batch{number}.jpg"
            with saver.writing(path):
                save_image(path, picture)
        yield batch


def validate(run: Run, network: Network) -> Evaluation | None:
    """A network's evaluation on the validation images, on the main rank; all ranks share the work."""
    parts, alone = run.parts, distributed.world_size() == 1
    size = parts.settings.val_batch or run.state.batch
    batches = validation_batches(parts.validation, size, parts.workers, distributed.rank(), distributed.world_size())
    found = dict(
        detect(
            network,
            batches,
            device=parts.device,
            autocast=run.state.precision.autocast,
            on_batch=(lambda images: run.stop_if_asked()) if alone else None,  # ranks have not equally many batches
        )
    )
    everywhere = {index: one for part in distributed.gather(found) for index, one in part.items()}
    tell_bad(run, "val", [i for i in range(len(run.truth)) if i not in everywhere])
    return judge_found(run.truth, everywhere, parts.names) if distributed.is_main() else None


def record(run: Run, row: dict[str, float]) -> None:
    """Take a finished epoch into the state, the checkpoints, the table and the curves."""
    state, settings = run.state, run.parts.settings
    state.history.append(row)
    state.epoch, state.done, state.loss_sums, state.loss_images = state.epoch + 1, 0, [0.0] * len(TERMS), 0
    fitness = row.get(settings.metric, float(state.epoch))  # without validation the last epoch counts as the best
    if settings.metric in TERMS:
        fitness = -fitness
    if state.best.epoch < 0 or fitness > state.best.fitness:  # the first counts even where it is not a number
        state.best = Best(fitness, state.epoch)
    run.saver.save_epoch(state)
    run.saver.save_table(state)


def out_of_patience(state: TrainState, patience: int) -> bool:
    return bool(patience) and state.epoch - max(state.best.epoch, 0) >= patience


def progress_line(row: dict[str, float], state: TrainState, settings: Settings, seconds: float) -> str:
    losses = "  ".join(f"{name} {row[name]:.3f}" for name in TERMS)
    shown = dict.fromkeys(("mAP50", "mAP50-95", settings.metric))
    metrics = "  ".join(f"{name} {row[name]:.3f}" for name in shown if name in row)
    mark = "  best" if state.best.epoch == state.epoch else ""
    skipped = f"  {state.skipped} steps skipped" if state.skipped else ""
    count = sum(map(len, state.bad_images.values()))
    bad = f"  {count} bad {'image' if count == 1 else 'images'}" if count else ""
    return f"epoch {state.epoch}/{settings.epochs}  {losses}  {metrics}  {seconds:.1f} s{mark}{skipped}{bad}"


def finish(run: Run) -> TrainResult:
    """Measure the best checkpoint once more, print its table and draw its curves."""
    parts, saver = run.parts, run.saver
    weights = checkpoint_file.read(saver.best)["ema"] if distributed.is_main() else None
    network = copy.deepcopy(run.state.ema.network)  # the state stays what it is, for whoever saves it
    network.load_state_dict(distributed.from_main(weights))
    evaluation = validate(run, network)
    if evaluation is None:
        return TrainResult(saver.folder, saver.best, saver.last, {})
    run.say(format_class_table(evaluation, parts.names))
    if parts.settings.plots:
        with saver.writing(saver.folder):
            draw_evaluation(evaluation, parts.validation, parts.names, saver.folder)
    run.say(f"best      {saver.best} (epoch {run.state.best.epoch})")
    run.say(f"pictures  {saver.folder}")
    return TrainResult(saver.folder, saver.best, saver.last, evaluation.row())
