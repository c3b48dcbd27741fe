"""Box formats, anchor points and IoU, against loops and torchvision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import complete_box_iou_loss

from detector.boxes import anchor_points, ciou, ltrb_to_xyxy, xyxy_to_ltrb

coordinates = st.floats(0, 1000, allow_nan=False)
sides = st.floats(0.5, 500, allow_nan=False)
box_lists = st.lists(st.tuples(coordinates, coordinates, sides, sides), min_size=1, max_size=8)


def corners(boxes: list[tuple[float, float, float, float]]) -> Tensor:
    """(N, 4) xyxy of boxes given as x1, y1, width, height, double precision."""
    return torch.tensor([(x, y, x + w, y + h) for x, y, w, h in boxes], dtype=torch.float64)


@given(box_lists, coordinates, coordinates)
def test_side_distances_round_trip_from_any_point(boxes, x, y):
    xyxy = corners(boxes)
    points = torch.tensor([(x, y)], dtype=torch.float64).expand(len(boxes), 2)
    torch.testing.assert_close(ltrb_to_xyxy(xyxy_to_ltrb(xyxy, points), points), xyxy)


def test_side_distances_of_a_known_box():
    xyxy = torch.tensor([[1.0, 2.0, 6.0, 9.0]])
    assert xyxy_to_ltrb(xyxy, torch.tensor([[3.0, 3.0]])).tolist() == [[2.0, 1.0, 3.0, 6.0]]


@settings(max_examples=200)
@given(box_lists, st.randoms(use_true_random=False))
def test_ciou_and_its_gradient_are_torchvisions(boxes, random):
    a = corners(boxes).requires_grad_()
    other = [(x + random.uniform(-w, w), y + random.uniform(-h, h), w * 1.5, h * 0.75) for x, y, w, h in boxes]
    b = corners(other)
    ours = 1 - ciou(a, b)
    theirs = complete_box_iou_loss(a, b)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    (ours_grad,) = torch.autograd.grad(ours.sum(), a)
    (theirs_grad,) = torch.autograd.grad(theirs.sum(), a)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-4, atol=1e-5)


def test_ciou_of_equal_boxes_is_one_and_of_distant_ones_negative():
    box = torch.tensor([[0.0, 0.0, 4.0, 2.0]], dtype=torch.float64)
    assert ciou(box, box).item() == pytest.approx(1, abs=1e-6)
    # IoU 0; centres 10 apart; hull 14 x 2, so its diagonal squared is 200; equal aspect: -100 / 200
    assert ciou(box, box + torch.tensor([10.0, 0, 10, 0])).item() == pytest.approx(-0.5, abs=1e-6)


def test_ciou_broadcasts_over_leading_dimensions():
    a, b = torch.rand(3, 1, 4, dtype=torch.float64).cumsum(-1), torch.rand(5, 4, dtype=torch.float64).cumsum(-1)
    table = ciou(a, b)
    assert table.shape == (3, 5)
    torch.testing.assert_close(table[2, 4], ciou(a[2, 0], b[4]))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([8, 16, 32])), min_size=1, max_size=3))
def test_anchor_points_are_cell_centres_level_by_level_and_row_by_row(levels):
    points, scales = anchor_points([(h, w) for h, w, _ in levels], [s for *_, s in levels], "cpu", torch.float32)
    expected, strides = [], []
    for height, width, stride in levels:
        for row in range(height):
            for column in range(width):
                expected.append([column + 0.5, row + 0.5])
                strides.append(float(stride))
    assert points.tolist() == expected
    assert scales.tolist() == strides
