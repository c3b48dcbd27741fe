"""What is wrong with the detections of each image, and which images are the worst. Legend: D detections, G true boxes.

At one confidence every detection and every true box has one verdict:

1. right: they are of one class and overlap by IoU 0.5, matched as for the curves;
2. wrong class: of those left over, a detection on a true box (IoU 0.5) of another class;
3. badly placed: of those left over, a detection that meets a true box of its class, but by less (IoU 0.1);
4. what is left: a false detection (one that finds a box for the second time, too), a missed true box.

A wrong class and a bad place are one mistake, which both ends share. Detections in crowd regions are excused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detector.evaluation.coco import GroundTruth
from detector.evaluation.curves import CURVE_IOU
from detector.evaluation.matching import Flat, Pairs, flatten, match_by_overlap, match_by_score, overlapping_pairs
from detector.model.selection import Detections

TOUCHING_IOU = 0.1
RIGHT, WRONG_CLASS, MISPLACED, FALSE, MISSED, EXCUSED = range(6)
MISTAKES = (MISSED, FALSE, MISPLACED, WRONG_CLASS)


@dataclass(frozen=True)
class Verdicts:
    """What became of every detection with at least `confidence`, and of every true box."""

    confidence: float
    found: Flat  # the detections
    of_detections: NDArray[np.int64]  # (D,)
    of_truths: NDArray[np.int64]  # (G,)
    partners: NDArray[np.int64]  # (D,) the true box (its row in the data set) that a detection has to do with; -1: none
    counts: NDArray[np.int64]  # (images, 6) how many of each verdict; what has two ends counts once

    @property
    def mistakes(self) -> NDArray[np.int64]:
        """(images,) how many mistakes an image has."""
        return self.counts[:, MISTAKES].sum(axis=1)

    @property
    def badness(self) -> NDArray[np.float64]:
        """(images,) mistakes times their share among all that there was to judge.

        By number alone the fullest images would be the worst, by share alone those with one object.
        """
        wrong = self.mistakes
        return wrong * wrong / np.maximum(wrong + self.counts[:, RIGHT], 1)

    def worst(self, most: int) -> list[int]:
        """The images with the highest badness, the first of equals; none without a mistake."""
        order = np.argsort(-self.badness, kind="stable")
        return [int(i) for i in order[:most] if self.mistakes[i]]

    def best(self, most: int, but: Sequence[int] = ()) -> list[int]:
        """Images where something is right, by lowest badness and then by how much is right; none of `but`."""
        order = np.lexsort((-self.counts[:, RIGHT], self.badness))
        others = set(but)
        return [int(i) for i in order if self.counts[i, RIGHT] and int(i) not in others][:most]


def judge_each(ground_truth: GroundTruth, detections: Sequence[Detections], confidence: float) -> Verdicts:
    """The verdicts on one `Detections` per image, in the order of the ground truth."""
    flat = flatten([one.above(confidence) for one in detections])
    pairs = overlapping_pairs(ground_truth, flat, TOUCHING_IOU)
    same = flat.classes[pairs.detection] == ground_truth.classes[pairs.truth]
    on_crowd, close = ground_truth.crowd[pairs.truth], pairs.overlap >= CURVE_IOU
    of_detections = np.full(len(flat.scores), FALSE)
    of_detections[pairs.detection[same & on_crowd & close]] = EXCUSED
    of_truths = np.where(ground_truth.crowd, EXCUSED, MISSED)
    partners = np.full(len(flat.scores), -1)
    for verdict, candidates in ((RIGHT, same & close), (WRONG_CLASS, ~same & close), (MISPLACED, same)):
        matched = _matched(pairs.select(candidates & ~on_crowd), verdict, of_detections, of_truths)
        found = matched >= 0
        of_detections[found], partners[found] = verdict, matched[found]
        of_truths[matched[found]] = verdict
    return Verdicts(
        confidence, flat, of_detections, of_truths, partners, _counted(ground_truth, flat, of_detections, of_truths)
    )


def _matched(
    pairs: Pairs, verdict: int, of_detections: NDArray[np.int64], of_truths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(D,) the true box that each detection gets in this round, -1 for none; who is settled is not asked again."""
    if verdict == RIGHT:  # a crowd excuses only what finds nothing
        return match_by_score(pairs, len(of_detections), len(of_truths))
    free = (of_detections[pairs.detection] == FALSE) & (of_truths[pairs.truth] == MISSED)
    return match_by_overlap(pairs.select(free), len(of_detections), len(of_truths))


def _counted(
    ground_truth: GroundTruth, flat: Flat, of_detections: NDArray[np.int64], of_truths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(images, 6): all verdicts on detections, and the true boxes that were missed."""
    images = len(ground_truth)
    counts = np.zeros((images, 6), dtype=np.int64)
    np.add.at(counts, (np.repeat(np.arange(images), np.diff(flat.offsets)), of_detections), 1)
    missed = of_truths == MISSED
    np.add.at(counts, (ground_truth.image_of_box[missed], MISSED), 1)
    return counts
