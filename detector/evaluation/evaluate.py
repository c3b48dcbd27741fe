"""A network judged on a data set: detections, COCO metrics, curves and confusion matrix."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detector.evaluation import coco
from detector.evaluation.coco import CocoMetrics, GroundTruth, build_ground_truth
from detector.evaluation.curves import ConfusionMatrix, Curves, compute_confusion, compute_curves
from detector.inference.infer import JUDGED, Limits, Runtime, find_objects, within_memory
from detector.inference.sliced import Slicing, find_in_tiles
from detector.model.selection import Detections

if TYPE_CHECKING:
    from detector.data.dataset import Letterbox
    from detector.data.index import Index

ValidationBatch = tuple[Tensor, "list[Letterbox]", list[int]]


@dataclass(frozen=True)
class Evaluation:
    """Everything known about a network after one pass over a data set."""

    metrics: CocoMetrics
    curves: Curves
    confusion: ConfusionMatrix
    detections: list[Detections]  # of each image, in the order of the set; pixels of the original image
    images: int  # in the set
    class_images: NDArray[np.int64]  # (C,) images with at least one true box of the class
    class_instances: NDArray[np.int64]  # (C,) true boxes of the class; crowd regions are not counted
    seconds: dict[str, float]  # per stage: load, detect, metrics
    missing: tuple[int, ...] = ()  # images that are damaged: nothing is found in them

    def row(self) -> dict[str, float]:
        """What a line of metrics.csv holds, in 0..1; NaN if the set has no true box at all."""
        precision, recall, f1 = self.curves.at_best()
        return {
            "mAP50-95": self.metrics.map50_95,
            "mAP50": self.metrics.map50,
            "mAP75": self.metrics.map75,
            "precision": precision,
            "recall": recall,
            "F1": f1,
        }


def ground_truth_of(index: Index) -> GroundTruth:
    """The boxes of a data set's index, for the metrics."""
    images = range(len(index))
    return build_ground_truth(
        index.heights,
        index.widths,
        [index.boxes_xyxy(i) for i in images],
        [index.labels(i) for i in images],
        [index.ignored(i) for i in images],
        index.areas,
    )


def evaluate_runtime(
    runtime: Runtime,
    batches: Iterable[ValidationBatch],
    ground_truth: GroundTruth,
    names: Sequence[str],
    limits: Limits = JUDGED,
    *,
    on_batch: Callable[[int], None] | None = None,
    judged: Collection[int] | None = None,
    slicing: Slicing | None = None,
) -> Evaluation:
    """The evaluation of a network, or of an export of one, on a whole data set. `judged`: see `judge_found`.

    `batches` yields uint8 images (B, H, W, 3), their letterboxes and their indices in the set, each image once, damaged
    ones never, in any order. `on_batch` is told the number of images of each finished batch. With `slicing` the images
    are whole ones in their own pixels, which are looked at in tiles.
    """
    seconds = dict.fromkeys(("load", "detect"), 0.0)
    found: dict[int, Detections] = {}
    for index, detections in detect(runtime, batches, limits, on_batch=on_batch, seconds=seconds, slicing=slicing):
        found[index] = detections
    evaluation = judge_found(ground_truth, found, names, judged)
    return replace(evaluation, seconds=seconds | evaluation.seconds)


def judge_found(
    ground_truth: GroundTruth,
    found: Mapping[int, Detections],
    names: Sequence[str],
    judged: Collection[int] | None = None,
) -> Evaluation:
    """The evaluation of the detections in the images that could be looked at, by their index; nothing in the others.

    judged: numbers of the classes whose detections count; None: all. The ground truth is to have no others.
    """
    if judged is not None:
        found = {i: one.of_classes(judged) for i, one in found.items()}
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    images = range(len(ground_truth))
    evaluation = judge(ground_truth, [found.get(i, nothing) for i in images], names)
    return replace(evaluation, missing=tuple(i for i in images if i not in found))


def detect(
    runtime: Runtime,
    batches: Iterable[ValidationBatch],
    limits: Limits = JUDGED,
    *,
    on_batch: Callable[[int], None] | None = None,
    seconds: dict[str, float] | None = None,
    slicing: Slicing | None = None,
) -> Iterator[tuple[int, Detections]]:
    """Yields (index in the set, detections in pixels of the original image, on the CPU) of each image of `batches`.

    Time spent is added to `seconds` (load, detect). `batches` and `slicing` are those of `evaluate_runtime`.
    """
    seconds = {} if seconds is None else seconds
    source, most = iter(batches), None
    while True:
        with _timed(seconds, "load"):
            batch = next(source, None)
        if batch is None:
            return
        images, letterboxes, indices = batch
        with _timed(seconds, "detect"):
            if slicing is None:
                found, most = _found(runtime, images, letterboxes, limits, most)
            else:
                found, most = _found_in_tiles(runtime, images, slicing, limits, most)
        yield from zip(indices, found, strict=True)
        if on_batch is not None:
            on_batch(len(indices))


def _found(
    runtime: Runtime, images: Tensor, letterboxes: list[Letterbox], limits: Limits, most: int | None
) -> tuple[list[Detections], int | None]:
    return within_memory(
        lambda part: find_objects(runtime, images[part], letterboxes[part], limits), len(letterboxes), most
    )


def _found_in_tiles(
    runtime: Runtime, images: Tensor, slicing: Slicing, limits: Limits, most: int | None
) -> tuple[list[Detections], int | None]:
    found = []
    for image in images.numpy():
        one, most = find_in_tiles(runtime, image, slicing, limits, most)
        found.append(one)
    return found, most


def judge(ground_truth: GroundTruth, detections: list[Detections], names: Sequence[str]) -> Evaluation:
    """The evaluation of one `Detections` per image, in the order of the ground truth and in original pixels."""
    seconds: dict[str, float] = {}
    with _timed(seconds, "metrics"):
        metrics = coco.evaluate(ground_truth, detections, names)
        curves = compute_curves(ground_truth, detections, len(names))
        confusion = compute_confusion(ground_truth, detections, len(names))
    real = ~ground_truth.crowd
    pairs = np.unique(np.stack((ground_truth.classes[real], ground_truth.image_of_box[real])), axis=1)
    return Evaluation(
        metrics=metrics,
        curves=curves,
        confusion=confusion,
        detections=detections,
        images=len(ground_truth),
        class_images=np.bincount(pairs[0], minlength=len(names)),
        class_instances=np.bincount(ground_truth.classes[real], minlength=len(names)),
        seconds=seconds,
    )


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the time spent inside to seconds[stage]."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
