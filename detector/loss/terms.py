"""The terms of the detection loss, each a sum over its elements."""

import torch
import torch.nn.functional as F
from torch import Tensor

from detector.boxes import ciou


def class_sum(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy with logits against soft targets of the same shape (B, C, A), summed. Scalar.

    class_weights (C,): factors on all that is of a class, its background too; None: all are 1.
    """
    weight = None if class_weights is None else class_weights[:, None]
    return F.binary_cross_entropy_with_logits(logits, targets, weight, reduction="sum")


def box_sum(predicted_xyxy: Tensor, target_xyxy: Tensor, weight: Tensor) -> Tensor:
    """Sum of weight * (1 - CIoU) over P positives; boxes (P, 4) in one unit, weight (P,). Scalar."""
    return (weight * (1 - ciou(predicted_xyxy, target_xyxy))).sum()


def ltrb_of(raw: Tensor) -> Tensor:
    """(..., 4, R) raw output to (..., 4) distances to the sides, in grid units.

    R > 1: the expectation over bins 0..R-1 with these logits; R = 1: the distances themselves, which may be negative.
    """
    if raw.shape[-1] == 1:
        return raw.squeeze(-1)
    bins = torch.arange(raw.shape[-1], device=raw.device, dtype=raw.dtype)
    return raw.softmax(dim=-1) @ bins


def dfl_sum(distribution: Tensor, target_ltrb: Tensor, weight: Tensor) -> Tensor:
    """Distribution focal loss: cross-entropy to the two bins around each distance, by nearness. Scalar.

    distribution (P, 4, R) logits, target_ltrb (P, 4) in grid units, weight (P,). The four sides are averaged, the
    positives summed. Li et al., "Generalized focal loss" (2020).
    """
    bins = distribution.shape[-1]
    target = target_ltrb.clamp(0, bins - 1 - 0.01)
    left = target.floor()
    nearness = target - left  # 0: all on the left bin
    log_p = distribution.log_softmax(dim=-1)
    index = left.long().unsqueeze(-1)
    to_left = log_p.gather(-1, index).squeeze(-1)
    to_right = log_p.gather(-1, index + 1).squeeze(-1)
    per_side = -(to_left * (1 - nearness) + to_right * nearness)
    return (per_side.mean(dim=-1) * weight).sum()


def l1_sum(ltrb: Tensor, target_ltrb: Tensor, unit: Tensor, weight: Tensor) -> Tensor:
    """Distance to each side, as a fraction of the image, beside its target's: absolute difference. Scalar.

    ltrb and target_ltrb (P, 4) in grid units, unit (P, 4) fraction of the network input's width (left, right) or height
    (top, bottom) that a grid unit is, weight (P,). The four sides are averaged, the positives summed.
    """
    return (((ltrb - target_ltrb).abs() * unit).mean(dim=-1) * weight).sum()
