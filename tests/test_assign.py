"""The assigner against the rule written as slow loops, on scenes that meet every part of it."""

import pytest
import slow_loss
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import near_truth
from slow_loss import Raw, Truth

from detector.boxes import anchor_points, ltrb_to_xyxy
from detector.loss.assign import assign, best_of_each_box, cells_inside, least_side
from detector.loss.terms import ltrb_of

STRIDES = (8, 16, 32)
SHAPES = ((12, 8), (6, 4), (3, 2))
RULES = {"one-to-many": (10, None), "one-to-one": (7, 1)}


def fast(raw: Raw, truth: Truth, strides, reg_max, *rule):
    """What `assign` gives: a dictionary of each image, {anchor: (box of the image, soft target)}."""
    points, scales = anchor_points(raw.shapes, strides, "cpu", torch.float64)
    ltrb = ltrb_of(raw.boxes.transpose(1, 2).unflatten(-1, (4, reg_max)))
    decoded = ltrb_to_xyxy(ltrb, points) * scales[:, None]
    found = [{} for _ in raw.logits]
    given = assign(raw.logits, decoded, cells_inside(truth.boxes_xyxy, raw.shapes, strides), *truth, *rule)
    first = [int((truth.image_index < image).sum()) for image in range(len(found))]
    for image, anchor, box, score in zip(*given, strict=True):
        if not score:
            continue
        assert int(anchor) not in found[image]
        found[image][int(anchor)] = int(box) - first[image], float(score)
    return found


def slow(raw: Raw, truth: Truth, strides, reg_max, *rule):
    anchors, found = slow_loss.cells(raw.shapes, strides), []
    for image, logits in enumerate(raw.logits):
        mine = truth.image_index == image
        sides = raw.boxes[image].T.reshape(len(anchors), 4, reg_max)
        boxes, classes = truth.boxes_xyxy[mine], truth.classes[mine].tolist()
        found.append(slow_loss.assign_image(sides, logits.sigmoid(), boxes, classes, anchors, least(strides), *rule))
    return found


def least(strides):
    return strides[1] if len(strides) > 1 else strides[0]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for anchor, (box, score) in other.items():
            assert one[anchor][0] == box
            assert one[anchor][1] == pytest.approx(score, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("branch", RULES)
@pytest.mark.parametrize("strides", [STRIDES, (4, 8, 16, 32), (8, 16), (16,)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "tiny", "mixed", "empty"])
def test_assignment_equals_the_rule_in_slow_loops(kind, strides, branch):
    raw, truth = near_truth(kind, strides)
    ours, theirs = (how(raw, truth, strides, 1, *RULES[branch]) for how in (fast, slow))
    assert_same(ours, theirs)
    assert sum(map(len, ours)) > (-1 if kind == "empty" else 10)


@pytest.mark.parametrize("seed", range(3))
def test_assignment_of_predictions_that_know_nothing(seed):
    """Random distributions, as at the start of training: most anchors of small boxes are not aligned at all."""
    raw, truth = near_truth("mixed", STRIDES, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    raw = raw._replace(boxes=torch.randn(len(raw.boxes), 4 * 16, raw.boxes.shape[2], generator=rng).double())
    ours, theirs = (how(raw, truth, STRIDES, 16, *RULES["one-to-many"]) for how in (fast, slow))
    assert_same(ours, theirs)


def test_a_conflict_is_won_by_a_box_that_did_not_take_the_anchor():
    """Which is why a box can have more than topk. Among the takers alone the result is another."""
    raw, truth = near_truth("dense", STRIDES)
    ours, among_takers = (fast(raw, truth, STRIDES, 1, 10, None, flag) for flag in (False, True))
    assert_same(among_takers, slow(raw, truth, STRIDES, 1, 10, None, True))
    moved = sum(a[anchor][0] != b[anchor][0] for a, b in zip(ours, among_takers, strict=True) for anchor in b)
    assert moved > 5
    counts = [[box for box, _ in one.values()].count(box) for one in ours for box in range(40)]
    assert max(counts) > 10


def test_the_second_cut_leaves_a_box_one_anchor_or_none():
    raw, truth = near_truth("dense", STRIDES)
    for image, found in enumerate(fast(raw, truth, STRIDES, 1, 7, 1)):
        boxes = [box for box, _ in found.values()]
        assert len(boxes) == len(set(boxes))
        assert 0 < len(boxes) < int((truth.image_index == image).sum())


def tie(boxes, logits, predicted, *rule):
    """The assignment of one image of 32 x 32 at one level of stride 8, all of one class."""
    truth = torch.tensor(boxes, dtype=torch.float64), torch.zeros(len(boxes), dtype=torch.int64)
    image = torch.zeros(len(boxes), dtype=torch.int64)
    decoded = torch.tensor(predicted, dtype=torch.float64).expand(1, 16, 4)
    cells = cells_inside(truth[0], [(4, 4)], [8])
    given = assign(torch.tensor(logits).view(1, 1, 16).double(), decoded, cells, *truth, image, *rule)
    return sorted((int(anchor), int(box)) for _, anchor, box, score in zip(*given, strict=True) if score)


def test_of_equally_aligned_anchors_the_lower_are_taken():
    box = [0.0, 0.0, 32.0, 32.0]
    assert tie([box], [0.0] * 16, box, 3) == [(0, 0), (1, 0), (2, 0)]
    assert tie([box], [0.0] * 10 + [1.0] * 6, box, 3) == [(10, 0), (11, 0), (12, 0)]
    assert tie([box], [0.0] * 10 + [1.0] * 6, box, 3, 1) == [(10, 0)]


def test_of_boxes_that_overlap_an_anchor_equally_the_earlier_has_it():
    box = [0.0, 0.0, 32.0, 32.0]
    assert tie([box, box], [0.0] * 16, box, 2) == [(0, 0), (1, 0)]


def test_an_anchor_that_is_not_aligned_is_not_taken():
    """Two boxes are inside of one another; the predictions touch only one of them."""
    inner, outer = [0.0, 0.0, 16.0, 16.0], [0.0, 0.0, 32.0, 32.0]
    assert tie([inner, outer], [0.0] * 16, [40.0, 40.0, 50.0, 50.0], 10) == []
    assert tie([inner, outer], [0.0] * 16, [16.0, 16.0, 32.0, 32.0], 16) == [(anchor, 1) for anchor in range(16)]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_image_is_assigned_alone(data):
    """Other images of the batch, before or after it, change nothing."""
    raw, truth = near_truth("mixed", STRIDES, seed=data.draw(st.integers(0, 4)))
    rule = data.draw(st.sampled_from(list(RULES.values())))
    image = data.draw(st.integers(0, len(raw.logits) - 1))
    mine = truth.image_index == image
    alone = Raw(raw.boxes[image][None], raw.logits[image][None], raw.shapes)
    own = Truth(truth.boxes_xyxy[mine], truth.classes[mine], truth.image_index[mine] * 0)
    assert_same(fast(alone, own, STRIDES, 1, *rule), [fast(raw, truth, STRIDES, 1, *rule)[image]])


def test_cells_inside_are_those_with_their_centre_inside():
    _, truth = near_truth("mixed", STRIDES)
    edges = [
        [4.0, 4.0, 44.0, 44.0],
        [4.0 - 5e-10, 4.0 - 2e-9, 44.0 + 2e-9, 44.0 + 5e-10],
        [-30.0, -9.0, 200.0, 3.0],
        [60.0, 90.0, 64.0, 96.0],
        [20.0, 20.0, 21.0, 60.0],
        [12.0, 12.0, 12.0, 12.0],
        [200.0, 200.0, 300.0, 300.0],
    ]
    boxes = torch.cat((truth.boxes_xyxy, torch.tensor(edges, dtype=torch.float64)))
    for strides, shapes in ((STRIDES, SHAPES), ((4, *STRIDES), ((24, 16), *SHAPES)), ((32,), ((3, 2),))):
        box, anchor = cells_inside(boxes, shapes, strides)
        anchors = slow_loss.cells(shapes, strides)
        expected = [
            (number, index)
            for number, one in enumerate(boxes.tolist())
            for index, cell in enumerate(anchors)
            if slow_loss.is_inside(one, cell, least(strides))
        ]
        assert sorted(zip(box.tolist(), anchor.tolist(), strict=True)) == expected


def test_the_least_side_is_the_second_stride():
    assert [least_side(strides) for strides in (STRIDES, (4, 8, 16, 32), (16,), (32, 64))] == [16, 8, 16, 64]


def test_best_of_each_box_equals_topk_per_box():
    generator = torch.Generator().manual_seed(0)
    box = torch.randint(0, 9, (200,), generator=generator)
    value = torch.rand(200, generator=generator)
    chosen = best_of_each_box(box, value, boxes=9, topk=5)
    for one in range(9):
        members = (box == one).nonzero().squeeze(1)
        expected = members[value[members].argsort(descending=True)[:5]]
        assert (chosen & (box == one)).nonzero().squeeze(1).tolist() == expected.sort().values.tolist()


def test_a_box_smaller_than_a_cell_still_finds_anchors():
    truth = torch.tensor([[30.1, 30.1, 31.1, 31.2]])
    box, anchor = cells_inside(truth, SHAPES, STRIDES)
    assert len(box) >= 4
    assert len(set(anchor.tolist())) == len(anchor)
