"""How far mAP depends on which images happened to be in the set: the bootstrap over images.

A draw is as many images as the set has, drawn with replacement, told as how often each comes. Within an image a
detection's match is the same in every draw, so matching is done once, and a draw costs running sums. The AP of a draw
is COCO's to the last digits: ten IoU thresholds .50:.05:.95, 101 recall points, crowd regions ignored, all areas, at
most 100 detections per image and class. Where an image is drawn several times, the copies of a detection stand next to
each other in the order of scores: that matters only to scores that are equal, whose order COCO leaves open, too.

Legend: I images, D detections, G true boxes, C classes, T IoU thresholds, W draws.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detector.evaluation.coco import MAX_DETECTIONS, GroundTruth
from detector.evaluation.matching import Flat, flatten, match_by_score, overlapping_pairs
from detector.model.selection import Detections
from detector.rng import Purpose, generator

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALL_POINTS = np.linspace(0, 1, 101)
AT_ONCE = 300_000  # weights of detections that are computed with at once: what fits a processor's cache
TINY = np.spacing(1)  # COCO adds it to the number of detections that it divides by


@dataclass(frozen=True)
class Matched:
    """What became of each detection of a set, and what there was to find."""

    image: NDArray[np.int64]  # (D,)
    by_class: tuple[NDArray[np.int64], ...]  # C, the detections of each class by falling score
    correct: NDArray[np.bool_]  # (T, D) found a true box
    excused: NDArray[np.bool_]  # (T, D) found none and lies in a crowd region: counts for nothing
    to_find: NDArray[np.float64]  # (I, C) true boxes


def match(truth: GroundTruth, detections: Sequence[Detections], nc: int) -> Matched:
    """Match one `Detections` per image, in the order of the ground truth, at all thresholds; `nc` classes."""
    flat = _most_certain(flatten(detections), MAX_DETECTIONS[-1])
    pairs = overlapping_pairs(truth, flat, THRESHOLDS[0])
    pairs = pairs.select(flat.classes[pairs.detection] == truth.classes[pairs.truth])
    on_crowd = truth.crowd[pairs.truth]
    real, crowd = pairs.select(~on_crowd), pairs.select(on_crowd)
    correct, excused = (np.zeros((len(THRESHOLDS), len(flat.scores)), dtype=bool) for _ in range(2))
    for t, least in enumerate(THRESHOLDS):
        close = real.select(real.overlap >= least)
        correct[t] = match_by_score(close, len(flat.scores), len(truth.classes)) >= 0
        excused[t, crowd.detection[crowd.overlap >= least]] = True
    to_find = np.zeros((len(truth), nc))
    np.add.at(to_find, (truth.image_of_box[~truth.crowd], truth.classes[~truth.crowd]), 1)
    order = np.argsort(-flat.scores, kind="stable")
    return Matched(
        np.repeat(np.arange(len(truth)), np.diff(flat.offsets)),
        tuple(order[flat.classes[order] == c] for c in range(nc)),
        correct,
        excused & ~correct,
        to_find,
    )


def _most_certain(flat: Flat, most: int) -> Flat:
    """Those detections that are among the first `most` of their image and class."""
    image = np.repeat(np.arange(len(flat.offsets) - 1), np.diff(flat.offsets))
    order = np.lexsort((np.arange(len(image)), -flat.scores, flat.classes, image))
    key = np.stack((image, flat.classes))[:, order]
    first = np.flatnonzero(np.any(key[:, 1:] != key[:, :-1], axis=0)) + 1
    starts = np.concatenate(([0], first))
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order)))) if len(order) else order
    keep = np.zeros(len(image), dtype=bool)
    keep[order[place < most]] = True
    counts = np.bincount(image[keep], minlength=len(flat.offsets) - 1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Flat(flat.boxes_xyxy[keep], flat.scores[keep], flat.classes[keep], offsets)


def average_precision(matched: Matched, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """(W, C, T) the AP of each draw; NaN for a class that has nothing to find in it.

    weights: (W, I) how often each image comes, whole numbers; all ones give the AP of the set.
    """
    found = np.full((len(weights), len(matched.by_class), len(THRESHOLDS)), np.nan)
    to_find = weights @ matched.to_find
    for c, rows in enumerate(matched.by_class):
        if not matched.to_find[:, c].any():
            continue
        correct = [np.flatnonzero(one) for one in matched.correct[:, rows]]
        excused = [np.flatnonzero(one) for one in matched.excused[:, rows]]
        step = max(1, AT_ONCE // max(len(rows), 1))
        for start in range(0, len(weights), step):
            part = slice(start, start + step)
            found[part, c] = _of_class(weights[part][:, matched.image[rows]], correct, excused, to_find[part, c])
    found[to_find == 0] = np.nan
    return found


def _of_class(
    weights: NDArray[np.float64],
    correct: Sequence[NDArray[np.int64]],
    excused: Sequence[NDArray[np.int64]],
    to_find: NDArray[np.float64],
) -> NDArray[np.float64]:
    """(W, T) the AP of one class; (W, D) weights of its detections by falling score, T lists of them, (W,) true boxes.

    Precision can only be highest right after a detection that is correct, and recall grows only there: the rest of the
    detections are needed for their running number alone.
    """
    counted = np.cumsum(weights, axis=1)  # detections up to each
    precisions = np.zeros((len(weights), len(correct)))
    for t, (hits, others) in enumerate(zip(correct, excused, strict=True)):
        seen = counted[:, hits]
        if len(others):
            before = np.cumsum(np.pad(weights[:, others], ((0, 0), (1, 0))), axis=1)
            seen = seen - before[:, np.searchsorted(others, hits)]
        positives = np.cumsum(weights[:, hits], axis=1)
        precision = positives / (seen + TINY)
        best_from_here = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        recall = positives / np.maximum(to_find, 1)[:, None]
        reached = np.searchsorted(RECALL_POINTS, recall, side="right")  # recall points up to each
        precisions[:, t] = (best_from_here * np.diff(reached, axis=1, prepend=0)).sum(axis=1)
    return precisions / len(RECALL_POINTS)


def draw_images(images: int, draws: Iterable[int], seed: int) -> NDArray[np.float64]:
    """(W, I) how often each image comes in each draw, given by its number; a function of the three."""
    drawn = [generator(seed, Purpose.RESAMPLE, draw).integers(images, size=images) for draw in draws]
    return np.stack([np.bincount(one, minlength=images) for one in drawn]).astype(np.float64)


def mean_precisions(matched: Matched, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """(W, 2) mAP50-95 and mAP50 of each draw: means over the classes that it has; NaN where it has none."""
    by_class = average_precision(matched, weights)
    both = np.stack((by_class.mean(axis=2), by_class[:, :, 0]), axis=2)
    known = ~np.isnan(both)
    counts = known.sum(axis=1)
    sums = np.where(known, both, 0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
