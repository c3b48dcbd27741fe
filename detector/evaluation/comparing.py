"""Several runs on the same images: by how much they differ, whether that is more than the images' noise, and where.

All by the class numbers of the first. Legend: I images, G true boxes, C classes, W draws, R runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detector.evaluation.coco import GroundTruth
from detector.evaluation.curves import CURVE_IOU
from detector.evaluation.evaluate import Evaluation
from detector.evaluation.matching import flatten, match_by_score, overlapping_pairs
from detector.evaluation.resampling import draw_images, match, mean_precisions
from detector.model.selection import Detections

METRICS = ("mAP50-95", "mAP50")  # those with an interval
AT_ONCE = 20_000_000  # images times draws that are in memory at once
INSIDE = 0.95  # share of the draws that lie in an interval


@dataclass(frozen=True)
class Contender:
    """A run that was measured."""

    label: str
    path: Path  # of the checkpoint
    where: str  # it was computed, and how
    imgsz: int
    epoch: int | None  # of the checkpoint, from 1
    settings: Mapping[str, Any]  # that it was trained with; nothing where they are not known
    history: Sequence[Mapping[str, Any]]  # rows of its metrics.csv, if there is one
    evaluation: Evaluation
    order: Sequence[int]  # C, the number that each of its classes has in the first run

    @property
    def confidence(self) -> float:
        """That of its best mean F1."""
        return self.evaluation.curves.best_confidence

    @cached_property
    def detections(self) -> list[Detections]:
        """Of each image, by the class numbers of the first run."""
        numbers = torch.tensor(self.order)
        return [one._replace(classes=numbers[one.classes]) for one in self.evaluation.detections]

    def row(self) -> dict[str, float]:
        """Its metrics by their names."""
        metrics = self.evaluation.metrics
        sizes = {"AP small": metrics.small, "AP medium": metrics.medium, "AP large": metrics.large}
        return {**self.evaluation.row(), **sizes}

    def class_precision(self) -> NDArray[np.float64]:
        """(C,) AP50-95 by the class numbers of the first run; NaN for a class that is not there."""
        found = np.full(len(self.order), np.nan)
        found[list(self.order)] = self.evaluation.metrics.class_map50_95
        return found


class Interval(NamedTuple):
    """A difference of a metric, and where it lies as the images are drawn anew."""

    difference: float  # on the set itself
    low: float
    high: float
    higher: float  # share of the draws in which it is above 0

    @property
    def verdict(self) -> str:
        """better, worse, equal (both ends are 0), open (0 is inside), or unknown (there is nothing to find)."""
        if np.isnan([self.difference, self.low, self.high]).any():
            return "unknown"
        if self.low == self.high == self.difference == 0:
            return "equal"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "open"


@dataclass(frozen=True)
class Sighting:
    """What a run finds at its own confidence of the best F1, as objects matched at IoU 0.5."""

    found: NDArray[np.bool_]  # (G,) true boxes; crowd regions are never found
    wrong: list[NDArray[np.float64]]  # of each image (n, 4) boxes where no object of that class is left, nor a crowd


@dataclass(frozen=True)
class Comparison:
    """Runs, the first of which the others are held against."""

    runs: Sequence[Contender]
    names: Sequence[str]  # of the classes
    truth: GroundTruth
    data: str  # which images, for people
    draws: int
    intervals: Mapping[str, Sequence[Interval]]  # by metric, of each run but the first
    sightings: Sequence[Sighting]

    @cached_property
    def found(self) -> NDArray[np.bool_]:
        """(R, G) which run finds which true box."""
        return np.stack([one.found for one in self.sightings])

    @cached_property
    def apart(self) -> NDArray[np.int64]:
        """(I,) objects that some run finds and some other misses."""
        differs = self.found.any(axis=0) & ~self.found.all(axis=0)
        return np.bincount(self.truth.image_of_box[differs], minlength=len(self.truth))

    def only(self, one: int, other: int) -> NDArray[np.int64]:
        """(I,) objects that run `one` finds and run `other` misses."""
        differs = self.found[one] & ~self.found[other]
        return np.bincount(self.truth.image_of_box[differs], minlength=len(self.truth))

    def worst(self) -> list[int]:
        """The images in which the runs differ, those with most such objects first."""
        return [int(i) for i in np.argsort(-self.apart, kind="stable") if self.apart[i]]


def compare(
    runs: Sequence[Contender], names: Sequence[str], truth: GroundTruth, data: str, draws: int, seed: int
) -> Comparison:
    """The comparison of runs on one set of images."""
    matched = [match(truth, one.detections, len(names)) for one in runs]
    exact = [mean_precisions(one, np.ones((1, len(truth))))[0] for one in matched]
    drawn: list[list[NDArray[np.float64]]] = [[] for _ in runs]
    at_once = max(1, AT_ONCE // len(truth))
    for start in range(0, draws, at_once):
        weights = draw_images(len(truth), range(start, min(start + at_once, draws)), seed)
        for parts, one in zip(drawn, matched, strict=True):
            parts.append(mean_precisions(one, weights))
    values = [np.concatenate(parts) for parts in drawn]
    intervals = {
        metric: [interval(exact[k][m] - exact[0][m], values[k][:, m] - values[0][:, m]) for k in range(1, len(runs))]
        for m, metric in enumerate(METRICS)
    }
    sightings = [sighting(truth, one.detections, one.confidence) for one in runs]
    return Comparison(runs, names, truth, data, draws, intervals, sightings)


def interval(difference: float, drawn: NDArray[np.float64]) -> Interval:
    """The middle of (W,) differences; draws without anything to find (NaN) are left out."""
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn):
        return Interval(float(difference), *(float("nan"),) * 3)
    low, high = np.quantile(drawn, ((1 - INSIDE) / 2, (1 + INSIDE) / 2))
    return Interval(float(difference), float(low), float(high), float((drawn > 0).mean()))


def sighting(truth: GroundTruth, detections: Sequence[Detections], confidence: float) -> Sighting:
    """What the detections with at least that confidence find, by COCO's matching within a class."""
    flat = flatten([one.above(confidence) for one in detections])
    pairs = overlapping_pairs(truth, flat, CURVE_IOU)
    pairs = pairs.select(flat.classes[pairs.detection] == truth.classes[pairs.truth])
    on_crowd = truth.crowd[pairs.truth]
    truth_of = match_by_score(pairs.select(~on_crowd), len(flat.scores), len(truth.classes))
    found = np.zeros(len(truth.classes), dtype=bool)
    found[truth_of[truth_of >= 0]] = True
    wrong = truth_of < 0
    wrong[pairs.detection[on_crowd]] = False
    boxes = [flat.boxes_xyxy[a:b][wrong[a:b]] for a, b in zip(flat.offsets[:-1], flat.offsets[1:], strict=True)]
    return Sighting(found, boxes)
