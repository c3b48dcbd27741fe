"""A step that cannot be taken as planned: what is tried, what is said, and when a run stops."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from detector import distributed
from detector.data.batch import Batch, recut_batches
from detector.errors import TrainingError
from detector.memory import OutOfMemoryError
from detector.precision import Precision
from detector.run.build import Parts, Say
from detector.step.optim import Rates
from detector.step.plan import Window, recut
from detector.step.state import TrainState
from detector.step.step import StepReport, train_window


@dataclass
class Steps:
    """Takes a run's steps, come what may."""

    parts: Parts
    state: TrainState
    gradients: distributed.GradientSum
    last: Path  # the checkpoint to name where the run must stop
    say: Say
    since: int = 0  # steps since memory last ran out

    def take(self, window: Window, held: Sequence[Batch], rates: Rates) -> StepReport:
        """The step of a window; `held` are its micro-batches on the host, where they stay until it is done.

        Where memory runs out, the window is cut finer. A step that is not finite is told with its images. Raises
        TrainingError where neither helps; the last checkpoint is as good as it was.
        """
        report = self.fit(window, held, rates)
        return report if report.applied or not report.images else self.not_finite(report, window, held, rates)

    def fit(self, window: Window, held: Sequence[Batch], rates: Rates) -> StepReport:
        """The step, cut as memory allows: all ranks halve their micro-batches until it fits, and stay with that.

        After `grow_after` steps that fit the micro-batch is doubled again, up to `batch`.
        """
        state, settings = self.state, self.parts.settings
        if settings.grow_after and self.since >= settings.grow_after and state.batch < settings.batch:
            state.batch, self.since = min(2 * state.batch, settings.batch), 0
            self.say(f"memory    trying {state.batch} images a micro-batch again (grow_after)")
        while True:
            cut, micro_batches = recut(window, state.batch), held
            if cut != window:
                micro_batches = recut_batches(held, cut.micro_batches[distributed.rank()])
            on_device = (batch.to(self.parts.device) for batch in micro_batches)
            try:
                report = train_window(state, self.gradients, self.parts.rules, cut, on_device, rates)
            except OutOfMemoryError:
                self.cut_finer(cut)
            else:
                self.since += 1
                return report

    def cut_finer(self, window: Window) -> None:
        """Halve the micro-batch that memory did not suffice for. TrainingError where it is one image."""
        largest = max(len(micro) for device in window.micro_batches for micro in device)
        if largest <= 1:
            raise TrainingError(
                "out of memory with one image a micro-batch. What helps: checkpoint=all, offload=true, a smaller imgsz "
                f"or model, amp other than fp32; go on from {self.last}"
            )
        self.state.batch, self.since = -(-largest // 2), 0
        finer = recut(window, self.state.batch)
        self.say(
            f"memory    ran out at {largest} images a micro-batch: the same {window.images} images again as "
            f"{finer.accumulate} x {self.state.batch} on each device, and so from here on"
        )

    def not_finite(self, report: StepReport, window: Window, held: Sequence[Batch], rates: Rates) -> StepReport:
        """Say what there is to say of a step that was skipped.

        After `max_bad_steps` of them in a row the same window is tried in fp32: where that is finite, the precision was
        the cause, and with `amp: auto` the run goes on in fp32.
        """
        state, settings = self.state, self.parts.settings
        images = shown(window, self.parts)
        self.say(f"warning: step skipped: gradient {report.norm}, losses {report.losses}; images {images}")
        if state.skipped_in_a_row < settings.max_bad_steps:
            return report
        count, name = state.skipped_in_a_row, state.precision.name
        if name != "fp32":
            state.use(Precision("fp32", state.precision.device_type))
            report = self.fit(window, held, rates)
        if not report.applied:
            raise TrainingError(
                f"{count} steps in a row were not finite, and nothing was learned from them. Lower lr0, or look at the "
                f"images named above; the last good checkpoint is {self.last}"
            )
        cause = f"{count} steps in a row were not finite in {name}, and the same images are in fp32"
        if settings.amp != "auto":
            raise TrainingError(f"{cause}. Go on with amp=fp32 from the last good checkpoint, {self.last}")
        self.say(f"warning: {cause}: the run goes on in fp32 (amp: auto)")
        return report


def shown(window: Window, parts: Parts, most: int = 8) -> str:
    """The images of a window, by the names of the first few files."""
    samples = sorted(sample for device in window.micro_batches for micro in device for sample in micro)
    names = ", ".join(parts.training.index.path(sample).name for sample in samples[:most])
    return f"{names} and {len(samples) - most} more" if len(samples) > most else names
