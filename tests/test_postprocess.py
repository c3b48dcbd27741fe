"""Non-maximum suppression against a slow greedy NMS written from the rule."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detector.inference.postprocess import to_original
from detector.model.selection import Detections, _greedy, non_max_suppression


def iou_of(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union > 0 else 0.0


def slow(boxes, scores, conf, iou, max_det, multi_label):
    """All candidates in one list, sorted by (-score, anchor, class), kept one by one."""
    conf = torch.tensor(conf, dtype=torch.float32).item()
    candidates = []
    for anchor, row in enumerate(scores.tolist()):
        classes = range(len(row)) if multi_label else [row.index(max(row))]
        candidates += [(-row[c], anchor, c) for c in classes if row[c] >= conf]
    kept: list[tuple[float, int, int]] = []
    corners = boxes.tolist()
    for score, anchor, c in sorted(candidates):
        if all(other_c != c or iou_of(corners[anchor], corners[other]) <= iou for _, other, other_c in kept):
            kept.append((score, anchor, c))
        if len(kept) == max_det:
            break
    return kept


def random_input(seed, images, anchors, classes, levels=None):
    """Boxes that overlap often; with `levels` scores take few values, so there are ties."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(images, anchors, 2, generator=generator) * 60 - 10
    size = torch.rand(images, anchors, 2, generator=generator) * 40 + 1
    scores = torch.rand(images, anchors, classes, generator=generator)
    if levels is not None:
        scores = (scores * levels).round() / levels
    return torch.cat((corner, corner + size), dim=2), scores


def assert_equal_to_slow(boxes, scores, conf, iou, max_det, multi_label):
    results = non_max_suppression(boxes, scores, conf, iou, max_det, multi_label)
    for b, found in enumerate(results):
        expected = slow(boxes[b], scores[b], conf, iou, max_det, multi_label)
        assert found.classes.tolist() == [c for _, _, c in expected]
        assert torch.equal(found.scores, torch.tensor([-score for score, _, _ in expected]))
        assert torch.equal(found.boxes_xyxy, boxes[b][[anchor for _, anchor, _ in expected]].reshape(-1, 4))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    anchors=st.integers(1, 40),
    classes=st.integers(1, 4),
    levels=st.sampled_from([None, 3]),
    multi_label=st.booleans(),
    conf=st.sampled_from([0.001, 0.25, 0.9]),
    max_det=st.sampled_from([1, 5, 300]),
)
def test_equals_greedy_nms_one_by_one(seed, anchors, classes, levels, multi_label, conf, max_det):
    boxes, scores = random_input(seed, 2, anchors, classes, levels)
    assert_equal_to_slow(boxes, scores, conf, 0.5, max_det, multi_label)


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("max_det", [20, 300])
def test_growing_prefixes_keep_what_nms_of_all_candidates_keeps(monkeypatch, levels, max_det):
    boxes, scores = random_input(3, 1, 300, 2, levels)
    scores[:, :150] *= 0.99  # more distinct values
    monkeypatch.setattr("detector.model.selection.FIRST_PREFIX", 7)
    assert_equal_to_slow(boxes, scores, 0.001, 0.3, max_det, True)


def test_every_anchor_and_class_passing_is_exact():
    boxes, scores = random_input(5, 1, 1500, 3)
    assert_equal_to_slow(boxes, scores, 0.001, 0.7, 100, True)


def test_does_not_depend_on_the_batch():
    boxes, scores = random_input(1, 4, 60, 3, levels=5)
    boxes[3] *= 1000  # a neighbour with huge coordinates must not cost the others digits
    together = non_max_suppression(boxes, scores, 0.001, 0.7)
    for b, found in enumerate(together):
        alone = non_max_suppression(boxes[b : b + 1], scores[b : b + 1], 0.001, 0.7)[0]
        assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


def test_confidence_floor_is_inclusive_and_nothing_found_is_empty():
    boxes, scores = torch.tensor([[[0.0, 0, 9, 9], [20, 20, 30, 30]]]), torch.tensor([[[0.5], [0.4]]])
    assert non_max_suppression(boxes, scores, 0.5, 0.7)[0].scores.tolist() == [0.5]
    nothing = non_max_suppression(boxes, scores, 0.6, 0.7)[0]
    assert nothing.boxes_xyxy.shape == (0, 4)
    assert nothing.scores.shape == (0,)
    assert nothing.classes.dtype == torch.int64


def test_classes_do_not_suppress_each_other_without_loss_of_digits():
    box = torch.tensor([[[0.1, 0.2, 10.3, 10.4]] * 2])
    scores = torch.zeros(1, 2, 80)
    scores[0, 0, 79], scores[0, 1, 3] = 0.9, 0.8
    found = non_max_suppression(box, scores, 0.1, 0.5)[0]
    assert found.classes.tolist() == [79, 3]
    assert torch.equal(found.boxes_xyxy, box[0])


@pytest.mark.parametrize("far", [1.0, 1e4, 1e13, 1e30])
def test_a_box_as_far_away_as_it_likes_costs_the_others_no_digit(far):
    """Pairs of boxes of class 999 whose IoU is a hair above the threshold and a hair below it."""
    anchors, near = [[-far, -far, far, far]], []
    for number in range(40):
        x, y = 17.3 * number + 0.1, 3.7 * number + 0.3
        side = 5.0 + number % 7
        for more in (1.0, 2.0 - 3e-5 if number % 2 else 2.0 + 3e-5):
            near.append([x, y, x + side * more, y + side])
    boxes = torch.tensor([anchors + near])
    scores = torch.zeros(1, boxes.shape[1], 1000)
    scores[0, 0, 0] = 0.99
    scores[0, 1:, 999] = torch.linspace(0.9, 0.2, len(near))
    assert_equal_to_slow(boxes, scores, 0.1, 0.5, 300, False)
    assert len(non_max_suppression(boxes, scores, 0.1, 0.5)[0].scores) == 1 + 40 + 20


def test_boxes_beyond_the_edge_do_not_meet_those_of_another_class():
    """An offset of the classes by the largest coordinate alone would lay the first box of class 1 over that of 0."""
    box = torch.tensor([[[0.0, 0, 99, 99], [-100.0, -100, -1, -1]]])
    scores = torch.tensor([[[0.9, 0.0], [0.0, 0.8]]])
    assert non_max_suppression(box, scores, 0.1, 0.5)[0].classes.tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torchvision's own rule for fake tensors
def test_a_device_without_double_precision_sees_none():
    """Apple's mps, say: suppression runs on the host, by the same rule."""
    import torchvision  # noqa: F401 - its rule for fake tensors

    seen = set()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            seen.update((one.device.type, one.dtype) for one in tree_leaves(made) if isinstance(one, torch.Tensor))
            return made

    with Watched(), FakeTensorMode(shape_env=ShapeEnv()):
        boxes, classes = torch.empty(5, 4, device="mps"), torch.empty(5, dtype=torch.int64, device="mps")
        assert _greedy(boxes, classes, 0.5).device.type == "mps"
    assert ("cpu", torch.float64) in seen
    assert ("mps", torch.float64) not in seen


def test_values_that_are_not_finite_give_nothing():
    boxes = torch.tensor([[[0.0, 0, 9, 9], [0, 0, float("inf"), 9], [20, 20, 30, float("nan")], [40, 40, 50, 50]]])
    scores = torch.tensor([[[0.5], [0.9], [0.9], [float("nan")]]])
    for multi_label in (True, False):
        assert non_max_suppression(boxes, scores, 0.001, 0.7, multi_label=multi_label)[0].scores.tolist() == [0.5]


def test_to_original_undoes_the_letterbox_and_clips():
    letterbox = SimpleNamespace(height=50, width=100, ratio_x=2.0, ratio_y=2.5, left=3, top=7)
    original = torch.tensor([[10.0, 5, 40, 45], [0, 0, 100, 50]])
    net = original * torch.tensor([2, 2.5, 2, 2.5]) + torch.tensor([3.0, 7, 3, 7])
    outside = torch.tensor([[-5.0, -5, 999, 999]])
    found = Detections(torch.cat((net, outside)), torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 1, 2]))
    back = to_original(found, letterbox)
    assert torch.allclose(back.boxes_xyxy[:2], original, atol=1e-5)
    assert back.boxes_xyxy[2].tolist() == [0, 0, 100, 50]
    assert torch.equal(back.scores, found.scores)
    assert torch.equal(back.classes, found.classes)
