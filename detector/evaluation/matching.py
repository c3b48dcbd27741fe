"""One-to-one matching of detections and true boxes over a whole data set at once, in numpy.

Candidates are pairs of a detection and a true box. Legend: D detections, G true boxes, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from detector.evaluation.coco import GroundTruth
from detector.model.selection import Detections


class Flat(NamedTuple):
    """The detections of a data set one after the other, those of an image by falling score."""

    boxes_xyxy: NDArray[np.float64]  # (D, 4) pixels of the original image
    scores: NDArray[np.float64]  # (D,)
    classes: NDArray[np.int64]  # (D,)
    offsets: NDArray[np.int64]  # (images + 1,)


class Pairs(NamedTuple):
    """Overlapping pairs within images: detection and true box (their rows in the data set) and how far they overlap."""

    detection: NDArray[np.int64]  # (P,)
    truth: NDArray[np.int64]  # (P,)
    overlap: NDArray[np.float64]  # (P,) IoU, or for a crowd region the share of the detection that lies in it

    def select(self, mask: NDArray[np.bool_]) -> Pairs:
        """The pairs where `mask` (P,) holds."""
        return Pairs(self.detection[mask], self.truth[mask], self.overlap[mask])


def flatten(detections: Sequence[Detections]) -> Flat:
    """One `Detections` per image as flat arrays."""
    counts = [len(found.scores) for found in detections]
    return Flat(
        np.concatenate([np.zeros((0, 4)), *(found.boxes_xyxy.cpu().numpy() for found in detections)], dtype=np.float64),
        np.concatenate([np.zeros(0), *(found.scores.cpu().numpy() for found in detections)], dtype=np.float64),
        np.concatenate([np.zeros(0, dtype=np.int64), *(found.classes.cpu().numpy() for found in detections)]),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
    )


def overlapping_pairs(ground_truth: GroundTruth, flat: Flat, least: float) -> Pairs:
    """All pairs of one image whose overlap is at least `least` > 0, whatever their classes."""
    found: list[Pairs] = []
    for i in range(len(ground_truth)):
        first, first_truth = int(flat.offsets[i]), int(ground_truth.offsets[i])
        boxes = flat.boxes_xyxy[first : flat.offsets[i + 1]]
        truth, _, crowd = ground_truth.of_image(i)
        if not len(boxes) or not len(truth):
            continue
        overlap = _overlap(boxes, truth, crowd)
        rows, columns = np.nonzero(overlap >= least)
        found.append(Pairs(rows + first, columns + first_truth, overlap[rows, columns]))
    none = np.zeros(0, dtype=np.int64)
    return Pairs(
        np.concatenate([none, *(pairs.detection for pairs in found)]),
        np.concatenate([none, *(pairs.truth for pairs in found)]),
        np.concatenate([np.zeros(0), *(pairs.overlap for pairs in found)]),
    )


def match_by_score(pairs: Pairs, detections: int, truths: int) -> NDArray[np.int64]:
    """The COCO rule: in the order of falling score each detection takes the free true box it overlaps most.

    Equal overlaps: the later true box. Returns (D,) the true box of each detection, -1 for none.
    """
    wish = np.lexsort((-pairs.truth, -pairs.overlap))
    return _mutually_best(pairs, _inverse(wish), pairs.detection, detections, truths)


def match_by_overlap(pairs: Pairs, detections: int, truths: int) -> NDArray[np.int64]:
    """The pair that overlaps most is matched first, then the next whose two ends are both free, and so on.

    Equal overlaps: the earlier detection, then the earlier true box. Returns (D,) the true box of each detection, -1
    for none.
    """
    rank = _inverse(np.lexsort((pairs.truth, pairs.detection, -pairs.overlap)))
    return _mutually_best(pairs, rank, rank, detections, truths)


def _mutually_best(
    pairs: Pairs,
    detection_rank: NDArray[np.int64],
    truth_rank: NDArray[np.int64],
    detections: int,
    truths: int,
) -> NDArray[np.int64]:
    """Matches, round by round, every pair that is the best one left to both its ends; lower ranks are better.

    Such a pair is also what the one-by-one rules above arrive at: nobody who comes earlier can want either end. Each
    round settles many pairs at once, so there are few.
    """
    matched = np.full(detections, -1, dtype=np.int64)
    taken = np.zeros(truths, dtype=bool)
    detection, truth = pairs.detection, pairs.truth
    worst = np.iinfo(np.int64).max
    while len(detection):
        best_of_detection = np.full(detections, worst)
        best_of_truth = np.full(truths, worst)
        np.minimum.at(best_of_detection, detection, detection_rank)
        np.minimum.at(best_of_truth, truth, truth_rank)
        settled = (detection_rank == best_of_detection[detection]) & (truth_rank == best_of_truth[truth])
        matched[detection[settled]] = truth[settled]
        taken[truth[settled]] = True
        left = (matched[detection] < 0) & ~taken[truth]
        detection, truth = detection[left], truth[left]
        detection_rank, truth_rank = detection_rank[left], truth_rank[left]
    return matched


def _inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank of each element, of an order given as positions."""
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank


def _overlap(
    boxes_xyxy: NDArray[np.float64], truth_xyxy: NDArray[np.float64], crowd: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(D, G) IoU; for crowd regions intersection over the detection's own area, as in the COCO tools."""
    low = np.maximum(boxes_xyxy[:, None, :2], truth_xyxy[None, :, :2])
    high = np.minimum(boxes_xyxy[:, None, 2:], truth_xyxy[None, :, 2:])
    intersection = (high - low).clip(min=0).prod(axis=2)
    area = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).prod(axis=1)[:, None]
    truth_area = (truth_xyxy[:, 2:] - truth_xyxy[:, :2]).prod(axis=1)[None, :]
    union = np.where(crowd[None, :], area, area + truth_area - intersection)
    return np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)
