"""What is exported: a network and all that is done to its output, as one module of standard operations.

Legend: B images, A anchors, C classes. The input is (B, channels, H, W) float32 in 0..1. The output is raw, (B, 4 + C,
A): centre x, y, width, height in pixels of the input and a score for each class; or detections, (B, max_det, 6): x1,
y1, x2, y2, score, class, best first and padded with zeros. See `inference/runtimes/facts.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.inference.runtimes.facts import Facts
from detector.model.network import Network, fused
from detector.model.selection import non_max_suppression


class ExportGraph(nn.Module):
    """A network with its decoding and, as its facts say, the selection of detections."""

    def __init__(self, network: Network, facts: Facts):
        super().__init__()
        self.network = fused(network)
        if facts.half:
            self.network.half()
        self.facts = facts

    def forward(self, images: Tensor) -> Tensor:
        head = self.network.head
        boxes_xyxy, scores = head.decode(self.network(images.half() if self.facts.half else images))
        if self.facts.output == "raw":
            low, high = boxes_xyxy.split(2, dim=-1)
            return torch.cat(((low + high) / 2, high - low, scores), dim=-1).transpose(1, 2)
        if self.facts.nms == "inside":
            return self._suppressed(boxes_xyxy, scores)
        return self._best(boxes_xyxy, scores)

    def _best(self, boxes_xyxy: Tensor, scores: Tensor) -> Tensor:
        """Of the max_det anchors with the best class the max_det best pairs of an anchor and a class.

        The rule of `best_candidates`, for a branch that needs no suppression.
        """
        count, classes = self.facts.max_det, scores.shape[2]
        boxes_xyxy, scores = _padded(boxes_xyxy, count), _padded(scores, count)
        anchors = scores.amax(dim=2).topk(count, dim=1).indices  # (B, max_det)
        pairs = scores.gather(1, anchors[..., None].expand(-1, -1, classes)).flatten(1)
        values, order = pairs.topk(count, dim=1)
        owners = anchors.gather(1, order // classes)
        return _rows(boxes_xyxy, owners, values, order % classes)

    def _suppressed(self, boxes_xyxy: Tensor, scores: Tensor) -> Tensor:
        """The max_det best anchors that are left by NMS within classes, each with its best class alone.

        The rule of `non_max_suppression` without `multi_label`.
        """
        facts, classes = self.facts, scores.shape[2]
        label = scores.argmax(dim=2)  # (B, A)
        own = label[:, None, :] == torch.arange(classes, device=scores.device)[:, None]  # (B, C, A)
        kept = suppress(boxes_xyxy, scores.transpose(1, 2) * own, facts.conf, facts.iou, facts.max_det)
        best = _padded(kept.amax(dim=1), facts.max_det)
        values, anchors = best.topk(facts.max_det, dim=1)
        label = _padded(label, facts.max_det).gather(1, anchors)
        return _rows(_padded(boxes_xyxy, facts.max_det), anchors, values, label)


@torch.library.custom_op("detector::suppress", mutates_args=())
def suppress(boxes_xyxy: Tensor, scores: Tensor, conf: float, iou: float, max_det: int) -> Tensor:
    """(B, A, 4) boxes and (B, C, A) scores, of which an anchor has one: the scores, 0 where NMS leaves nothing.

    A function of fixed shapes, so that a graph can be of any batch; in ONNX it is NonMaxSuppression.
    """
    kept = torch.zeros_like(scores)
    found = non_max_suppression(boxes_xyxy, scores.transpose(1, 2), conf, iou, max_det, multi_label=False)
    for image, one in enumerate(found):
        for box, score, label in zip(one.boxes_xyxy, one.scores, one.classes, strict=True):
            hit = (boxes_xyxy[image] == box).all(dim=1) & (scores[image, label] == score)
            kept[image, label, hit.nonzero()[0]] = score
    return kept


@suppress.register_fake
def _(boxes_xyxy: Tensor, scores: Tensor, conf: float, iou: float, max_det: int) -> Tensor:
    return torch.empty_like(scores)


def _padded(values: Tensor, count: int) -> Tensor:
    """(B, A, ...) with `count` more anchors of zeros: a small image has fewer anchors than detections are asked for."""
    return F.pad(values, (0, 0) * (values.dim() - 2) + (0, count))


def _rows(boxes_xyxy: Tensor, anchors: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """(B, K, 6) x1, y1, x2, y2, score, class; zeros where the score is 0."""
    boxes = boxes_xyxy.gather(1, anchors[..., None].expand(-1, -1, 4))
    rows = torch.cat((boxes, scores[..., None], labels[..., None].to(boxes.dtype)), dim=2)
    return rows * (scores > 0)[..., None]
