"""A step that cannot be taken as planned: what is tried, what is said, and when a run stops."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from detector.data.batch import Batch
from detector.errors import TrainingError
from detector.training.optim import Rates
from detector.training.plan import Window
from detector.training.precision import Precision
from detector.training.setup import Parts, Say
from detector.training.state import TrainState
from detector.training.step import StepReport, train_window


def take_step(
    parts: Parts,
    state: TrainState,
    model: nn.Module,
    window: Window,
    micro_batches: Sequence[Batch],
    rates: Rates,
    last: Path,
    say: Say,
) -> StepReport:
    """The step of a window, whose micro-batches stay on the host until it is done.

    A step that is not finite is told with its images. After `max_bad_steps` of them in a row the same window is tried
    in fp32: where that is finite, the precision was the cause, and with `amp: auto` the run goes on in fp32. Else
    TrainingError; the checkpoint `last` is as good as it was.
    """

    def attempt() -> StepReport:
        return train_window(state, model, parts.rules, window, on_device(micro_batches, parts), rates)

    report = attempt()
    if report.applied:
        return report
    say(f"warning: step skipped: gradient {report.norm}, losses {report.losses}; images {shown(window, parts)}")
    if state.skipped_in_a_row < parts.settings.max_bad_steps:
        return report
    count, name = state.skipped_in_a_row, state.precision.name
    if name != "fp32":
        state.use(Precision("fp32", state.precision.device_type))
        report = attempt()
    if not report.applied:
        raise TrainingError(
            f"{count} steps in a row were not finite, and nothing was learned from them. Lower lr0, or look at the "
            f"images named above; the last good checkpoint is {last}"
        )
    cause = f"{count} steps in a row were not finite in {name}, and the same images are in fp32"
    if parts.settings.amp != "auto":
        raise TrainingError(f"{cause}. Go on with amp=fp32 from the last good checkpoint, {last}")
    say(f"warning: {cause}: the run goes on in fp32 (amp: auto)")
    return report


def on_device(micro_batches: Sequence[Batch], parts: Parts) -> Iterator[Batch]:
    return (batch.to(parts.device) for batch in micro_batches)


def shown(window: Window, parts: Parts, most: int = 8) -> str:
    """The images of a window, by the names of the first few files."""
    samples = sorted(sample for device in window.micro_batches for micro in device for sample in micro)
    names = ", ".join(parts.training.index.path(sample).name for sample in samples[:most])
    return f"{names} and {len(samples) - most} more" if len(samples) > most else names
