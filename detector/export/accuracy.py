"""The proof of an int8 export, which finds other boxes than the checkpoint: what it loses of the mAP."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detector.data.dataset import ValidationSet
from detector.data.loader import validation_batches
from detector.evaluation.evaluate import Evaluation, evaluate_runtime, ground_truth_of
from detector.inference.infer import JUDGED, Limits, Runtime
from detector.inference.runtimes.exported import ExportedRuntime

if TYPE_CHECKING:
    from detector.data.index import Index
    from detector.inference.runtimes.facts import Facts

BATCH = 16


@dataclass(frozen=True)
class Accuracy:
    """The metrics of a checkpoint and of its export on the same images."""

    checkpoint: Evaluation
    exported: Evaluation
    most: float  # the loss of mAP50-95, in 0..1, that is allowed
    conf: float  # the least score of a detection
    title: str  # the export's

    @property
    def loss(self) -> float:
        """Of mAP50-95, in 0..1; negative for a gain."""
        return self.checkpoint.metrics.map50_95 - self.exported.metrics.map50_95

    @property
    def passed(self) -> bool:
        return self.loss <= self.most

    def lines(self) -> list[str]:
        """The table, for the terminal."""
        rows = {"checkpoint, fp32": self.checkpoint.row(), self.title: self.exported.row()}
        first, second = rows.values()
        width = max(map(len, rows))
        lines = [f"{'accuracy':9} {'':{width}} {' '.join(f'{column:>9}' for column in first)} {'images/s':>9}"]
        for (name, row), one in zip(rows.items(), (self.checkpoint, self.exported), strict=True):
            speed = (one.images - len(one.missing)) / one.seconds["detect"]
            lines.append(f"{'':9} {name:{width}} {' '.join(f'{value:9.5f}' for value in row.values())} {speed:9.1f}")
        apart = " ".join(f"{second[column] - first[column]:+9.5f}" for column in first)
        lines.append(f"{'':9} {'difference':{width}} {apart}{'' if self.passed else '  FAILED'}")
        lines.append(
            f"{'':9} {self.checkpoint.images} images, detections with a score of {self.conf:g} and more; allowed: a "
            f"loss of {self.most:g} of mAP50-95 (max_loss)"
        )
        return lines


def measure(
    checkpoint: Runtime,
    exported: ExportedRuntime,
    index: Index,
    names: Sequence[str],
    judged: Collection[int] | None,
    most: float,
) -> Accuracy:
    """Both on the images of an index, by the code that validates in training; `judged` as there. Of `checkpoint` the
    head is to be the one that was exported."""
    facts = exported.facts
    limits = judged_by(facts)
    images = ValidationSet(index, facts.imgsz, facts.stride, rect=facts.dynamic)
    truth = ground_truth_of(index)

    def evaluated(runtime: Runtime) -> Evaluation:
        batches = validation_batches(images, BATCH, workers=0)
        return evaluate_runtime(runtime, batches, truth, names, limits, judged=judged)

    return Accuracy(evaluated(checkpoint), evaluated(exported), most, limits.conf, exported.title)


def judged_by(facts: Facts) -> Limits:
    """Validation's limits, or those that a file with suppression inside has settled, for both."""
    if facts.output == "raw":
        return JUDGED
    return Limits(max(JUDGED.conf, facts.conf), facts.iou, facts.max_det, multi_label=facts.nms != "inside")
