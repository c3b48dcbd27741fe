"""From decoded output to detections: confidence floor, class-aware non-maximum suppression (NMS), the best N.

Every image is treated alone and nothing depends on time, so detections do not depend on the batch size or the machine's
speed. Legend: B images, A anchors, N boxes, C classes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FIRST_PREFIX = 1000  # candidates looked at first; doubled until `max_det` boxes are kept or no candidate is left
FARTHEST = 2.0**20  # pixels: where a box that reaches farther is taken to end, or its size would cost the others digits
DOUBLES = "cpu", "cuda"  # devices that compute in double precision; Apple's mps, for one, does not


class Detections(NamedTuple):
    """What was found in one image, sorted by falling score."""

    boxes_xyxy: Tensor  # (N, 4) float32 pixels of the network input, or of the original image where that is said
    scores: Tensor  # (N,) float32 in 0..1
    classes: Tensor  # (N,) int64

    def cpu(self) -> Detections:
        """The same detections in the host's memory."""
        return Detections(*(field.cpu() for field in self))

    def above(self, confidence: float) -> Detections:
        """The detections whose score is at least `confidence`, in the same order."""
        keep = self.scores >= confidence
        return Detections(*(field[keep] for field in self))

    def of_classes(self, classes: Collection[int]) -> Detections:
        """The detections of these classes, in the same order."""
        keep = torch.isin(self.classes, self.classes.new_tensor(list(classes)))
        return Detections(*(field[keep] for field in self))


def non_max_suppression(
    boxes_xyxy: Tensor, scores: Tensor, conf: float, iou: float, max_det: int = 300, multi_label: bool = True
) -> list[Detections]:
    """Detections of each of the B images: (B, A, 4) boxes in pixels and (B, A, C) scores to B `Detections`.

    A candidate is a pair of an anchor and a class with a score of at least `conf`; with `multi_label` an anchor may
    give several, without it only that of its best class (the first of equals). Greedy NMS per class, in the order of
    falling score (equal scores: lower anchor, then lower class first), drops a candidate whose IoU with a kept one of
    its class exceeds `iou`; the first `max_det` kept are returned. Anchors whose box is not finite and scores that are
    NaN give nothing.
    """
    return [
        _of_one_image(image_boxes, image_scores, conf, iou, max_det, multi_label)
        for image_boxes, image_scores in zip(boxes_xyxy.float(), scores.float(), strict=True)
    ]


def best_candidates(
    boxes_xyxy: Tensor, scores: Tensor, conf: float, max_det: int = 300, multi_label: bool = True
) -> list[Detections]:
    """Detections of each of the B images without suppression, for a branch that was trained to answer once.

    Of the `max_det` anchors with the best class, the `max_det` best pairs of an anchor and a class whose score is at
    least `conf`; without `multi_label` each anchor's best class alone. Equal scores: lower anchor, then lower class.
    """
    found = []
    for boxes, values in zip(boxes_xyxy.float(), scores.float(), strict=True):
        values = values.where(boxes.isfinite().all(dim=1, keepdim=True) & ~values.isnan(), -1.0)
        top, best = values.max(dim=1)
        anchors = _best(top, max_det)[:max_det]
        classes = values.shape[1]
        if multi_label:
            flat = values[anchors].reshape(-1)
            anchor, label = anchors.repeat_interleave(classes), torch.arange(classes, device=flat.device)
            label = label.repeat(len(anchors))
        else:
            flat, anchor, label = top[anchors], anchors, best[anchors]
        passed = (flat >= max(conf, 0.0)).nonzero().squeeze(1)
        order = passed[_best(flat[passed], max_det)[:max_det]]
        found.append(Detections(boxes[anchor[order]], flat[order], label[order]))
    return found


def _of_one_image(
    boxes_xyxy: Tensor, scores: Tensor, conf: float, iou: float, max_det: int, multi_label: bool
) -> Detections:
    """`non_max_suppression` of one image: (A, 4) boxes and (A, C) scores.

    Greedy NMS goes in the order of the scores, so what it keeps of the best K candidates is what it keeps first of all
    of them. An untrained network passes nearly every anchor and class; looking at prefixes of growing length and
    stopping at `max_det` makes that case cheap and stays exact. What one prefix suppressed suppresses nothing in the
    next, so only the kept are carried over.
    """
    classes_per_anchor = scores.shape[1]
    flat = scores.reshape(-1)
    passed = (scores >= conf) & boxes_xyxy.isfinite().all(dim=1, keepdim=True)
    if not multi_label:
        best = torch.zeros_like(passed).scatter_(1, scores.max(dim=1, keepdim=True).indices, True)
        passed = passed & best
    candidates = passed.reshape(-1).nonzero().squeeze(1)  # flat indices, ascending: by anchor, then class
    values = flat[candidates]

    kept = candidates[:0]
    seen, length = 0, FIRST_PREFIX
    while seen < len(candidates) and len(kept) < max_det:
        order = _best(values, length)
        fresh = candidates[order[seen:]]
        pool = torch.cat((kept, fresh))
        anchors, classes = pool // classes_per_anchor, pool % classes_per_anchor
        kept = pool[_greedy(boxes_xyxy[anchors], classes, iou)]
        seen, length = len(order), 2 * length
    kept = kept[:max_det]
    return Detections(boxes_xyxy[kept // classes_per_anchor], flat[kept], kept % classes_per_anchor)


def _best(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` highest values in falling order, equal ones by position; more if the last one is tied.

    topk alone leaves the order of equal values open, so it only finds the smallest value that belongs.
    """
    if count >= len(values):
        return values.sort(descending=True, stable=True).indices
    smallest = values.topk(count).values[-1]
    belongs = (values >= smallest).nonzero().squeeze(1)
    return belongs[values[belongs].sort(descending=True, stable=True).indices]


def _greedy(boxes_xyxy: Tensor, classes: Tensor, iou: float) -> Tensor:
    """Positions kept by greedy NMS within classes, of boxes that come in falling order of score; ascending.

    The boxes of each class are moved to a place of their own, in double precision so that the shift costs no digit:
    what it rounds of a coordinate is below FARTHEST * classes / 2**53 pixels. torchvision's `batched_nms` shifts in
    fp32, which does, and past 1,000 boxes goes class by class, which takes twice the time with 80 classes.
    """
    device = boxes_xyxy.device
    boxes, classes = (one.to(device if device.type in DOUBLES else "cpu") for one in (boxes_xyxy, classes))
    boxes = boxes.double().clamp(-FARTHEST, FARTHEST)
    span = boxes.max() - boxes.min() + 1
    apart = boxes + (classes * span)[:, None]
    rank = torch.arange(len(boxes), 0, -1, device=boxes.device, dtype=boxes.dtype)
    return _operator()(apart, rank, iou).to(device)


@cache
def _operator() -> Callable[[Tensor, Tensor, float], Tensor]:
    """torchvision's `nms`, from its library of operators alone where that can be had.

    Its package imports all its models and torch's compiler too, which takes longer than torch itself.
    """
    package = importlib.util.find_spec("torchvision")
    if "torchvision" not in sys.modules and package is not None:
        for place in package.submodule_search_locations or ():
            for library in Path(place).glob("_C*.so"):
                with suppress(OSError):
                    torch.ops.load_library(library)
    if hasattr(torch.ops.torchvision, "nms"):
        return torch.ops.torchvision.nms
    from torchvision.ops import nms

    return nms
