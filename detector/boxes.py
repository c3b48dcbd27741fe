"""Box formats, anchor points and the IoU family: pure tensors, any dtype, any device.

Legend: B images, A anchors, N boxes, C classes. A box format is part of a variable's name: `xyxy` are two corners,
`ltrb` the distances from an anchor point to the four sides.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def ltrb_to_xyxy(ltrb: Tensor, points: Tensor) -> Tensor:
    """(..., A, 4) distances to the sides and (A, 2) anchor points to (..., A, 4) corners, in the points' unit."""
    return torch.cat((points - ltrb[..., :2], points + ltrb[..., 2:]), dim=-1)


def xyxy_to_ltrb(xyxy: Tensor, points: Tensor) -> Tensor:
    """The inverse of `ltrb_to_xyxy`; negative where a point lies outside its box."""
    return torch.cat((points - xyxy[..., :2], xyxy[..., 2:] - points), dim=-1)


def anchor_points(
    shapes: Sequence[tuple[int, int]], strides: Sequence[int], device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cell centres of feature maps of the given (height, width), one level after the other, each row-major.

    Returns (A, 2) points x, y in grid units (column + 0.5, row + 0.5) and (A,) strides in pixels per grid unit.
    """
    points, scales = [], []
    for (height, width), stride in zip(shapes, strides, strict=True):
        x = torch.arange(width, device=device, dtype=dtype) + 0.5
        y = torch.arange(height, device=device, dtype=dtype) + 0.5
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        points.append(torch.stack((grid_x, grid_y), dim=-1).reshape(-1, 2))
        scales.append(torch.full((height * width,), stride, device=device, dtype=dtype))
    return torch.cat(points), torch.cat(scales)


def ciou(a_xyxy: Tensor, b_xyxy: Tensor, eps: float = 1e-7) -> Tensor:
    """Complete IoU of boxes paired along the leading dimensions: (..., 4) and (..., 4) to (...).

    CIoU = IoU - (rho^2 / c^2 + a v): rho the distance of the centres, c the diagonal of the smallest enclosing box,
    v = 4 / pi^2 (atan(w_b / h_b) - atan(w_a / h_a))^2 and a = v / (v - IoU + 1 + eps), which carries no gradient. As
    usual with YOLO, `eps` is also added to both heights, to the union and to c^2.
    Zheng et al., "Enhancing geometric factors in model learning and inference" (2020).
    torchvision's `complete_box_iou_loss` is 1 - this, but NaN in value and gradient for a box of no height.
    """
    a_width, a_height = a_xyxy[..., 2] - a_xyxy[..., 0], a_xyxy[..., 3] - a_xyxy[..., 1] + eps
    b_width, b_height = b_xyxy[..., 2] - b_xyxy[..., 0], b_xyxy[..., 3] - b_xyxy[..., 1] + eps
    overlap = (torch.minimum(a_xyxy[..., 2:], b_xyxy[..., 2:]) - torch.maximum(a_xyxy[..., :2], b_xyxy[..., :2])).clamp(
        min=0
    )
    intersection = overlap.prod(dim=-1)
    union = a_width * a_height + b_width * b_height - intersection + eps
    iou = intersection / union

    hull = torch.maximum(a_xyxy[..., 2:], b_xyxy[..., 2:]) - torch.minimum(a_xyxy[..., :2], b_xyxy[..., :2])
    diagonal2 = hull.square().sum(dim=-1) + eps
    offset = a_xyxy[..., :2] + a_xyxy[..., 2:] - b_xyxy[..., :2] - b_xyxy[..., 2:]
    distance2 = offset.square().sum(dim=-1) / 4

    v = (4 / math.pi**2) * (torch.atan(b_width / b_height) - torch.atan(a_width / a_height)).square()
    with torch.no_grad():
        weight = v / (v - iou + 1 + eps)
    return iou - (distance2 / diagonal2 + weight * v)
