"""A run, read as a table of contents."""

import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from detector import checkpoint_file, distributed, terminal
from detector.config.settings import Settings
from detector.data.batch import Batch, blank_batch
from detector.data.dataset import damage
from detector.data.loader import loading
from detector.device import choose_device
from detector.drawing import save_image
from detector.errors import Interrupted, StopTraining
from detector.evaluation.evaluate import Evaluation, detect, judge_found
from detector.files import remove_unfinished
from detector.folders import create_folder, remove_run
from detector.inference.infer import NetworkRuntime
from detector.model.network import Network
from detector.model.selection import Detections
from detector.reporting.progress import Progress
from detector.reporting.samples import training_batch_image
from detector.reporting.summary import draw_evaluation
from detector.reporting.table import format_class_table
from detector.run import recover, saving
from detector.run.build import OWN, Images, build
from detector.run.interrupt import StopWaiting
from detector.run.introduction import introduce
from detector.run.lock import locked, run_id
from detector.run.resume import RUN, Resume, rewind_best
from detector.run.run import NOBODY, Run, Say, Watch, silent
from detector.run.stages import for_all_stages
from detector.run.state import fitness_of
from detector.run.telling import begin_reports, gpu_memory, tell_end, tell_epoch, tell_failure, tell_window, write_page
from detector.step import compiling
from detector.step.plan import Window, epoch_windows
from detector.step.statistics import set_modes

STOP = 1 << 10  # what a callback's wish is among numbers of signals


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left behind."""

    folder: Path
    best: Path  # the checkpoint with the best validation
    last: Path
    metrics: dict[str, float]  # of the best checkpoint


def say_now(text: str) -> None:
    """Print at once, also into a file or a pipe."""
    terminal.say(text)


def train(
    settings: Settings,
    resume: Resume | None = None,
    say: Say = say_now,
    watch: Watch = NOBODY,
    images: Images = OWN,
) -> TrainResult:
    """Train by the settings, from the start or from a checkpoint; `images`: kept by who trains several times.

    Under torchrun every process calls this alike, inside `distributed.process_group`. Raises ConfigError, DataError or
    CheckpointError before anything is written; TrainingError where a run cannot go on; Interrupted after Ctrl-C or
    SIGTERM, with everything saved. What a function of `watch` raises, other than StopTraining, ends the run, too.
    """
    with ExitStack() as stack:
        with distributed.together(choose_device(settings.device)):
            told = say if distributed.is_main() else silent
            run = build(settings, resume, only_warnings(told) if settings.quiet else told, watch, images)
            run.say = told
            if not settings.quiet:
                introduce(run)
        with distributed.together(run.device):  # all ranks have read what they need, be it from the folder itself
            begin(run, resume, stack)
            saving.settle(run)  # and no thread is at work when loaders are started
        run.state.best = distributed.from_main(run.state.best)  # which a rewound run has looked for in its folder
        stack.enter_context(run.interruption)
        stack.callback(compiling.end_workers)
        start = run.settings.multiprocessing_start
        pin = run.device.type == "cuda"
        run.loaders = stack.enter_context(loading(run.training, run.validation, run.workers, pin, start))
        try:
            ending = run_epochs(run)
            result = finish(run, *ending)
        except BaseException as error:
            tell_failure(run, error)
            run.say(f"go on with: detector train resume={run.folder}")
            raise
        tell_end(run, *ending)
        return result


def only_warnings(say: Say) -> Say:
    """What says the warnings among what it is told, and nothing else."""
    return lambda text: say(text) if text.startswith("warning") else None


def begin(run: Run, resume: Resume | None, stack: ExitStack) -> None:
    """The folder of a run that is checked and built, with a first checkpoint, locked until `stack` is left."""
    if not distributed.is_main():
        return
    settings, say = run.settings, run.say
    new = settings.project, settings.name, "train", settings.exist_ok
    run.folder = resume.folder if resume else create_folder(*new)
    identity = stack.enter_context(locked(run.folder, run_id(run.folder) if resume else None))
    stack.enter_context(run.beside)
    distributed.remember(RUN, f"{identity} {run.folder}")
    (run.folder / "weights").mkdir(exist_ok=True)
    remove_unfinished(run.folder)
    (run.folder / "settings.yaml").write_text(run.settings.to_yaml(), encoding="utf-8")
    say(f"run       {run.folder}")
    if resume is None:
        if old := remove_run(run.folder):
            say(f"removed   {old} files of the run that was here before (exist_ok)")
        saving.save(run)  # from the first second on a run can be resumed
    else:
        rewind_best(run, resume)
        saving.save_table(run)  # which may be older, or newer, than the checkpoint
    begin_reports(run, resume, identity)


def run_epochs(run: Run) -> tuple[str, str]:
    """Train and validate, epoch by epoch, from the state's position to the end. Returns how it ended, as an event."""
    state, settings = run.state, run.settings
    compile_steps(run)
    distributed.share([*state.network.state_dict().values(), *state.ema.network.state_dict().values()])
    if run.rules.pipeline:
        run.rules.pipeline.connect()
    try:
        while state.epoch < settings.epochs and not out_of_patience(run):
            run_epoch(run)
    except StopTraining as stop:
        run.say(f"stopped   by {stop}; to train on: detector train resume={run.folder}")
        return "stopped", f"by {stop}"
    if state.epoch >= settings.epochs:
        run.say(f"finished  {state.epoch} epochs; to train on: detector train resume={run.folder} epochs=...")
        return "finished", f"{state.epoch} epochs"
    run.say(said := f"stopped early: no better {settings.metric} in {settings.patience} epochs")
    return "stopped", said


def run_epoch(run: Run) -> None:
    """Train to the end of the state's epoch, validate, and save."""
    start, before = time.perf_counter(), run.state.done
    train_epoch(run)
    trained = time.perf_counter()
    stop_if_asked(run)
    evaluation = validate(run, run.state.ema.network) if run.settings.val else None
    row = distributed.from_main(epoch_row(run, evaluation))
    with distributed.together(run.device):
        record(run, row)
    seconds = time.perf_counter() - start
    run.pace.take(len(run.training) - before, trained - start, seconds - (trained - start))
    if not run.settings.quiet:
        run.say(progress_line(run, row, seconds))
    with distributed.together(run.device):
        tell_epoch(run, row)
    stop_if_asked(run)


def compile_steps(run: Run) -> None:
    """Compile what the steps need, where the settings ask for it."""
    state, settings = run.state, run.settings
    if settings.compile == "off" or state.epoch >= settings.epochs:
        return
    set_modes(state.network, settings.norm == "frozen")
    seconds = compiling.prepare(state, run.rules, state.batch, settings.imgsz, run.training.channels)
    if seconds is not None:
        run.say(f"compiled  in {seconds:.0f} s")
    stop_if_asked(run)


def stop_if_asked(run: Run) -> None:
    """Between windows, where the state is whole: save and leave if any rank got a signal, or a callback asks for it.

    Raises Interrupted or StopTraining.
    """
    number = distributed.largest_of_ranks(run.interruption.number or (STOP if run.stopping else 0), run.device)
    if number:
        with distributed.together(run.device):
            saving.save(run)
            saving.save_table(run, curves=True)
            saving.settle(run)
        if number == STOP:
            asked, run.stopping = distributed.from_main(run.stopping), ""
            raise StopTraining(asked)
        raise Interrupted(number)


def train_epoch(run: Run) -> None:
    """Train from the state's position to the end of its epoch."""
    state, settings, images = run.state, run.settings, len(run.training)
    position, parts = (state.epoch, state.done), run.mesh.replicas
    windows = list(epoch_windows(images, state.cut, settings.seed, *position, run.ramp, state.batch, parts))
    batches = my_micro_batches(run, windows)
    if settings.plots and distributed.is_main() and state.done == 0 and wants_pictures(run):
        batches = pictured(run, batches)
    set_modes(state.network, settings.norm == "frozen")

    shown = distributed.is_main() and run.watch.bars and not settings.quiet
    with Progress(state.epoch, settings.epochs, images, state.done, shown=shown, pace=run.pace) as bar:
        for window in windows:
            rates = run.schedule.rates(state.epoch + (window.done + window.images) / images)
            held: list[Batch] = []
            with distributed.together(run.device), suppress(StopWaiting), bar.waiting():
                held = list(islice(batches, window.accumulate))
            stop_if_asked(run)
            report = recover.take(run, window, for_all_stages(run, held), rates)
            state.done = window.done + window.images
            if report.applied:
                state.learned(report)
            if report.images < window.images:  # on all ranks alike
                slots = [slot for batch in held for slot in batch.bad.tolist()]
                tell_bad(run, "train", run.training.drawn(window.epoch)[slots].tolist())
            losses = dict(zip(run.terms, report.losses, strict=True))
            bar.update(state.done, losses, rates.lr["weights"], window.accumulate, gpu_memory(run.device))
            with distributed.together(run.device):
                tell_window(run, window, report, rates, *bar.lap())
                saving.settle(run, wait=False)
                if saving.due(run):
                    saving.save(run)


def tell_bad(run: Run, split: str, indices: Sequence[int]) -> None:
    """Take the damaged images that this rank met into the state of all, and name those that are new to the run."""
    index = (run.training if split == "train" else run.validation).index
    known = run.state.bad_images[split]
    found = {i for part in distributed.gather(list(indices)) for i in part}
    for i in sorted(found.difference(known)):
        said = f"warning: {split}: {damage(index, i)}; it counts for nothing (bad_images: skip)"
        run.event("bad image", said)
    run.state.bad_images[split] = sorted(found.union(known))


def my_micro_batches(run: Run, windows: Sequence[Window]) -> Iterator[Batch]:
    """This replica's micro-batches of the windows, a blank one where it has no image.

    None where stages before this one take the images.
    """
    if not run.mesh.first:
        return
    mine = [micro for window in windows for micro in window.micro_batches[run.mesh.replica]]
    plan = [(run.state.epoch, micro) for micro in mine if micro]
    batches = run.loaders.training.batches(plan, run.interruption.end_wait)
    for micro in mine:
        yield next(batches) if micro else blank_batch(run.settings.imgsz, run.training.channels)


def wants_pictures(run: Run) -> bool:
    """In the first epoch, and in the first after mosaic closes."""
    return run.state.epoch in (0, run.training.first_plain_epoch)


def pictured(run: Run, batches: Iterable[Batch], most: int = 3) -> Iterator[Batch]:
    """The same batches; the first few are also drawn into the run's folder."""
    epoch = run.state.epoch + 1
    for number, batch in enumerate(batches):
        if number < most:
            picture = training_batch_image(
                batch.pictures(), batch.boxes_xyxy, batch.classes, batch.image_index, run.names
            )
            path = run.folder / f"train_epoch{epoch}_batch{number}.jpg"
            with saving.writing(run, path):
                save_image(path, picture)
                run.reports.picture(path)
        yield batch


def validate(run: Run, network: Network) -> Evaluation | None:
    """A network's evaluation on the validation images, on the main rank; all ranks share the work."""
    size = run.settings.val_batch or run.state.batch
    share = distributed.rank(), distributed.world_size()
    batches = run.loaders.validation.batches(size, *share, run.interruption.end_wait)
    found: dict[int, Detections] = {}
    with distributed.together(run.device), suppress(StopWaiting):
        saving.settle(run)  # loader processes may be started now
        found |= detect(
            NetworkRuntime(network, run.device, run.state.precision.autocast),
            batches,
            on_batch=lambda images: run.interruption.end_wait(),
        )
    stop_if_asked(run)
    everywhere = {index: one for part in distributed.gather(found) for index, one in part.items()}
    tell_bad(run, "val", [i for i in range(len(run.truth)) if i not in everywhere])
    return judge_found(run.truth, everywhere, run.names, run.judged) if distributed.is_main() else None


def epoch_row(run: Run, evaluation: Evaluation | None) -> dict[str, float]:
    """A finished epoch's row of metrics.csv. Its losses are over the images that were learned from."""
    state = run.state
    sums = state.loss_sums or [math.nan] * len(run.terms)
    losses = {name: one / max(state.loss_images, 1) for name, one in zip(run.terms, sums, strict=True)}
    epoch = state.epoch + 1
    row = {"epoch": epoch, "step": state.step, **losses, "lr": run.schedule.lr(epoch)}
    return row | (evaluation.row() if evaluation else {})


def record(run: Run, row: dict[str, float]) -> None:
    """Take a finished epoch into the state, the checkpoints, the table and the curves."""
    run.state.end_epoch(row, fitness_of(row, run.settings.metric, run.terms))
    saving.save_epoch(run)


def out_of_patience(run: Run) -> bool:
    """Early stopping: whether the best epoch is `patience` epochs ago."""
    patience = run.settings.patience
    return bool(patience) and run.state.epoch - run.state.best.epoch >= patience


def progress_line(run: Run, row: dict[str, float], seconds: float) -> str:
    state = run.state
    losses = "  ".join(f"{name} {row[name]:.3f}" for name in run.terms)
    shown = dict.fromkeys(("mAP50", "mAP50-95", run.settings.metric))
    metrics = "  ".join(f"{name} {row[name]:.3f}" for name in shown if name in row and name not in run.terms)
    mark = "  best" if state.best.epoch == state.epoch else ""
    skipped = f"  {state.skipped} steps skipped" if state.skipped else ""
    count = sum(map(len, state.bad_images.values()))
    bad = f"  {count} bad {'image' if count == 1 else 'images'}" if count else ""
    return f"epoch {state.epoch}/{run.settings.epochs}  {losses}  {metrics}  {seconds:.1f} s{mark}{skipped}{bad}"


def finish(run: Run, kind: str, text: str) -> TrainResult:
    """Measure the best checkpoint once more, print its table, draw its curves and write the page of the run.

    kind and text: how it ended.
    """
    if not run.state.best.epoch:  # stopped in its first epoch
        write_page(run, None, kind, text)
        return TrainResult(run.folder, run.best, run.last, {})
    with distributed.together(run.device):
        saving.save_table(run, curves=True)
        saving.settle(run)
        weights = checkpoint_file.read(run.best)["ema"] if distributed.is_main() else None
    network = copy.deepcopy(run.state.ema.network)  # the state stays what it is, for whoever saves it
    network.load_state_dict(distributed.from_main(weights))
    evaluation = validate(run, network)
    if evaluation is None:
        return TrainResult(run.folder, run.best, run.last, {})
    run.say(format_class_table(evaluation, run.names))
    if run.settings.plots:
        with saving.writing(run, run.folder):
            draw_evaluation(evaluation, run.validation, run.names, run.folder)
    write_page(run, evaluation, kind, text)
    run.say(f"best      {run.best} (epoch {run.state.best.epoch})")
    for line in what_next(run):
        run.say(line)
    return TrainResult(run.folder, run.best, run.last, evaluation.row())


def what_next(run: Run) -> list[str]:
    """Where to look, and what people do next with a run that is finished."""
    pictures = [f"pictures  {run.folder}"] if run.settings.plots else []
    words = ("val {}", "predict {} IMAGES", "export {} format=onnx")
    return [*pictures, *(f"next      detector {word.format(run.folder)}" for word in words)]
