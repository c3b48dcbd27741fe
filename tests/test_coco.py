"""The COCO protocol against published values and against pycocotools."""

import contextlib
import copy
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detector.evaluation.coco import build_ground_truth, evaluate, evaluate_json
from detector.model.selection import Detections

DATA = Path(__file__).parent / "data" / "coco_eval"
FIELDS = {
    "AP": "map50_95", "AP50": "map50", "AP75": "map75", "AP_small": "small", "AP_medium": "medium", "AP_large": "large",
    "AR_1": "ar1", "AR_10": "ar10", "AR_100": "ar100", "AR_small": "ar_small", "AR_medium": "ar_medium",
    "AR_large": "ar_large",
}  # fmt: skip


def load(folder: str, minimum: float = 0.0):
    truth, found, expected = (
        json.loads((DATA / folder / f"{part}.json").read_text()) for part in ("gt", "dt", "expected")
    )
    return truth, [row for row in found if row["score"] >= minimum], expected


def assert_equal_to(metrics, published: dict[str, float], tolerance: float) -> None:
    for key, value in published.items():
        ours = getattr(metrics, FIELDS[key])
        assert math.isnan(ours) if value == -1 else ours == pytest.approx(value, abs=tolerance), key


@pytest.mark.parametrize(
    ("folder", "minimum", "place"),
    [
        ("val2014_100", 0, ("bbox", "published")),
        ("val2014_100", 0, ("bbox", "pycocotools_2.0.11")),
        ("val2014_100_bboxarea", 0, ("bbox", "published")),
        ("val2014_100_bboxarea", 0, ("bbox", "pycocotools_2.0.11")),
        ("voc100_dets", 0, ("bbox", "pycocotools_2.0.11")),
        ("small_toy", 0, ("bbox", "pycocotools_2.0.11")),
        ("ignore_toy", 0.1, ("published",)),
        ("ignore_toy", 0.1, ("bbox", "pycocotools_2.0.11_min_score_0.1")),
    ],
)
def test_equals_the_published_values(folder, minimum, place):
    truth, found, expected = load(folder, minimum)
    for key in place:
        expected = expected[key]
    assert_equal_to(evaluate_json(truth, found), expected, 1e-12 if "pycocotools" in place[-1] else 1e-6)


def test_equals_the_published_ap_of_each_class():
    truth, found, expected = load("val2014_100")
    metrics = evaluate_json(truth, found)
    published = expected["bbox"]["per_category_AP_pycocotools"]
    for i, category in enumerate(sorted(entry["id"] for entry in truth["categories"])):
        value = published.get(str(category))
        if value is not None and value >= 0:
            assert metrics.class_map50_95[i] == pytest.approx(value, abs=1e-12)
        else:
            assert math.isnan(metrics.class_map50_95[i])
    truth, found, expected = load("voc100_dets")
    metrics = evaluate_json(truth, found)
    for i, category in enumerate(sorted(truth["categories"], key=lambda entry: entry["id"])):
        values = expected["bbox"]["per_class"].get(category["name"])
        if values is not None:
            assert metrics.class_map50_95[i] == pytest.approx(values["AP"], abs=1e-12)
            assert metrics.class_map50[i] == pytest.approx(values["AP50"], abs=1e-12)


def test_json_input_is_not_altered():
    truth, found, _ = load("small_toy")
    before = copy.deepcopy((truth, found))
    evaluate_json(truth, found)
    assert (truth, found) == before


def packed(truth, found):
    """A COCO set as our packed ground truth and detections, class = rank of the category id."""
    categories = {c: i for i, c in enumerate(sorted(entry["id"] for entry in truth["categories"]))}
    images = sorted(entry["id"] for entry in truth["images"])  # the order decides between equal scores

    def rows(entries, image):
        return [entry for entry in entries if entry["image_id"] == image]

    def corners(entries):
        xywh = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
        return np.concatenate((xywh[:, :2], xywh[:, :2] + xywh[:, 2:]), axis=1)

    ground_truth = build_ground_truth(
        [0] * len(images),  # sizes play no part in the protocol
        [0] * len(images),
        [corners(rows(truth["annotations"], image)) for image in images],
        [[categories[a["category_id"]] for a in rows(truth["annotations"], image)] for image in images],
        [[a["iscrowd"] for a in rows(truth["annotations"], image)] for image in images],
    )
    detections = []
    for image in images:
        mine = sorted(rows(found, image), key=lambda entry: -entry["score"])
        detections.append(
            Detections(
                torch.from_numpy(corners(mine)),
                torch.tensor([entry["score"] for entry in mine], dtype=torch.float64),
                torch.tensor([categories[entry["category_id"]] for entry in mine], dtype=torch.int64),
            )
        )
    return ground_truth, detections, [str(c) for c in categories]


def test_packed_input_equals_the_published_values():
    truth, found, expected = load("val2014_100_bboxarea")
    assert_equal_to(evaluate(*packed(truth, found)), expected["bbox"]["published"], 1e-6)


def random_set(seed: int, images: int = 12, nc: int = 4):
    """True boxes, some of them crowds, and noisy detections of them with tied scores and false ones."""
    rng = np.random.default_rng(seed)
    boxes, classes, crowd, detections = [], [], [], []
    for _ in range(images):
        n = rng.integers(0, 9)
        corner = rng.uniform(0, 400, (n, 2))
        truth = np.concatenate((corner, corner + rng.uniform(5, 200, (n, 2))), axis=1)
        labels = rng.integers(0, nc - 1, n)  # the last class has no truth
        truth = np.concatenate((truth, truth + rng.normal(0, 5, (n, 4))))  # neighbours that vie for one detection
        truth[:, 2:] = np.maximum(truth[:, 2:], truth[:, :2] + 1)
        labels, n = np.tile(labels, 2), 2 * n
        noisy = np.repeat(truth, 3, axis=0) + rng.normal(0, 6, (3 * n, 4))
        noisy = np.concatenate((noisy, truth[:0], np.tile((10.0, 10.0, 60.0, 60.0), (5, 1))))
        noisy[:, 2:] = np.maximum(noisy[:, 2:], noisy[:, :2] + 1)
        guess = np.concatenate((np.repeat(labels, 3), rng.integers(0, nc, 5)))
        score = np.sort(rng.integers(1, 12, len(guess)) / 12)[::-1].copy()
        boxes.append(truth)
        classes.append(labels)
        crowd.append(rng.random(n) < 0.15)
        detections.append(
            Detections(
                torch.from_numpy(noisy).float(),
                torch.from_numpy(score).float(),
                torch.from_numpy(guess.astype(np.int64)),
            )
        )
    ground_truth = build_ground_truth([600] * images, [600] * images, boxes, classes, crowd)
    return ground_truth, detections, [f"class {c}" for c in range(nc)]


def oracle(ground_truth, detections, names) -> COCOeval:
    """The same set through pycocotools."""
    results = []
    for image, found in enumerate(detections):
        for box, score, c in zip(found.boxes_xyxy.double().tolist(), *(x.tolist() for x in found[1:]), strict=True):
            xywh = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            results.append({"image_id": image, "category_id": c, "bbox": xywh, "score": score})
    annotations = []
    for image in range(len(ground_truth)):
        for box, c, crowd in zip(*(x.tolist() for x in ground_truth.of_image(image)), strict=True):
            xywh = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": c,
                    "bbox": xywh,
                    "area": xywh[2] * xywh[3],
                    "iscrowd": int(crowd),
                }
            )
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": [{"id": i} for i in range(len(ground_truth))],
            "categories": [{"id": c} for c in range(len(names))],
            "annotations": annotations,
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


@pytest.mark.parametrize("seed", range(4))
def test_equals_pycocotools_on_random_sets(seed):
    arguments = random_set(seed)
    metrics, evaluation = evaluate(*arguments), oracle(*arguments)
    assert_equal_to(metrics, dict(zip(FIELDS, evaluation.stats, strict=True)), 1e-12)
    for c in range(len(arguments[2])):
        precision = evaluation.eval["precision"][:, :, c, 0, 2]
        assert_equal_class(metrics.class_map50_95[c], precision)
        assert_equal_class(metrics.class_map50[c], precision[0])


def assert_equal_class(value: float, precision: np.ndarray) -> None:
    if (precision == -1).all():
        assert math.isnan(value)
    else:
        assert value == pytest.approx(precision.mean(), abs=1e-12)


def empty() -> Detections:
    return Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def test_no_detection_at_all_is_zero():
    ground_truth = build_ground_truth([100, 100], [100, 100], [[[0, 0, 50, 50]], []], [[1], []])
    metrics = evaluate(ground_truth, [empty(), empty()], ("a", "b", "c"))
    assert metrics.map50_95 == metrics.map50 == metrics.map75 == metrics.medium == metrics.ar100 == 0
    assert np.isnan(metrics.class_map50[[0, 2]]).all()
    assert metrics.class_map50[1] == 0
    assert math.isnan(metrics.small)


def test_no_ground_truth_at_all_has_no_value():
    ground_truth = build_ground_truth([100], [100], [[]], [[]])
    found = Detections(torch.tensor([[0.0, 0, 9, 9]]), torch.tensor([0.9]), torch.tensor([0]))
    for detections in ([empty()], [found]):
        metrics = evaluate(ground_truth, detections, ("a",))
        assert math.isnan(metrics.map50_95)
        assert math.isnan(metrics.class_map50[0])


def test_a_class_without_truth_is_left_out_and_one_without_detection_counts_as_zero():
    ground_truth = build_ground_truth([100], [100], [[[0, 0, 50, 50], [50, 50, 90, 90]]], [[0, 1]])
    found = Detections(
        torch.tensor([[0.0, 0, 50, 50], [10, 10, 20, 20]]), torch.tensor([0.9, 0.95]), torch.tensor([0, 2])
    )
    metrics = evaluate(ground_truth, [found], ("a", "b", "c"))
    assert metrics.class_map50_95[:2].tolist() == [1, 0]
    assert math.isnan(metrics.class_map50_95[2])
    assert metrics.map50_95 == 0.5


def test_evaluation_is_silent_and_repeatable(capfd, caplog):
    caplog.set_level(0)
    arguments = random_set(9)
    first, second = evaluate(*arguments), evaluate(*arguments)
    out, err = capfd.readouterr()
    assert out == err == ""
    assert not caplog.records
    assert first.map50_95 == second.map50_95
