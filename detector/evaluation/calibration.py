"""Whether a confidence is what it says: of the detections with confidence 0.8, are 8 in 10 right?

Guo et al., "On calibration of modern neural networks" (2017), for detections as in Kueppers et al., "Multivariate
confidence calibration for object detection" (2020): right is who finds a true box at IoU 0.5. Legend: K bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detector.evaluation.coco import GroundTruth
from detector.evaluation.curves import CURVE_IOU, judged_correct
from detector.evaluation.matching import flatten
from detector.model.selection import Detections

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Detections by their confidence, in bins of equal width over 0..1; a bin begins with its lower edge."""

    counts: NDArray[np.int64]  # (K,) detections, without those that a crowd region excuses
    confidence: NDArray[np.float64]  # (K,) their mean confidence; NaN where there are none
    precision: NDArray[np.float64]  # (K,) the share of them that is right; NaN where there are none

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of precision and confidence over all detections.

        NaN where there is no detection.
        """
        there = self.counts > 0
        if not there.any():
            return float("nan")
        apart = np.abs(self.precision[there] - self.confidence[there])
        return float(np.average(apart, weights=self.counts[there]))


def compute_calibration(
    ground_truth: GroundTruth, detections: Sequence[Detections], confidence: float = 0.0, bins: int = BINS
) -> Calibration:
    """The calibration of the detections with at least `confidence`; one `Detections` per image, in the truth's order.

    They are matched as for the curves, and what of them is below `confidence` takes no true box from the others.
    """
    flat = flatten([found.above(confidence) for found in detections])
    correct, counts = judged_correct(ground_truth, flat, CURVE_IOU)
    scores, correct = flat.scores[counts], correct[counts]
    which = np.minimum((scores * bins).astype(np.int64), bins - 1)
    number = np.bincount(which, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = (np.bincount(which, weights=values, minlength=bins) / number for values in (scores, correct))
        return Calibration(number, *means)
