"""Curves and confusion matrix against slow loops, and the evaluation of a network against its known answers."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_coco import empty, random_set
from torch import nn

from detector.evaluation.coco import build_ground_truth, evaluate
from detector.evaluation.curves import compute_confusion, compute_curves
from detector.evaluation.evaluate import evaluate_runtime, judge
from detector.inference.infer import NetworkRuntime
from detector.model.selection import Detections, non_max_suppression


def overlap(box, truth, crowd):
    width = max(0.0, min(box[2], truth[2]) - max(box[0], truth[0]))
    height = max(0.0, min(box[3], truth[3]) - max(box[1], truth[1]))
    area = (box[2] - box[0]) * (box[3] - box[1])
    return width * height / (area if crowd else area + (truth[2] - truth[0]) * (truth[3] - truth[1]) - width * height)


def slow_verdicts(ground_truth, detections, c, least):
    """(score, right?) of each detection of class c that counts, one detection after the other."""
    verdicts = []
    for image, found in enumerate(detections):
        truths = [t for t in zip(*(x.tolist() for x in ground_truth.of_image(image)), strict=True) if t[1] == c]
        free = [True] * len(truths)
        for box, score, guess in zip(found.boxes_xyxy.double().tolist(), *(x.tolist() for x in found[1:]), strict=True):
            if guess != c:
                continue
            best, best_iou = -1, least
            for i, (truth, _, crowd) in enumerate(truths):
                if not crowd and free[i] and overlap(box, truth, False) >= best_iou:
                    best, best_iou = i, overlap(box, truth, False)
            if best >= 0:
                free[best] = False
                verdicts.append((score, True))
            elif not any(crowd and overlap(box, truth, True) >= least for truth, _, crowd in truths):
                verdicts.append((score, False))
    return verdicts


@pytest.mark.parametrize("seed", range(3))
def test_curves_equal_slow_counting(seed):
    ground_truth, detections, names = random_set(seed)
    curves = compute_curves(ground_truth, detections, len(names), points=41)
    for c in range(len(names)):
        to_find = int(((ground_truth.classes == c) & ~ground_truth.crowd).sum())
        if not to_find:
            assert np.isnan(curves.f1[c]).all()
            assert np.isnan(curves.pr_precision[c]).all()
            continue
        verdicts = slow_verdicts(ground_truth, detections, c, 0.5)
        for k, confidence in enumerate(curves.confidence):
            right = sum(ok for score, ok in verdicts if score >= confidence)
            wrong = sum(not ok for score, ok in verdicts if score >= confidence)
            precision, recall = right / max(right + wrong, 1), right / to_find
            assert curves.precision[c, k] == pytest.approx(precision)
            assert curves.recall[c, k] == pytest.approx(recall)
            harmonic = 2 * precision * recall / (precision + recall) if right else 0
            assert curves.f1[c, k] == pytest.approx(harmonic)


@pytest.mark.parametrize("seed", range(3))
def test_area_under_precision_recall_is_the_ap50_of_the_coco_tools(seed):
    ground_truth, detections, names = random_set(seed)
    metrics = evaluate(ground_truth, detections, names)
    curves = compute_curves(ground_truth, detections, len(names))
    assert curves.pr_precision.mean(axis=1) == pytest.approx(metrics.class_map50, abs=1e-9, nan_ok=True)
    assert curves.mean_pr_precision.mean() == pytest.approx(metrics.map50, abs=1e-9)


def test_best_confidence_maximises_the_mean_f1():
    ground_truth, detections, names = random_set(5)
    curves = compute_curves(ground_truth, detections, len(names))
    defined = ~np.isnan(curves.f1[:, 0])
    mean = curves.f1[defined].mean(axis=0)
    assert mean[curves.best] == mean.max()
    assert (mean[: curves.best] < mean.max()).all()
    precision, recall, f1 = curves.at_best()
    assert f1 == pytest.approx(mean.max())
    assert precision == pytest.approx(curves.precision[defined, curves.best].mean())
    assert recall == pytest.approx(curves.recall[defined, curves.best].mean())


def slow_confusion(ground_truth, detections, nc, confidence, least):
    counts = np.zeros((nc + 1, nc + 1), dtype=np.int64)
    for image, found in enumerate(detections):
        truths = list(zip(*(x.tolist() for x in ground_truth.of_image(image)), strict=True))
        seen = [d for d in zip(*(x.tolist() for x in found), strict=True) if d[1] >= confidence]
        pairs = []
        for i, (box, _, _) in enumerate(seen):
            for j, (truth, _, crowd) in enumerate(truths):
                if not crowd and overlap(box, truth, False) >= least:
                    pairs.append((-overlap(box, truth, False), i, j))
        taken_i, taken_j = {}, set()
        for _, i, j in sorted(pairs):
            if i not in taken_i and j not in taken_j:
                taken_i[i] = j
                taken_j.add(j)
        for i, (box, _, guess) in enumerate(seen):
            if i in taken_i:
                counts[truths[taken_i[i]][1], guess] += 1
            elif not any(crowd and overlap(box, truth, True) >= least for truth, _, crowd in truths):
                counts[nc, guess] += 1
        for j, (_, c, crowd) in enumerate(truths):
            if not crowd and j not in taken_j:
                counts[c, nc] += 1
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_confusion_equals_slow_greedy_matching(seed):
    ground_truth, detections, names = random_set(seed)
    confusion = compute_confusion(ground_truth, detections, len(names))
    assert np.array_equal(confusion.counts, slow_confusion(ground_truth, detections, len(names), 0.25, 0.45))
    assert confusion.counts[: len(names)].sum() == (~ground_truth.crowd).sum()


def test_confusion_by_hand():
    ground_truth = build_ground_truth([100], [100], [[[0, 0, 10, 10], [50, 50, 60, 60], [80, 80, 90, 90]]], [[0, 1, 1]])
    found = Detections(
        torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 30, 30], [80, 80, 90, 90]]),
        torch.tensor([0.9, 0.8, 0.7, 0.2]),  # the last is below the confidence
        torch.tensor([0, 0, 1, 1]),
    )
    confusion = compute_confusion(ground_truth, [found], 2)
    assert confusion.counts.tolist() == [[1, 0, 0], [1, 0, 1], [0, 1, 0]]
    assert confusion.by_truth.tolist() == [[1, 0, 0], [0.5, 0, 0.5], [0, 1, 0]]


def test_no_detections_and_no_truth_are_no_errors():
    ground_truth = build_ground_truth([100], [100], [[[0, 0, 50, 50]]], [[1]])
    row = judge(ground_truth, [empty()], ("a", "b")).row()
    assert set(row.values()) == {0.0}
    nothing = judge(build_ground_truth([100], [100], [[]], [[]]), [empty()], ("a", "b"))
    assert all(math.isnan(value) for value in nothing.row().values())
    assert nothing.confusion.counts.sum() == 0


class Answers(nn.Module):
    """Stands for a network: the grey value of an image says which answer to give."""

    head = SimpleNamespace(decode=lambda predictions: predictions, select=non_max_suppression)

    def __init__(self, boxes, scores):
        super().__init__()
        self.boxes, self.scores = boxes, scores
        self.weight = nn.Parameter(torch.ones(1))
        self.batches = []

    def forward(self, images):
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.is_inference_mode_enabled()
        self.batches.append(len(images))
        which = (images[:, 0, 0, 0] * 255).round().long()
        return self.boxes[which], self.scores[which]


def evaluated(monkeypatch, batch, autocast=nullcontext):
    """Five images of 32 x 64 px shown at half size; every network output is the truth of its image at 0.9."""
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 30, (5, 3, 2)) * (2, 1)
    truth = np.concatenate((corner, corner + 2 + rng.uniform(0, 4, (5, 3, 2))), axis=2)
    classes = np.arange(15).reshape(5, 3) % 2
    ground_truth = build_ground_truth([32] * 5, [64] * 5, truth.clip(0, (64, 32, 64, 32)), classes)
    letterbox = SimpleNamespace(height=32, width=64, ratio_x=0.5, ratio_y=0.5, left=0, top=8)
    net = torch.from_numpy(truth * 0.5 + (0, 8, 0, 8)).float()
    scores = torch.zeros(5, 3, 2).scatter_(2, torch.from_numpy(classes)[..., None], 0.9)
    network = Answers(net, scores).train()
    monkeypatch.setattr("detector.inference.infer.fused", lambda network: network)
    order = [3, 0, 4, 1, 2]
    batches = [
        (
            torch.stack([torch.full((32, 32, 3), i, dtype=torch.uint8) for i in order[at : at + batch]]),
            [letterbox] * len(order[at : at + batch]),
            order[at : at + batch],
        )
        for at in range(0, 5, batch)
    ]
    told = []
    runtime = NetworkRuntime(network, "cpu", autocast)
    evaluation = evaluate_runtime(runtime, batches, ground_truth, ("a", "b"), on_batch=told.append)
    assert told == network.batches == [len(indices) for _, _, indices in batches]
    return evaluation, ground_truth


def test_network_that_says_the_truth_is_perfect_in_any_order(monkeypatch):
    evaluation, ground_truth = evaluated(monkeypatch, batch=2)
    assert evaluation.row()["mAP50"] == pytest.approx(1)
    assert evaluation.row().keys() == {"mAP50-95", "mAP50", "mAP75", "precision", "recall", "F1"}
    for i, found in enumerate(evaluation.detections):
        left, expected = found.boxes_xyxy[:, 0].sort().values.numpy(), np.sort(ground_truth.of_image(i)[0][:, 0])
        assert left == pytest.approx(expected, abs=1e-4)
    assert evaluation.class_instances.tolist() == [8, 7]
    assert evaluation.class_images.tolist() == [5, 5]
    assert evaluation.seconds.keys() == {"load", "detect", "metrics"}


def test_evaluation_does_not_depend_on_the_batch_size(monkeypatch):
    (one, _), (many, _) = evaluated(monkeypatch, batch=1), evaluated(monkeypatch, batch=4)
    assert one.row() == many.row()
    for a, b in zip(one.detections, many.detections, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_network_itself_is_left_as_it_was():
    from detector.model.network import build_network

    network = build_network("v11n", nc=2).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    strides = {key: value.stride() for key, value in network.state_dict().items()}
    letterbox = SimpleNamespace(height=64, width=64, ratio_x=1.0, ratio_y=1.0, left=0, top=0)
    batches = [(torch.full((1, 64, 64, 3), 90, dtype=torch.uint8), [letterbox], [0])]
    truth = build_ground_truth([64], [64], [[[5, 5, 40, 40]]], [[1]])
    runtime = NetworkRuntime(network, "cpu", lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    evaluation = evaluate_runtime(runtime, batches, truth, ("a", "b"))
    assert len(evaluation.detections) == 1
    assert network.training
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])
        assert value.stride() == strides[key]
    assert not any(parameter.is_inference() for parameter in network.parameters())
