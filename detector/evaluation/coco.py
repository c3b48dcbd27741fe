"""Average precision and recall by the COCO protocol, through faster-coco-eval.

Ten IoU thresholds .50:.05:.95, 101 recall points, crowd regions ignored, area ranges split at 32^2 and 96^2 px, at most
100 detections per image and class. The numbers are those of the COCO tools to the last digit. What has no value (a
class, or a range of areas, without ground truth) is NaN and left out of means. Legend: N boxes, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import ArrayLike, NDArray

from detector.model.selection import Detections

MAX_DETECTIONS = (1, 10, 100)
AREAS = ("all", "small", "medium", "large")


@dataclass(frozen=True)
class GroundTruth:
    """The true boxes of a data set, packed: those of image i are rows offsets[i] to offsets[i + 1]."""

    heights: NDArray[np.int64]  # (images,) pixels
    widths: NDArray[np.int64]  # (images,) pixels
    offsets: NDArray[np.int64]  # (images + 1,)
    boxes_xyxy: NDArray[np.float64]  # (N, 4) pixels of the original image
    classes: NDArray[np.int64]  # (N,)
    crowd: NDArray[np.bool_]  # (N,) regions of many objects: neither to be found nor wrong to be found
    areas: NDArray[np.float32] | None = None  # (N,) square pixels where they are not the boxes', else NaN

    def __len__(self) -> int:
        return len(self.heights)

    def of_image(self, i: int) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
        """Boxes (n, 4), classes (n,) and crowd flags (n,) of image i."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.boxes_xyxy[rows], self.classes[rows], self.crowd[rows]

    @property
    def image_of_box(self) -> NDArray[np.int64]:
        """(N,) the image each box belongs to, ascending."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def coco(self) -> COCO:
        """The same boxes as the COCO tools hold them; image and category ids are our indices, annotation ids from 1."""
        corner, size = self.boxes_xyxy[:, :2], self.boxes_xyxy[:, 2:] - self.boxes_xyxy[:, :2]
        areas = size.prod(axis=1)
        if self.areas is not None:
            areas = np.where(np.isnan(self.areas), areas, self.areas)
        columns = (
            self.image_of_box.tolist(),
            self.classes.tolist(),
            np.concatenate((corner, size), axis=1).tolist(),
            areas.tolist(),
            self.crowd.astype(int).tolist(),
        )
        annotations = [
            {"id": i, "image_id": image, "category_id": category, "bbox": xywh, "area": area, "iscrowd": crowd}
            for i, (image, category, xywh, area, crowd) in enumerate(zip(*columns, strict=True), start=1)
        ]
        images = [
            {"id": i, "height": height, "width": width}
            for i, (height, width) in enumerate(zip(self.heights.tolist(), self.widths.tolist(), strict=True))
        ]
        categories = [{"id": category, "name": str(category)} for category in sorted(set(columns[1]))]
        return _coco({"images": images, "annotations": annotations, "categories": categories})


def build_ground_truth(
    heights: ArrayLike,
    widths: ArrayLike,
    boxes_xyxy: Sequence[ArrayLike],
    classes: Sequence[ArrayLike],
    crowd: Sequence[ArrayLike] | None = None,
    areas: NDArray[np.float32] | None = None,
) -> GroundTruth:
    """Ground truth of a data set from one entry per image, in the order of the set.

    `boxes_xyxy[i]` is (n, 4) pixels of the original image, `classes[i]` (n,), `crowd[i]` (n,) if given;
    `areas` (N,) of all, NaN where they are the boxes'.
    """
    boxes = [np.asarray(entry, dtype=np.float64).reshape(-1, 4) for entry in boxes_xyxy]
    labels = [np.asarray(entry, dtype=np.int64).reshape(-1) for entry in classes]
    flags = (
        [np.zeros(len(entry), dtype=bool) for entry in boxes]
        if crowd is None
        else [np.asarray(entry, dtype=bool).reshape(-1) for entry in crowd]
    )
    counts = [len(entry) for entry in boxes]
    assert counts == [len(entry) for entry in labels] == [len(entry) for entry in flags]
    truth = GroundTruth(
        heights=np.asarray(heights, dtype=np.int64),
        widths=np.asarray(widths, dtype=np.int64),
        offsets=np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int64),
        boxes_xyxy=np.concatenate([np.zeros((0, 4)), *boxes]),
        classes=np.concatenate([np.zeros(0, dtype=np.int64), *labels]),
        crowd=np.concatenate([np.zeros(0, dtype=bool), *flags]),
        areas=areas,
    )
    assert len(truth.heights) == len(truth.widths) == len(counts)
    return truth


@dataclass(frozen=True)
class CocoMetrics:
    """Results of the COCO protocol in 0..1; NaN where there is no ground truth to find."""

    map50_95: float
    map50: float
    map75: float
    small: float  # mAP50-95 of objects by area: below 32^2, up to 96^2, above, in pixels
    medium: float
    large: float
    ar1: float  # recall averaged over IoU .50:.95 with 1, 10, 100 detections per image and class
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float
    class_map50_95: NDArray[np.float64]  # (C,)
    class_map50: NDArray[np.float64]  # (C,)


def evaluate(ground_truth: GroundTruth, detections: Sequence[Detections], names: Sequence[str]) -> CocoMetrics:
    """COCO metrics of one `Detections` per image, in the order of the ground truth; boxes in original pixels."""
    assert len(detections) == len(ground_truth)
    annotations = []
    for image, found in enumerate(detections):
        xyxy = found.boxes_xyxy.cpu().numpy().astype(np.float64)
        size = xyxy[:, 2:] - xyxy[:, :2]
        rows = zip(
            np.concatenate((xyxy[:, :2], size), axis=1).tolist(),
            size.prod(axis=1).tolist(),
            found.scores.tolist(),
            found.classes.tolist(),
            strict=True,
        )
        annotations += [
            {"image_id": image, "category_id": category, "bbox": xywh, "area": area, "score": score, "iscrowd": 0}
            for xywh, area, score, category in rows
        ]
    for i, annotation in enumerate(annotations, start=1):
        annotation["id"] = i
    truth = ground_truth.coco
    found = _coco({key: truth.dataset[key] for key in ("images", "categories")} | {"annotations": annotations})
    return _run(truth, found, list(range(len(names))))


def evaluate_json(truth: dict[str, Any], detections: list[dict[str, Any]]) -> CocoMetrics:
    """COCO metrics of a COCO annotation file's content and a COCO result list; neither is altered.

    Classes are the truth's categories by ascending id. The areas are those of the annotations (for COCO the area of the
    segment, not of the box).
    """
    annotations = [dict(annotation) for annotation in truth["annotations"]]
    reference = _coco({**truth, "annotations": annotations})
    results = []
    for i, detection in enumerate(detections, start=1):
        area = detection["bbox"][2] * detection["bbox"][3]
        results.append({**detection, "id": i, "area": area, "iscrowd": 0})
    found = _coco({"images": truth["images"], "categories": truth["categories"], "annotations": results})
    return _run(reference, found, sorted(category["id"] for category in truth["categories"]))


def _quiet(*_: object) -> None:
    """Stands where the tools would print."""


def _coco(dataset: dict[str, Any]) -> COCO:
    """A COCO set from plain data, without the copies and derived masks of the tools' own loaders."""
    coco = COCO(print_function=_quiet)
    coco.dataset = dataset
    coco.createIndex()
    return coco


def _run(truth: COCO, found: COCO, categories: list[int]) -> CocoMetrics:
    """Runs the protocol and reads its tables: T IoU thresholds, R recall points, C classes, 4 areas, 3 maxima."""
    evaluation = COCOeval_faster(truth, found, "bbox", print_function=_quiet)
    evaluation.params.catIds = categories
    assert tuple(evaluation.params.maxDets) == MAX_DETECTIONS
    assert tuple(evaluation.params.areaRngLbl) == AREAS
    evaluation.evaluate()
    evaluation.accumulate()
    precision = _undefined_as_nan(evaluation.eval["precision"])[..., -1]  # (T, R, C, areas)
    recall = _undefined_as_nan(evaluation.eval["recall"])  # (T, C, areas, max dets)
    everything = precision[..., 0]
    return CocoMetrics(
        map50_95=_mean(everything),
        map50=_mean(everything[0]),
        map75=_mean(everything[5]),
        small=_mean(precision[..., 1]),
        medium=_mean(precision[..., 2]),
        large=_mean(precision[..., 3]),
        ar1=_mean(recall[..., 0, 0]),
        ar10=_mean(recall[..., 0, 1]),
        ar100=_mean(recall[..., 0, 2]),
        ar_small=_mean(recall[..., 1, 2]),
        ar_medium=_mean(recall[..., 2, 2]),
        ar_large=_mean(recall[..., 3, 2]),
        class_map50_95=np.array([_mean(everything[:, :, c]) for c in range(len(categories))]),
        class_map50=np.array([_mean(everything[0, :, c]) for c in range(len(categories))]),
    )


def _undefined_as_nan(table: ArrayLike) -> NDArray[np.float64]:
    """A copy of a table of the tools with NaN for their -1, "nothing to find here"."""
    values = np.array(table, dtype=np.float64)
    values[values == -1] = np.nan
    return values


def _mean(values: NDArray[np.float64]) -> float:
    """The mean of the defined values, NaN (without a warning) where there are none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")
