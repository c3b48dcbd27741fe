"""The page of a run: its numbers are those of slow computations, and nothing that a run leaves breaks it."""

import csv
import dataclasses
import errno
import json
import os
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import browser
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import MINUTE, write_dataset
from test_coco import random_set
from test_training import run, train

import detector
from detector.commands.report import wanted
from detector.config.uses import ReportSettings
from detector.errors import ConfigError, StopTraining
from detector.evaluation.calibration import compute_calibration
from detector.evaluation.coco import build_ground_truth
from detector.evaluation.evaluate import judge
from detector.evaluation.mistakes import FALSE, MISPLACED, MISSED, RIGHT, WRONG_CLASS, judge_each
from detector.model.selection import Detections
from detector.reporting.journal import Event, WindowRow, line, read_events
from detector.reporting.run_page.curves import times_of
from detector.reporting.run_page.facts import with_kills
from detector.reporting.run_page.page import Measured, page
from detector.reporting.run_page.record import Record, read_record
from detector.reporting.svg import POINTS, Series, brief, line_chart, thinned, ticks
from detector.run import telling

SIZES = {"small": 3, "medium": 4, "large": 5, "all": 0}  # positions in pycocotools' stats
HOSTILE = ("<script>alert(1)</script>", "\"quotes' & ]]>", "\N{CAT FACE} \u202eevil")


class Scene:
    """A data set of pictures of one colour, or of noise, with the boxes of a ground truth."""

    def __init__(self, truth, files=None, noise=False, side=600):
        self.truth, self.files, self.noise, self.side = truth, files or {}, noise, side
        self.heights, self.widths, self.areas = truth.heights, truth.widths, None

    def __len__(self):
        return len(self.truth)

    def boxes_xyxy(self, i):
        return self.truth.of_image(i)[0]

    def labels(self, i):
        return self.truth.of_image(i)[1]

    def ignored(self, i):
        return self.truth.of_image(i)[2]

    def path(self, i):
        return Path(self.files.get(i, f"{i}.jpg"))

    def image(self, i):
        if self.noise:
            return np.random.default_rng(i).integers(0, 256, (self.side, self.side, 3), dtype=np.uint8)
        return np.full((self.side, self.side, 3), 90, dtype=np.uint8)


def found(*rows):
    """Detections from (box, score, class)."""
    boxes, scores, classes = ([row[k] for row in rows] for k in range(3))
    return Detections(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(classes, dtype=torch.int64),
    )


def window(number, **changes):
    row = WindowRow(
        window=number,
        epoch=1,
        done=number * 4,
        step=number,
        images=4,
        cut=[[2, 2]],
        applied=True,
        losses={"box": 1 / number, "cls": 0.5},
        weight=3.0,
        norm=10.0,
        lr=0.01,
        loss_scale=1.0,
        seconds=2.0,
        waited=0.25,
        memory=2**30,
        time=1000.0 + 2 * number,
    )
    return dataclasses.replace(row, **changes)


def record_of(**changes):
    return dataclasses.replace(Record(Path("/somewhere/runs/mine"), {"epochs": 3, "nbs": 64}), **changes)


def page_of(truth, detections, names, record=None, **scene):
    measured = Measured(judge(truth, detections, names), SimpleNamespace(index=Scene(truth, **scene), imgsz=64), names)
    return page(record or record_of(), measured)


def parsed(text):
    """The page as XML: it must be that, too."""
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def value(root, attribute, name):
    (one,) = (one for one in root.iter() if one.get(attribute) == str(name))
    return float(one.get("data-value"))


def words(root):
    return " ".join("".join(root.itertext()).split())


# --- numbers ---------------------------------------------------------------------------------------------------------


def pycocotools_stats(truth, detections):
    images = [{"id": i} for i in range(len(truth))]
    annotations, results = [], []
    for i, one in enumerate(detections):
        for box, c, crowd in zip(*(part.tolist() for part in truth.of_image(i)), strict=True):
            bbox = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            annotations.append({"image_id": i, "category_id": c, "bbox": bbox, "iscrowd": int(crowd)})
            annotations[-1] |= {"id": len(annotations), "area": bbox[2] * bbox[3]}
        for box, score, c in zip(one.boxes_xyxy.double().tolist(), *(x.tolist() for x in one[1:]), strict=True):
            bbox = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            results.append({"image_id": i, "category_id": c, "bbox": bbox, "score": score})
    coco = COCO()
    coco.dataset = {"images": images, "annotations": annotations, "categories": [{"id": c} for c in range(4)]}
    coco.createIndex()
    evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats


def test_map_by_size_on_the_page_is_that_of_pycocotools():
    truth, detections, names = random_set(3)
    stats = pycocotools_stats(truth, detections)
    root = parsed(page_of(truth, detections, names))
    for name, position in SIZES.items():
        assert value(root, "data-size", name) == pytest.approx(stats[position], abs=1e-6)
    assert len({round(float(stats[position]), 3) for position in SIZES.values()}) == 4


def iou(a, b, crowd):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    own = (a[2] - a[0]) * (a[3] - a[1])
    return both / (own if crowd else own + (b[2] - b[0]) * (b[3] - b[1]) - both)


def slow_judgement(truth, detections, confidence):
    """(score, right) of each detection that counts, one by one."""
    rows = []
    for i, one in enumerate(detections):
        boxes, classes, crowd = (part.tolist() for part in truth.of_image(i))
        free = set(range(len(boxes)))
        listed = zip(one.boxes_xyxy.double().tolist(), one.scores.double().tolist(), one.classes.tolist(), strict=True)
        for box, score, c in listed:
            if score < confidence:
                continue
            overlaps = {g: iou(box, boxes[g], crowd[g]) for g in range(len(boxes)) if classes[g] == c}
            real = [g for g in overlaps if g in free and not crowd[g] and overlaps[g] >= 0.5]
            if real:
                free.remove(max(real, key=lambda g: (overlaps[g], g)))
                rows.append((score, True))
            elif not any(crowd[g] and overlaps[g] >= 0.5 for g in overlaps):
                rows.append((score, False))
    return rows


def slow_ece(rows):
    total = 0.0
    for k in range(10):
        inside = [row for row in rows if k / 10 <= row[0] < (k + 1) / 10 or (k == 9 and row[0] == 1)]
        if inside:
            right = sum(right for _, right in inside) / len(inside)
            mean = sum(score for score, _ in inside) / len(inside)
            total += len(inside) * abs(right - mean)
    return total / len(rows)


def test_calibration_error_on_the_page_is_that_of_a_slow_loop():
    truth, detections, names = random_set(5)
    root = parsed(page_of(truth, detections, names))
    for name, confidence in (("all", 0.0), ("shown", 0.25)):
        slow = slow_ece(slow_judgement(truth, detections, confidence))
        assert value(root, "data-ece", name) == pytest.approx(slow, abs=1e-6)
        assert slow > 0.01


def test_calibration_of_nothing_is_nothing():
    truth = build_ground_truth([64], [64], [[[1, 1, 20, 20]]], [[0]])
    assert np.isnan(compute_calibration(truth, [found()]).error)
    assert "Expected calibration error" not in page_of(truth, [found()], ("a",))


def test_a_bin_begins_with_its_lower_edge_and_the_last_has_both():
    truth = build_ground_truth([64], [64], [[]], [[]])
    counts = compute_calibration(truth, [found(([0, 0, 9, 9], 1.0, 0), ([20, 0, 29, 9], 0.5, 0))]).counts
    assert counts.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_classes_stand_by_difficulty_with_their_values():
    truth, detections, names = random_set(8)
    evaluation = judge(truth, detections, names)
    root = parsed(page_of(truth, detections, names))
    rows = [one for one in root.iter() if one.get("data-class") is not None]
    values = [float(one.get("data-value")) for one in rows]
    assert values == sorted(values)
    assert len(values) == 3  # the fourth has no true box
    for one in rows:
        ap = evaluation.metrics.class_map50_95[int(one.get("data-class"))]
        assert float(one.get("data-value")) == pytest.approx(ap, abs=1e-6)


# --- images ----------------------------------------------------------------------------------------------------------

FAR = [[100 * k, 0, 100 * k + 60, 60] for k in range(6)]


def hand_made():
    """Six images whose mistakes can be counted by eye."""
    boxes = [FAR[:1], FAR[:5], FAR[:2], FAR[:3], [], FAR[:4]]
    classes = [[0] * len(one) for one in boxes]
    classes[2] = [0, 1]
    moved = [[box[0] + 30, box[1], box[2] + 30, box[3]] for box in FAR]  # IoU 1/3
    detections = [
        found(),  # 0: one missed: 1 of 1
        found(*((box, 0.9, 0) for box in FAR[:5])),  # 1: all five right
        found((FAR[0], 0.9, 1), (FAR[1], 0.8, 1)),  # 2: one of another class, one right
        found(*((box, 0.9, 0) for box in moved[:3])),  # 3: three badly placed: 3 of 3
        found((FAR[0], 0.95, 0), (FAR[3], 0.95, 1), (FAR[4], 0.1, 1)),  # 4: two false, one below the confidence
        found((FAR[0], 0.9, 0), (FAR[0], 0.8, 0), (FAR[1], 0.9, 0)),  # 5: two right, one twice, two missed: 3 of 5
    ]
    return build_ground_truth([600] * 6, [600] * 6, boxes, classes), detections, ("cat", "dog")


def test_verdicts_and_the_worst_images_of_a_hand_made_scene():
    truth, detections, _ = hand_made()
    verdicts = judge_each(truth, detections, 0.25)
    names = {"right": RIGHT, "missed": MISSED, "false": FALSE, "badly": MISPLACED, "class": WRONG_CLASS}
    expected = [
        {"missed": 1},
        {"right": 5},
        {"right": 1, "class": 1},
        {"badly": 3},
        {"false": 2},
        {"right": 2, "false": 1, "missed": 2},
    ]
    for i, one in enumerate(expected):
        assert {name: verdicts.counts[i, k] for name, k in names.items() if verdicts.counts[i, k]} == one
    assert verdicts.badness.tolist() == pytest.approx([1, 0, 1 / 2, 3, 2, 9 / 5])
    assert verdicts.worst(32) == [3, 4, 5, 0, 2]
    assert verdicts.worst(2) == [3, 4]
    assert verdicts.best(8) == [1, 2, 5]
    assert verdicts.best(8, but=verdicts.worst(32)) == [1]


def test_a_crowd_excuses_detections_and_is_never_missed():
    truth = build_ground_truth([600], [600], [[[0, 0, 300, 300]]], [[0]], [[True]])
    verdicts = judge_each(truth, [found((FAR[0], 0.9, 0), (FAR[1], 0.9, 1))], 0.25)
    assert verdicts.mistakes.tolist() == [1]  # the one of another class
    assert verdicts.counts[0, FALSE] == 1


def test_images_are_shown_worst_first_with_what_is_wrong():
    truth, detections, names = hand_made()
    root = parsed(page_of(truth, detections, names))
    figures = [one for one in root.iter("figure") if one.get("data-image") is not None]
    assert [int(one.get("data-image")) for one in figures] == [3, 4, 5, 0, 2, 1]
    captions = [words(one.find("figcaption")) for one in figures]
    for caption, said in zip(
        captions,
        ("badly placed cat x 3", "false cat; false dog", "missed cat x 2; false cat", "missed cat", "cat found as dog"),
        strict=False,
    ):
        assert said in caption
    assert all(len(list(one.iter("img"))) == 2 for one in figures)


def test_pictures_of_noise_and_many_boxes_stay_within_the_limit():
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 1400, (44, 60, 2))
    boxes = [np.concatenate((one, one + rng.uniform(20, 150, (60, 2))), axis=1) for one in corners]
    truth = build_ground_truth([1600] * 44, [1600] * 44, boxes, [[0] * 60] * 44)
    detections = [found(*((box.tolist(), 0.9, 0) for box in one[k:])) for k, one in enumerate(boxes)]
    text = page_of(truth, detections, ("a",), noise=True, side=1600)
    assert text.count("<img") == 80
    assert 1_000_000 < len(text.encode()) < 5_000_000


# --- curves ----------------------------------------------------------------------------------------------------------


def test_long_lines_are_thinned_to_means_with_a_band_that_keeps_peaks():
    x = np.arange(1, 100_001, dtype=float)
    y = np.sin(x / 5000)
    y[77_777] = 1e4
    y[5] = np.nan
    one = thinned(x, y, "loss", 0)
    assert len(one.y) == len(one.high) == POINTS
    parts = y.reshape(POINTS, -1)
    assert one.y == pytest.approx(np.nanmean(parts, axis=1))
    assert one.low == pytest.approx(np.nanmin(parts, axis=1))
    assert one.high.max() == 1e4
    assert len(thinned(x[:POINTS], y[:POINTS], "loss", 0).y) == POINTS


@pytest.mark.slow
@pytest.mark.long
def test_a_run_of_100_000_windows_has_a_small_page():
    windows = [window(k + 1, norm=float(1 + k % 7)) for k in range(100_000)]
    text = page(record_of(windows=windows), None)
    assert len(text) < 500_000
    assert "100,000 windows" in text


def test_a_line_lies_where_its_values_say_and_its_axis_has_numbers():
    root = ET.fromstring(
        line_chart("loss", np.array([0.0, 5, 10]), [Series("a", np.array([0.0, 1, 0.5]))], "step", limits=(0, 1))
    )
    (points,) = (one.get("points") for one in root.iter("polyline"))
    (left, low), (middle, high), (right, half) = (map(float, one.split(",")) for one in points.split())
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((low + high) / 2, abs=0.1)
    assert high < low  # downwards is less
    numbers = [one.text for one in root.iter("text")]
    assert {"0", "0.2", "1", "10", "step"} <= set(numbers)
    assert "a: 0 to 0.5, least 0, most 1" in [one.text for one in root.iter("title")]


@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 0.0], [np.nan, 1e-9], [-5.0, np.inf, 3.0], [1e300, -1e300], [5.0, 5.0]]
)
@pytest.mark.parametrize("log", [False, True])
def test_odd_values_are_drawn_or_left_out(values, log):
    y = np.array(values)
    drawn = line_chart("odd", np.arange(len(y), dtype=float), [Series("a", y)], "x", log)
    assert "nan" not in drawn
    assert "inf" not in re.sub(r"<title>.*?</title>", "", drawn)
    ET.fromstring(drawn)


def test_a_chart_without_a_value_is_none():
    assert line_chart("none", np.arange(2.0), [Series("a", np.full(2, np.nan))], "x") == ""


def test_ticks_are_round_and_numbers_brief():
    assert ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(-3, 12, 4) == [0, 5, 10]
    assert [brief(one) for one in (0, 12500, 3.2e7, 0.00012, 0.25, 100)] == [
        "0",
        "12.5k",
        "32M",
        "1.2e-4",
        "0.25",
        "100",
    ]


# --- what a run leaves -----------------------------------------------------------------------------------------------


def event(kind, time, text=""):
    return Event(kind, text, 1, 0, time)


def test_time_is_split_by_what_it_went_to_and_pauses_are_none():
    windows = [window(1, time=1012.0), window(2, time=1014.0), window(3, time=1021.0), window(4, time=5005.0)]
    events = [event("begun", 1000.0), event("memory", 1013.0), event("stopped", 1025.0), event("resumed", 5000.0)]
    times = times_of(record_of(windows=windows, events=events))
    assert times.waiting == pytest.approx(4 * 2.0 * 0.25)
    assert times.training == pytest.approx(4 * 2.0 * 0.75)
    assert times.starting == pytest.approx(10 + 3)
    assert times.between == pytest.approx(5)
    assert times.ending == pytest.approx(4)


def test_a_session_without_an_ending_is_told_as_a_kill():
    windows = [window(1, time=1012.0), window(2, time=5005.0)]
    events = [event("begun", 1000.0), event("resumed", 5000.0), event("finished", 5010.0)]
    kinds = [(one.kind, one.time) for one in with_kills(record_of(windows=windows, events=events), False)]
    assert kinds == [("begun", 1000.0), ("killed", 1012.0), ("resumed", 5000.0), ("finished", 5010.0)]
    last = record_of(windows=windows, events=events[:2])
    assert [one.kind for one in with_kills(last, True)] == ["begun", "killed", "resumed"]
    assert [one.kind for one in with_kills(last, False)] == ["begun", "killed", "resumed", "killed"]


def test_hostile_names_are_text():
    truth, detections, _ = hand_made()
    named = dict(enumerate([f"{one}.jpg".replace("/", "_") for one in HOSTILE]))
    record = record_of(
        folder=Path(f"/runs/{HOSTILE[0].replace('/', '_')}"),
        settings={"name": HOSTILE[0], "names": list(HOSTILE), "epochs": HOSTILE[1], HOSTILE[0]: None},
        events=[Event(HOSTILE[0], HOSTILE[1], HOSTILE[2], None, float("nan"))],
        windows=[window(1, losses={HOSTILE[0]: 1.0, HOSTILE[1]: 2.0})],
    )
    text = page_of(truth, detections, HOSTILE[:2], record, files=named)
    root = parsed(text)
    assert len(list(root.iter("script"))) == 1
    assert HOSTILE[0] in words(root)
    assert HOSTILE[1] in words(root)
    assert "\u202e" not in text
    assert not {one.tag for one in root.iter()} & {"b.jpg", "alert"}


def test_the_page_does_not_name_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    place = "/home/alice/data.yaml"
    settings = {"data": place, "model": place, "cache_dir": place, "epochs": 3}
    record = record_of(settings=settings, events=[event("stopped", 5.0, place)], folder=Path("/home/alice/runs/mine"))
    text = page(record, None, f"{place}: gone")
    assert "alice" not in text
    assert text.count("~/data.yaml") >= 5


def test_the_page_asks_nobody_for_anything():
    truth, detections, names = random_set(1)
    text = page_of(truth, detections, names, record_of(windows=[window(1), window(2)]))
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    for one in parsed(text).iter():
        for key in ("src", "href"):
            assert one.get(key, "#").startswith(("#", "data:image/"))


def test_many_classes_are_told_by_the_hardest_and_the_most_confused():
    nc = 1000
    truth = build_ground_truth([600] * 2, [600] * 2, [FAR[:3], FAR[:3]], [[0, 1, 2], [997, 998, 999]])
    detections = [found((FAR[0], 0.9, 5), (FAR[1], 0.9, 1)), found((FAR[0], 0.9, 5))]
    text = page_of(truth, detections, [f"class {c}" for c in range(nc)])
    assert len(text) < 500_000
    assert "class 997" in words(parsed(text))
    assert "Most frequent confusions" in text


def test_no_truth_and_no_detection_make_a_page():
    truth = build_ground_truth([600], [600], [[]], [[]])
    assert "nothing to find" in words(parsed(page_of(truth, [found()], ("a",))))


def test_damaged_files_cost_what_they_would_have_said(tmp_path):
    good = [line(window(1)), line(window(2))]
    odd = dataclasses.asdict(window(3))
    lines = [
        good[0],
        '{"window": 5, "epo',
        "\0\0\0\n",
        json.dumps({**odd, "cut": 7}) + "\n",
        json.dumps({**odd, "losses": None, "lr": "x"}) + "\n",
        json.dumps({**odd, "window": None}) + "\n",
        json.dumps({**odd, "seconds": "slow", "norm": [1], "memory": 10**400, "losses": {"box": {}}}) + "\n",
        "[1, 2]\n",
        good[1],
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines))
    (tmp_path / "events.jsonl").write_bytes(b'{"kind": "begun"\n\xff\xfe\n' + line(event("begun", None)).encode())
    (tmp_path / "metrics.csv").write_bytes(b"epoch,box\n1,0.5,7,8\nx,1\n\0\n2\n")
    (tmp_path / "settings.yaml").write_text("epochs: [3\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "last.pt").write_bytes(b"no checkpoint")
    record = read_record(tmp_path)
    assert [row.window for row in record.windows] == [1, 3, 2]
    assert [row["epoch"] for row in record.epochs] == [1, 2]
    text = words(parsed(page(record, None, "it is gone")))
    assert "it is gone" in text
    assert "settings.yaml cannot be read" in text


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no run of training"):
        read_record(tmp_path)


def test_the_best_checkpoint_is_measured_as_its_run_measured_it():
    trained = {"nms": False, "amp": "bf16", "names": ["a"], "bad_boxes": "drop_box", "cache_dir": None, "epochs": 3}
    how = wanted(ReportSettings(device="cpu"), trained)
    assert (how.nms, how.amp, how.names, how.bad_boxes, how.device) == (False, "bf16", ["a"], "drop_box", "cpu")
    assert wanted(ReportSettings(amp="fp32"), trained).amp == "fp32"


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def common(data):
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "workers=0", "device=cpu", "patience=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, common):
    """A finished run of two epochs, to be read only."""
    return train(tmp_path_factory.mktemp("trained"), common, "mine", "epochs=2", "lr0=0.02")


def tiles(root):
    return {one.get("data-metric"): one.text for one in root.iter() if one.get("data-metric")}


@pytest.mark.slow
def test_a_run_leaves_the_page_that_report_writes_again(trained, tmp_path, capsys):
    first = parsed((trained / "report.html").read_text(encoding="utf-8"))
    assert run("report", trained, f"out={tmp_path / 'again.html'}", "device=cpu") == 0
    assert f"report    {tmp_path / 'again.html'}" in capsys.readouterr().out
    again = parsed((tmp_path / "again.html").read_text(encoding="utf-8"))
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    best = max(rows, key=lambda row: float(row["mAP50-95"]))
    for root in (first, again):
        shown = tiles(root)
        for name in ("mAP50-95", "mAP50", "precision", "recall", "F1"):
            assert shown[name] == f"{float(best[name]):.3f}"
        assert shown["epochs"] == "2 / 2"
        text = words(root)
        assert "4 images a step = 2 a micro-batch x 2 accumulated x 1 device; 3 steps an epoch" in text
        assert "finished: 2 epochs" in text
        assert "lr0" in text.partition("by default")[2].partition("settings as by default")[0]
        assert f"python {detector.checkpoint_file.versions()['python']}" in text
    parts = [{one.get("id") for one in root.iter("section")} for root in (first, again)]
    assert parts[0] == parts[1] >= {"run", "curves", "quality", "classes", "images", "time", "events", "settings"}


@pytest.mark.slow
def test_where_the_data_set_is_gone_the_page_says_so(trained, data, tmp_path, capsys):
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(data.parent, tmp_path / "data")
    assert run("report", folder, f"data={tmp_path / 'data' / 'data.yaml'}", "device=cpu") == 0
    assert "Left out" not in (folder / "report.html").read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "data")
    capsys.readouterr()
    assert run("report", folder, f"data={tmp_path / 'data' / 'data.yaml'}", "device=cpu") == 0
    assert "warning" in capsys.readouterr().out
    root = parsed((folder / "report.html").read_text(encoding="utf-8"))
    assert "Left out: what the best checkpoint finds" in words(root)
    assert tiles(root)["epochs"] == "2 / 2"


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_told(trained, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "a.html", tmp_path / "nowhere" / "a.html"):
        assert run("report", trained, f"out={out}", "device=cpu") == 2
        assert "name one in a folder that exists" in capsys.readouterr().err

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert run("report", trained, f"out={tmp_path / 'a.html'}", "device=cpu") == 2
    assert "No space left on device; make room" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_run_that_was_killed_and_one_that_never_began_an_epoch(trained, tmp_path, capsys):
    killed = shutil.copytree(trained, tmp_path / "killed")
    whole = (killed / "events.jsonl").read_text().splitlines(keepends=True)
    (killed / "events.jsonl").write_text("".join(whole[:-1]))
    (killed / "report.html").unlink()
    assert run("report", killed, "device=cpu") == 0
    assert "no ending was written; its last window" in words(parsed((killed / "report.html").read_text()))
    young = shutil.copytree(trained, tmp_path / "young")
    for name in ("metrics.csv", "steps.jsonl", "weights/best.pt", "report.html"):
        (young / name).unlink()
    assert run("report", young, "device=cpu") == 0
    assert "best.pt" in capsys.readouterr().out
    assert "No window is trained yet" in words(parsed((young / "report.html").read_text()))


@pytest.mark.slow
def test_a_run_without_validation_of_one_class_and_a_run_that_is_stopped_in_its_first_epoch(tmp_path, data, common):
    one = train(tmp_path, common, "one", "epochs=1", "val=false", "single_cls=true")
    assert tiles(parsed((one / "report.html").read_text()))["epochs"] == "1 / 1"
    settings = {"data": str(data), "model": str(MINUTE), "imgsz": 64, "batch": 2, "nbs": 4, "workers": 0, "epochs": 1}

    def enough(row):
        raise StopTraining("me")

    detector.train(**settings, device="cpu", project=str(tmp_path), name="stopped", on_window=enough)
    text = words(parsed((tmp_path / "stopped" / "report.html").read_text()))
    assert "stopped by me" in text
    assert "No epoch was finished" in text
    bare = train(tmp_path, common, "bare", "epochs=1", "plots=false")
    assert not (bare / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("no such glyph"), OSError(errno.ENOSPC, "No space left on device")])
def test_a_page_that_cannot_be_drawn_costs_a_run_nothing(tmp_path, common, monkeypatch, error, capsys):
    def fails(*arguments):
        raise error

    monkeypatch.setattr(telling, "page", fails)
    folder = train(tmp_path, common, "run", "epochs=1")
    assert not (folder / "report.html").exists()
    assert "report.html: not written" in capsys.readouterr().out
    assert [one.kind for one in read_events(folder)] == ["begun", "machine", "save", "finished"]
    assert not list(folder.glob(".*unfinished*"))


@pytest.mark.slow
@pytest.mark.skipif(not browser.BINARY, reason="needs chromium")
def test_in_a_browser_a_chart_tells_the_value_under_the_mouse(trained):
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    with browser.Browser() as there:
        there.ask("Page.navigate", url=(trained / "report.html").as_uri())
        there.until("document.readyState === 'complete' && document.querySelector('#tip') !== null")
        assert there.value("document.querySelector('[data-metric=epochs]').textContent") == "2 / 2"
        place = there.value(
            "(() => { const plot = [...document.querySelectorAll('svg.plot')].find(one =>"
            " one.getAttribute('aria-label').startsWith('Losses by epoch'));"
            " plot.scrollIntoView({block: 'center'}); const box = plot.getBoundingClientRect();"
            " return [box.right - 12, box.top + box.height / 2]; })()"
        )
        assert there.value("getComputedStyle(document.querySelector('#tip')).display") == "none"
        there.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        said = there.until("document.querySelector('#tip').innerText")
        assert said.split()[:4] == ["epoch", "2", "box", brief(float(rows[-1]["box"]))]
        wide = there.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        there.ask("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        narrow = there.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert (wide, narrow) == (0, 0)
        asked = there.value("performance.getEntriesByType('resource').map(one => one.name)")
        assert all(one.startswith("data:") for one in asked), asked
