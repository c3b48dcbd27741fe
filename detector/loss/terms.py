"""The three terms of the detection loss, each a sum over its elements."""

import torch
import torch.nn.functional as F
from torch import Tensor

from detector.boxes import ciou


def class_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy with logits against soft targets of the same shape, summed. Scalar."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


def box_sum(predicted_xyxy: Tensor, target_xyxy: Tensor, weight: Tensor) -> Tensor:
    """Sum of weight * (1 - CIoU) over P positives; boxes (P, 4) in one unit, weight (P,). Scalar."""
    return (weight * (1 - ciou(predicted_xyxy, target_xyxy))).sum()


def expected_ltrb(distribution: Tensor) -> Tensor:
    """Expectation of the side distances: (..., 4, R) logits over bins 0..R-1 to (..., 4) in grid units."""
    bins = torch.arange(distribution.shape[-1], device=distribution.device, dtype=distribution.dtype)
    return distribution.softmax(dim=-1) @ bins


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
