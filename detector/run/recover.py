"""A step that cannot be taken as planned, because memory ran out or its gradient is not finite (NaN, inf).

What is tried, what is said, and when a run stops.
"""

from collections.abc import Sequence

from detector.data.batch import Batch, recut_batches
from detector.errors import TrainingError
from detector.memory import attempt, is_out_of_memory
from detector.precision import Precision
from detector.run.run import Run
from detector.step.plan import Window, input_side, recut
from detector.step.schedule import Rates
from detector.step.step import StepReport, train_window

REMEDY = "What helps: checkpoint=all, offload=true, a smaller imgsz or model, amp other than fp32"


def take(run: Run, window: Window, held: Sequence[Batch], rates: Rates) -> StepReport:
    """The step of a window; `held` are its micro-batches on the host, where they stay until it is done.

    Where memory runs out, the window is cut finer. A step that is not finite is told with its images. Raises
    TrainingError where neither helps; the last checkpoint is as good as it was.
    """
    report = fit(run, window, held, rates)
    return report if report.applied or not report.images else not_finite(run, report, window, held, rates)


def fit(run: Run, window: Window, held: Sequence[Batch], rates: Rates) -> StepReport:
    """The step, cut as memory allows: all ranks halve their micro-batches until it fits, and stay with that.

    After `grow_after` steps that fit the micro-batch is doubled again, up to `batch`.
    """
    state, settings = run.state, run.settings
    most = min(settings.batch, len(run.training))
    if settings.grow_after and state.fitting_steps >= settings.grow_after and state.batch < most:
        state.batch, state.fitting_steps = min(2 * state.batch, most), 0
        run.event("memory", f"memory    trying {state.batch} images a micro-batch again (grow_after)")
    while True:
        cut, micro_batches = recut(window, state.batch), held
        if cut != window:
            micro_batches = recut_batches(held, cut.micro_batches[run.mesh.replica])
        if report := step(run, cut, micro_batches, rates):
            state.fitting_steps += 1
            return report
        cut_finer(run, cut)


def step(run: Run, window: Window, micro_batches: Sequence[Batch], rates: Rates) -> StepReport | None:
    """The step of a window as it is cut; None, on all ranks and with nothing changed, where memory ran out on any."""

    settings = run.settings
    side = input_side(settings.imgsz, settings.multi_scale, run.state.network.stride, settings.seed, window)

    def taken() -> StepReport:
        on_device = (batch.to(run.device).resized(side) for batch in micro_batches)  # one at a time
        return train_window(run.state, run.gradients, run.rules, window, on_device, rates)

    if run.rules.apart:
        return attempt(taken)
    try:
        return taken()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            "out of memory, and with bn=sync one device cannot try again while the others wait inside its layers. "
            f"{REMEDY}, a smaller batch; go on from {run.last}"
        ) from None


def cut_finer(run: Run, window: Window) -> None:
    """Halve the micro-batch that memory did not suffice for.

    Where it is one image, stages have one micro-batch less under way at once; TrainingError where it is the only one.
    """
    largest = max(len(micro) for device in window.micro_batches for micro in device)
    pipeline = run.rules.pipeline
    if largest <= 1 and pipeline and pipeline.depth > 1:
        pipeline.depth -= 1
        run.event(
            "memory",
            "memory    ran out at 1 image a micro-batch: the same images again with "
            f"{pipeline.depth} of them in the pipeline at once, and so from here on",
        )
        return
    if largest <= 1:
        raise TrainingError(f"out of memory with one image a micro-batch. {REMEDY}; go on from {run.last}")
    run.state.batch, run.state.fitting_steps = -(-largest // 2), 0
    finer = recut(window, run.state.batch)
    run.event(
        "memory",
        f"memory    ran out at {largest} images a micro-batch: the same {window.images} images again as "
        f"{finer.accumulate} x {run.state.batch} on each device, and so from here on",
    )


def not_finite(run: Run, report: StepReport, window: Window, held: Sequence[Batch], rates: Rates) -> StepReport:
    """Say what there is to say of a step that was skipped.

    After `max_bad_steps` of them in a row the same window is tried in fp32: where that is finite, the precision was
    the cause, and with `amp: auto` the run goes on in fp32.
    """
    state, settings = run.state, run.settings
    images = shown(run, window)
    run.event("bad step", f"warning: step skipped: gradient {report.norm}, losses {report.losses}; images {images}")
    if state.skipped_in_a_row < settings.max_bad_steps:
        return report
    count, name = state.skipped_in_a_row, state.precision.name
    if name != "fp32":
        state.use(Precision("fp32", state.precision.device_type))
        report = fit(run, window, held, rates)
    if not report.applied:
        raise TrainingError(
            f"{count} steps in a row were not finite, and nothing was learned from them. Lower lr0, or look at the "
            f"images named above; the last good checkpoint is {run.last}"
        )
    cause = f"{count} steps in a row were not finite in {name}, and the same images are in fp32"
    if settings.amp != "auto":
        raise TrainingError(f"{cause}. Go on with amp=fp32 from the last good checkpoint, {run.last}")
    run.event("bad step", f"warning: {cause}: the run goes on in fp32 (amp: auto)")
    return report


def shown(run: Run, window: Window, most: int = 8) -> str:
    """The images of a window, by the names of the first few files."""
    slots = [slot for device in window.micro_batches for micro in device for slot in micro]
    images = sorted(set(run.training.drawn(window.epoch)[slots].tolist()))
    names = ", ".join(run.training.index.path(image).name for image in images[:most])
    return f"{names} and {len(images) - most} more" if len(images) > most else names
