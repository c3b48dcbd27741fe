"""The criterion against slow loops written from its specification; the terms against formulas and hand numbers."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import slow_loss
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import near_truth
from slow_loss import Raw, Truth
from torchvision.ops import complete_box_iou_loss

from detector.loss.criterion import DetectionLoss
from detector.loss.terms import box_sum, class_sum, dfl_sum, l1_sum, ltrb_of

STRIDES, BINS = (8, 16, 32), 16
SLOW_RULES = (10, None), (7, 1)  # of one-to-many and one-to-one
KINDS = ["dense", "tiny", "mixed", "empty"]


def head(reg_max=BINS, strides=STRIDES):
    return SimpleNamespace(terms=("box", "cls", "dfl" if reg_max > 1 else "l1"), reg_max=reg_max, strides=strides)


def two_headed(kind, strides=STRIDES, reg_max=1):
    """The output of a network with two heads, which agree on nothing, and its truth."""
    raw, truth = near_truth(kind, strides, seed=1, reg_max=reg_max)
    second, _ = near_truth(kind, strides, seed=1, noise=0.4, reg_max=reg_max)
    return raw._replace(one2one=second._replace(logits=raw.logits.flip(1))), truth


def leaves(raw):
    """The tensors of an output, branch by branch, now with gradients."""
    outputs = [raw] if raw.one2one is None else [raw, raw.one2one]
    return [tensor.requires_grad_() for one in outputs for tensor in (one.boxes, one.logits)]


@pytest.mark.parametrize("reg_max", [1, BINS])
@pytest.mark.parametrize("strides", [STRIDES, (4, 8, 16, 32), (16,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_terms_weights_and_gradients_of_both_branches_equal_slow_loops(kind, strides, reg_max):
    raw, truth = two_headed(kind, strides, reg_max)
    inputs = leaves(raw)
    losses = DetectionLoss(head(reg_max, strides))(raw, truth)
    assert len(losses) == 2
    for loss, output, rule in zip(losses, (raw, raw.one2one), SLOW_RULES, strict=True):
        terms, weight, assigned = slow_loss.branch(output, truth, strides, reg_max, *rule)
        assert loss.weight.item() == pytest.approx(weight, rel=1e-12, abs=1e-14)
        assert bool(sum(map(len, assigned))) == (kind != "empty")
        for number, (name, term) in enumerate(terms.items()):
            assert loss.terms[number].item() == pytest.approx(term.item(), rel=1e-12, abs=1e-13), name
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            ours, theirs = (torch.autograd.grad(one, inputs, **options) for one in (loss.terms[number], term))
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_network_with_one_head_has_one_branch():
    raw, truth = near_truth("mixed", STRIDES)
    assert len(DetectionLoss(head(1))(raw, truth)) == 1


def cut(raw, truth, start, stop):
    """The images from `start` to before `stop`."""
    mine = (truth.image_index >= start) & (truth.image_index < stop)
    second = raw.one2one and cut(raw.one2one, truth, start, stop)[0]
    part = Raw(raw.boxes[start:stop], raw.logits[start:stop], raw.shapes, second)
    return part, Truth(truth.boxes_xyxy[mine], truth.classes[mine], truth.image_index[mine] - start)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_sums_and_weights_of_any_cut_add_up_to_those_of_the_whole(data):
    raw, truth = two_headed(data.draw(st.sampled_from(KINDS)), reg_max=data.draw(st.sampled_from([1, BINS])))
    images = len(raw.logits)
    edges = sorted({0, images, *data.draw(st.lists(st.integers(0, images)))})
    criterion = DetectionLoss(head(raw.boxes.shape[1] // 4))
    parts = [criterion(*cut(raw, truth, *ends)) for ends in pairwise(edges)]
    for whole, *pieces in zip(criterion(raw, truth), *parts, strict=True):
        assert whole.terms.tolist() == pytest.approx(sum(one.terms for one in pieces).tolist(), rel=1e-12)
        assert whole.weight.item() == pytest.approx(sum(one.weight.item() for one in pieces), rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("branch", [0, 1])
def test_a_box_that_is_not_finite_leaves_no_finite_weight(value, branch):
    """Such a prediction is given to no box, so that the terms would not tell, and a step would be taken."""
    raw, truth = two_headed("mixed")
    (raw, raw.one2one)[branch].boxes[1, 2, 5] = value
    losses = DetectionLoss(head(1))(raw, truth)
    assert [bool(one.weight.isfinite()) for one in losses] == [branch == 1, branch == 0]


def test_plain_distances_are_taken_as_they_are():
    raw = torch.tensor([[[-1.5], [0.0], [2.25], [40.0]]])
    assert ltrb_of(raw).tolist() == [[-1.5, 0.0, 2.25, 40.0]]


def test_l1_term_by_hand():
    """In an image of 128 x 64 pixels: a positive at stride 8 and one at stride 16."""
    ltrb = torch.tensor([[1.0, 2.0, 3.0, -1.0], [0.5, 0.0, 0.0, 0.0]])
    target = torch.tensor([[2.0, 2.0, 1.0, 1.0], [0.5, 1.0, 0.0, 0.0]])
    unit = torch.tensor([[8 / 128, 8 / 64, 8 / 128, 8 / 64], [16 / 128, 16 / 64, 16 / 128, 16 / 64]])
    weight = torch.tensor([0.5, 0.25])
    expected = 0.5 * (1 / 16 + 0 + 2 / 16 + 2 / 8) / 4 + 0.25 * (1 / 4) / 4
    assert l1_sum(ltrb, target, unit, weight).item() == pytest.approx(expected)


def test_expected_distance_is_the_mean_over_the_bins():
    logits = torch.full((1, 4, BINS), -1e9, dtype=torch.float64)
    logits[0, 0, 3] = 0.0
    logits[0, 1, 7] = logits[0, 1, 8] = 0.0
    logits[0, 2] = 0.0
    logits[0, 3, 15] = 0.0
    assert ltrb_of(logits)[0].tolist() == pytest.approx([3, 7.5, 7.5, 15])


def test_class_term_equals_its_formula():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.rand(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = torch.sigmoid(logits)
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum()
    assert class_sum(logits, targets).item() == pytest.approx(expected.item())


def test_box_term_by_hand():
    same = torch.tensor([[0.0, 0.0, 2.0, 2.0]], dtype=torch.float64)
    assert box_sum(same, same, torch.tensor([0.7])).item() == pytest.approx(0, abs=1e-6)
    # touching corners: IoU 0, centres 2 * sqrt(2) apart, enclosing diagonal 4 * sqrt(2), equal aspect
    shifted = same + 2
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


@pytest.mark.parametrize("reg_max", [1, BINS])
def test_without_boxes_only_the_class_term_is_left_and_the_graph_is_connected(reg_max):
    raw, truth = near_truth("empty", STRIDES, reg_max=reg_max)
    boxes, logits = leaves(raw)
    (branch,) = DetectionLoss(head(reg_max))(raw, truth)
    branch.terms.sum().backward()
    assert branch.weight.item() == 0
    assert branch.terms[0].item() == branch.terms[2].item() == 0
    assert branch.terms.sum().item() == pytest.approx(F.softplus(logits).sum().item())
    assert boxes.grad.abs().sum() == 0
    assert logits.grad.abs().sum() > 0


def test_the_head_says_which_terms_there_are_and_in_which_order():
    raw, truth = near_truth("mixed", STRIDES, reg_max=BINS)
    box, cls, dfl = DetectionLoss(head())(raw, truth)[0].terms.tolist()
    fewer = SimpleNamespace(terms=("cls", "box"), reg_max=BINS, strides=STRIDES)
    assert DetectionLoss(fewer)(raw, truth)[0].terms.tolist() == [cls, box]
    assert len({box, cls, dfl}) == 3


@pytest.mark.parametrize("reg_max", [1, BINS])
def test_half_precision_output_is_computed_in_fp32(reg_max):
    raw, truth = two_headed("mixed", reg_max=reg_max)
    half, full = (
        Raw(
            *(one.bfloat16().to(dtype) for one in raw[:2]),
            raw.shapes,
            Raw(*(one.bfloat16().to(dtype) for one in raw.one2one[:2]), raw.shapes),
        )
        for dtype in (torch.bfloat16, torch.float32)
    )
    criterion = DetectionLoss(head(reg_max))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = criterion(half, truth)
    for one, other in zip(ours, criterion(full, truth), strict=True):
        assert one.terms.dtype == one.weight.dtype == torch.float32
        assert one.terms.tolist() == other.terms.tolist()


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
