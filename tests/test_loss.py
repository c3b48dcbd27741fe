"""The assigner and the loss against slow loops over dense tables, hand numbers and the joined batch."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import complete_box_iou_loss

from detector.boxes import anchor_points
from detector.loss.assign import assign, best_of_each_box, cells_inside
from detector.loss.criterion import DetectionLoss
from detector.loss.terms import box_sum, class_sum, dfl_sum, expected_ltrb

STRIDES = (8, 16, 32)
SHAPES = ((12, 8), (6, 4), (3, 2))
ANCHORS = sum(height * width for height, width in SHAPES)
CLASSES, BINS = 3, 16
HEAD = SimpleNamespace(terms=("box", "cls", "dfl"), reg_max=BINS, strides=STRIDES)


class Raw(NamedTuple):
    boxes: torch.Tensor
    logits: torch.Tensor
    shapes: tuple


class Truth(NamedTuple):
    boxes_xyxy: torch.Tensor
    classes: torch.Tensor
    image_index: torch.Tensor


def scene(seed, images=3, most=12, dtype=torch.float64, smallest=2.0):
    """Random network output and ground truth for images of 64 x 96 pixels."""
    generator = torch.Generator().manual_seed(seed)
    raw = Raw(
        torch.randn(images, 4 * BINS, ANCHORS, generator=generator, dtype=dtype),
        torch.randn(images, CLASSES, ANCHORS, generator=generator, dtype=dtype),
        SHAPES,
    )
    counts = torch.randint(0, most + 1, (images,), generator=generator)
    boxes = int(counts.sum())
    size = torch.rand(boxes, 2, generator=generator, dtype=dtype) * 50 + smallest
    low = torch.rand(boxes, 2, generator=generator, dtype=dtype) * (torch.tensor([64.0, 96.0]) - size).clamp(min=0)
    return raw, Truth(
        torch.cat((low, low + size), dim=1),
        torch.randint(0, CLASSES, (boxes,), generator=generator),
        torch.repeat_interleave(torch.arange(images), counts),
    )


def dense_assign(logits, boxes_xyxy, gt_xyxy, gt_classes, gt_image, topk=10):
    """The rule as written, one box and one anchor at a time: {(image, anchor): (box, score)}."""
    points, strides = anchor_points(SHAPES, STRIDES, "cpu", logits.dtype)
    pixels = points * strides[:, None]
    taken: dict[tuple[int, int], list[tuple[float, int, float]]] = {}
    for box in range(len(gt_xyxy)):
        x1, y1, x2, y2 = gt_xyxy[box].tolist()
        if x2 - x1 < 16:
            x1, x2 = (x1 + x2) / 2 - 8, (x1 + x2) / 2 + 8
        if y2 - y1 < 16:
            y1, y2 = (y1 + y2) / 2 - 8, (y1 + y2) / 2 + 8
        image = int(gt_image[box])
        found = []
        for anchor, (x, y) in enumerate(pixels.tolist()):
            if x1 < x < x2 and y1 < y < y2:
                loss = complete_box_iou_loss(boxes_xyxy[image, anchor][None], gt_xyxy[box][None], eps=1e-7)
                overlap = max(1 - loss.item(), 0.0)
                score = torch.sigmoid(logits[image, gt_classes[box], anchor]).item()
                found.append((score**0.5 * overlap**6, anchor, overlap))
        for align, anchor, overlap in sorted(found, key=lambda item: -item[0])[:topk]:
            taken.setdefault((image, anchor), []).append((overlap, box, align))
    winners = {place: max(claims, key=lambda claim: claim[0]) for place, claims in taken.items()}
    result = {}
    for place, (_, box, align) in winners.items():
        mine = [claim for claim in winners.values() if claim[1] == box]
        best_overlap, best_align = max(claim[0] for claim in mine), max(claim[2] for claim in mine)
        result[place] = (box, align * best_overlap / (best_align + 1e-9))
    return result


@pytest.mark.parametrize("seed", range(6))
def test_assignment_equals_the_slow_dense_table(seed):
    raw, truth = scene(seed)
    points, strides = anchor_points(SHAPES, STRIDES, "cpu", torch.float64)
    ltrb = torch.rand(3, ANCHORS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 4
    decoded = torch.cat((points - ltrb[..., :2], points + ltrb[..., 2:]), dim=-1) * strides[:, None]
    given = assign(raw.logits, decoded, SHAPES, STRIDES, *truth)
    ours = {
        (int(image), int(anchor)): (int(box), float(score)) for image, anchor, box, score in zip(*given, strict=True)
    }
    slow = {place: value for place, value in dense_assign(raw.logits, decoded, *truth).items()}
    positive = {place for place, (_, score) in slow.items() if score > 1e-12}
    assert {place for place, (_, score) in ours.items() if score > 1e-12} == positive
    assert len(positive) > 5
    for place in positive:
        assert ours[place][0] == slow[place][0]
        assert ours[place][1] == pytest.approx(slow[place][1], abs=1e-9)


def test_cells_inside_are_those_with_their_centre_strictly_inside():
    _, truth = scene(3, images=1, most=40)
    edges = torch.tensor(
        [[4.0, 4.0, 44.0, 44.0], [-30.0, -9.0, 200.0, 3.0], [60.0, 90.0, 64.0, 96.0], [20.0, 20.0, 21.0, 60.0]]
    )
    boxes = torch.cat((truth.boxes_xyxy, edges.double()))
    points, strides = anchor_points(SHAPES, STRIDES, "cpu", torch.float64)
    pixels = points * strides[:, None]
    small = (boxes[:, 2:] - boxes[:, :2]) < 16
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    low = torch.where(small, centre - 8, boxes[:, :2])
    high = torch.where(small, centre + 8, boxes[:, 2:])
    dense = ((pixels[None] > low[:, None]) & (pixels[None] < high[:, None])).all(dim=-1)
    box, anchor = cells_inside(boxes, SHAPES, STRIDES)
    assert sorted(zip(box.tolist(), anchor.tolist(), strict=True)) == [tuple(pair) for pair in dense.nonzero().tolist()]


def test_best_of_each_box_equals_topk_per_box():
    generator = torch.Generator().manual_seed(0)
    box = torch.randint(0, 9, (200,), generator=generator)
    value = torch.rand(200, generator=generator)
    chosen = best_of_each_box(box, value, boxes=9, topk=5)
    for one in range(9):
        members = (box == one).nonzero().squeeze(1)
        expected = members[value[members].argsort(descending=True)[:5]]
        assert chosen[box[chosen] == one].tolist() == expected.tolist()


def test_a_box_smaller_than_a_cell_still_finds_anchors():
    truth = torch.tensor([[30.1, 30.1, 31.1, 31.2]])
    box, anchor = cells_inside(truth, SHAPES, STRIDES)
    assert len(box) >= 4
    assert len(set(anchor.tolist())) == len(anchor)


def test_assignment_of_an_image_does_not_depend_on_the_batch():
    raw, truth = scene(11)
    criterion = DetectionLoss(HEAD)
    whole = criterion(raw, truth)[0]
    alone = []
    for image in range(3):
        mine = truth.image_index == image
        one = Raw(raw.boxes[image : image + 1], raw.logits[image : image + 1], SHAPES)
        alone.append(criterion(one, Truth(truth.boxes_xyxy[mine], truth.classes[mine], truth.image_index[mine] * 0))[0])
    assert whole.terms.tolist() == pytest.approx(sum(part.terms for part in alone).tolist(), rel=1e-12)
    assert whole.weight.item() == pytest.approx(sum(part.weight.item() for part in alone), rel=1e-12)


def test_expected_distance_is_the_mean_over_the_bins():
    logits = torch.full((1, 4, BINS), -1e9, dtype=torch.float64)
    logits[0, 0, 3] = 0.0
    logits[0, 1, 7] = logits[0, 1, 8] = 0.0
    logits[0, 2] = 0.0
    logits[0, 3, 15] = 0.0
    assert expected_ltrb(logits)[0].tolist() == pytest.approx([3, 7.5, 7.5, 15])


def test_class_term_equals_its_formula():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.rand(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = torch.sigmoid(logits)
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum()
    assert class_sum(logits, targets).item() == pytest.approx(expected.item())


def test_box_term_by_hand():
    same = torch.tensor([[0.0, 0.0, 2.0, 2.0]], dtype=torch.float64)
    assert box_sum(same, same, torch.tensor([0.7])).item() == pytest.approx(0, abs=1e-6)
    shifted = (
        same + 2
    )  # touching corners: IoU 0, centres 2 * sqrt(2) apart, enclosing diagonal 4 * sqrt(2), equal aspect
    assert box_sum(shifted, same, torch.tensor([0.5])).item() == pytest.approx(0.5 * (1 + 8 / 32), abs=1e-6)


def test_dfl_term_is_the_cross_entropy_to_both_neighbours():
    distribution = torch.randn(2, 4, BINS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0.0, 3.25, 14.0, 99.0], [1.5, 2.0, -4.0, 7.75]], dtype=torch.float64)
    weight = torch.tensor([0.3, 0.9], dtype=torch.float64)
    expected = 0.0
    for positive in range(2):
        for side in range(4):
            t = min(max(target[positive, side].item(), 0.0), 14.99)
            left = math.floor(t)
            log_p = F.log_softmax(distribution[positive, side], dim=0)
            expected -= (
                weight[positive].item() / 4 * ((left + 1 - t) * log_p[left] + (t - left) * log_p[left + 1]).item()
            )
    assert dfl_sum(distribution, target, weight).item() == pytest.approx(expected)


def test_without_boxes_only_the_class_term_is_left_and_the_graph_is_connected():
    raw, _ = scene(0)
    boxes = raw.boxes.requires_grad_()
    logits = raw.logits.requires_grad_()
    nothing = Truth(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    branch = DetectionLoss(HEAD)(Raw(boxes, logits, SHAPES), nothing)[0]
    branch.terms.sum().backward()
    assert branch.weight.item() == 0
    assert branch.terms[0].item() == branch.terms[2].item() == 0
    assert branch.terms.sum().item() == pytest.approx(F.softplus(logits).sum().item())
    assert boxes.grad.abs().sum() == 0
    assert logits.grad.abs().sum() > 0


def test_the_head_says_which_terms_there_are_and_in_which_order():
    raw, truth = scene(4)
    box, cls, dfl = DetectionLoss(HEAD)(raw, truth)[0].terms.tolist()
    fewer = SimpleNamespace(terms=("cls", "box"), reg_max=BINS, strides=STRIDES)
    assert DetectionLoss(fewer)(raw, truth)[0].terms.tolist() == [cls, box]
    assert len({box, cls, dfl}) == 3


def test_half_precision_output_is_computed_in_fp32():
    raw, truth = scene(5, dtype=torch.float32)
    half = Raw(raw.boxes.bfloat16(), raw.logits.bfloat16(), SHAPES)
    full = Raw(half.boxes.float(), half.logits.float(), SHAPES)
    criterion = DetectionLoss(HEAD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = criterion(half, truth)[0]
    assert ours.terms.dtype == torch.float32
    assert ours.terms.tolist() == criterion(full, truth)[0].terms.tolist()


def test_gradients_of_the_terms_are_right():
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(3, dtype=torch.float64, generator=generator)
    distribution = torch.randn(3, 4, BINS, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.rand(3, 4, dtype=torch.float64, generator=generator) * 14
    assert torch.autograd.gradcheck(lambda x: dfl_sum(x, target, weight), (distribution,))
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    goal = torch.rand(2, 3, 4, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: class_sum(x, goal), (logits,))

    low = torch.rand(8, 2, dtype=torch.float64, generator=generator) * 10
    predicted = torch.cat((low, low + 1 + torch.rand(8, 2, dtype=torch.float64, generator=generator) * 9), dim=1)
    truth = predicted + torch.randn(8, 4, dtype=torch.float64, generator=generator) * 0.3
    ours, theirs = predicted.clone().requires_grad_(), predicted.clone().requires_grad_()
    box_sum(ours, truth, torch.ones(8)).backward()
    complete_box_iou_loss(theirs, truth, reduction="sum").backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
