"""Precision, recall and F1 against confidence, precision against recall, and the confusion matrix.

Legend: D detections, G true boxes, C classes, K confidences, R recall points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detector.evaluation.coco import GroundTruth
from detector.evaluation.matching import Flat, flatten, match_by_overlap, match_by_score, overlapping_pairs
from detector.model.selection import Detections

CURVE_IOU = 0.5
CONFUSION_CONFIDENCE = 0.25
CONFUSION_IOU = 0.45


@dataclass(frozen=True)
class Curves:
    """Curves at IoU 0.5, one row per class; rows of classes without ground truth are NaN and left out of means."""

    confidence: NDArray[np.float64]  # (K,) 0 to 1
    precision: NDArray[np.float64]  # (C, K) of the detections with at least that confidence; 0 where there are none
    recall: NDArray[np.float64]  # (C, K)
    f1: NDArray[np.float64]  # (C, K)
    recall_points: NDArray[np.float64]  # (R,) 0 to 1 in steps of 0.01
    pr_precision: NDArray[np.float64]  # (C, R) best precision at that recall or more, 0 beyond the highest reached
    best: int  # position in `confidence` with the highest mean F1 (the lowest such confidence)

    @property
    def best_confidence(self) -> float:
        """The confidence with the highest mean F1."""
        return float(self.confidence[self.best])

    @property
    def mean_f1(self) -> NDArray[np.float64]:
        """(K,) the mean over classes; NaN if no class has ground truth."""
        return _class_mean(self.f1)

    @property
    def mean_pr_precision(self) -> NDArray[np.float64]:
        """(R,) the mean over classes; its own mean is mAP50."""
        return _class_mean(self.pr_precision)

    def at_best(self) -> tuple[float, float, float]:
        """Precision, recall and F1, each the mean over classes, at the confidence with the highest mean F1."""
        precision, recall, f1 = (_class_mean(table)[self.best] for table in (self.precision, self.recall, self.f1))
        return float(precision), float(recall), float(f1)


@dataclass(frozen=True)
class ConfusionMatrix:
    """How true boxes were detected: counts[true class, detected class], the last of each is the background.

    counts[c, C] are missed boxes of class c, counts[C, c] detections of class c where there is nothing.
    """

    counts: NDArray[np.int64]  # (C + 1, C + 1)
    confidence: float
    iou: float

    @property
    def by_truth(self) -> NDArray[np.float64]:
        """(C + 1, C + 1) each row as shares of its sum; rows without any count are 0."""
        total = self.counts.sum(axis=1, keepdims=True)
        return self.counts / np.maximum(total, 1)


def compute_curves(
    ground_truth: GroundTruth, detections: Sequence[Detections], nc: int, iou: float = CURVE_IOU, points: int = 1001
) -> Curves:
    """Curves of one `Detections` per image, in the order of the ground truth, for `nc` classes.

    Within a class and an image, in the order of falling score, each detection takes the true box that it overlaps most
    and that is free, if the IoU is at least `iou`. A detection left over that lies in a crowd region counts as neither
    right nor wrong.
    """
    flat = flatten(detections)
    correct, counts = judged_correct(ground_truth, flat, iou)
    to_find = np.bincount(ground_truth.classes[~ground_truth.crowd], minlength=nc)
    confidence = np.linspace(0, 1, points)
    recall_points = np.linspace(0, 1, 101)
    precision, recall, f1 = (np.full((nc, points), np.nan) for _ in range(3))
    pr_precision = np.full((nc, len(recall_points)), np.nan)
    for c in np.flatnonzero(to_find):
        rows = np.flatnonzero(counts & (flat.classes == c))
        rows = rows[np.argsort(-flat.scores[rows], kind="stable")]
        true_positives = np.concatenate(([0], np.cumsum(correct[rows])))  # among the first 0, 1, ... detections
        detected = np.searchsorted(-flat.scores[rows], -confidence, side="right")  # with at least that confidence
        found = true_positives[detected]
        precision[c] = found / np.maximum(detected, 1)
        recall[c] = found / to_find[c]
        f1[c] = 2 * found / (detected + to_find[c])
        pr_precision[c] = _precision_at_recall(true_positives[1:], int(to_find[c]), recall_points)
    mean_f1 = _class_mean(f1)
    best = 0 if np.isnan(mean_f1).all() else int(np.argmax(mean_f1))
    return Curves(confidence, precision, recall, f1, recall_points, pr_precision, best)


def compute_confusion(
    ground_truth: GroundTruth,
    detections: Sequence[Detections],
    nc: int,
    confidence: float = CONFUSION_CONFIDENCE,
    iou: float = CONFUSION_IOU,
) -> ConfusionMatrix:
    """Confusion of the detections with at least `confidence`: matched one to one with the true boxes, whatever their
    classes, the highest IoU first, down to `iou`. Crowd regions are no truth, and detections in them no mistake.
    """
    flat = flatten([found.above(confidence) for found in detections])
    pairs = overlapping_pairs(ground_truth, flat, iou)
    on_crowd = ground_truth.crowd[pairs.truth]
    truth_of = match_by_overlap(pairs.select(~on_crowd), len(flat.scores), len(ground_truth.classes))
    excused = np.zeros(len(flat.scores), dtype=bool)
    excused[pairs.detection[on_crowd]] = True

    counts = np.zeros((nc + 1, nc + 1), dtype=np.int64)
    hit = truth_of >= 0
    np.add.at(counts, (ground_truth.classes[truth_of[hit]], flat.classes[hit]), 1)
    np.add.at(counts, (nc, flat.classes[~hit & ~excused]), 1)
    missed = ~ground_truth.crowd
    missed[truth_of[hit]] = False
    np.add.at(counts, (ground_truth.classes[missed], nc), 1)
    return ConfusionMatrix(counts, confidence, iou)


def judged_correct(ground_truth: GroundTruth, flat: Flat, iou: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(D,) whether a detection found a true box of its class; (D,) whether it counts (not if a crowd excuses it)."""
    pairs = overlapping_pairs(ground_truth, flat, iou)
    pairs = pairs.select(flat.classes[pairs.detection] == ground_truth.classes[pairs.truth])
    on_crowd = ground_truth.crowd[pairs.truth]
    correct = match_by_score(pairs.select(~on_crowd), len(flat.scores), len(ground_truth.classes)) >= 0
    counts = np.ones(len(flat.scores), dtype=bool)
    counts[pairs.detection[on_crowd]] = False
    return correct, counts | correct


def _precision_at_recall(
    true_positives: NDArray[np.int64], to_find: int, recall_points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(R,) COCO's interpolated precision: the best one at the first recall >= r or later, 0 where r is not reached."""
    precision = true_positives / np.arange(1, len(true_positives) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    first = np.searchsorted(true_positives / to_find, recall_points, side="left")
    return np.append(envelope, 0.0)[first]


def _class_mean(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over the rows that are not NaN; NaN (without a warning) if there are none."""
    rows = table[~np.isnan(table).all(axis=1)]
    return rows.mean(axis=0) if len(rows) else np.full(table.shape[1], np.nan)
