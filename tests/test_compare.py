"""`detector compare`: differences, their noise held against COCO's own tools on drawn images, and what is shown."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from exports import write_checkpoint
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import write_dataset
from torchvision.ops import box_iou

from detector import checkpoint_file
from detector.cli import main
from detector.commands import compare as command
from detector.evaluation import coco
from detector.evaluation.coco import build_ground_truth
from detector.evaluation.comparing import Interval, interval, sighting
from detector.evaluation.evaluate import ground_truth_of, judge_found
from detector.evaluation.resampling import average_precision, draw_images, match, mean_precisions
from detector.model.network import network_from_description
from detector.model.selection import Detections
from detector.reporting import svg
from detector.reporting.compare_text import labels_of, signed

NC = 3


def scene(images=14, seed=0, most=9, crowds=0.15, dets=14, crowded_image=True):
    """Ground truth with crowds, and detections near it and elsewhere; the first image has many of one class."""
    random = np.random.default_rng(seed)
    boxes, classes, crowd, found = [], [], [], []
    for i in range(images):
        count = int(random.integers(most + 1)) if i else most
        low = random.uniform(0, 150, (count, 2))
        boxes.append(np.concatenate((low, low + random.uniform(8, 60, (count, 2))), axis=1))
        classes.append(random.integers(0, NC, count) if i else np.zeros(count, int))
        crowd.append(random.random(count) < crowds)
        number = 260 if i == 0 and crowded_image else int(random.integers(dets + 1))
        chosen = random.integers(0, max(count, 1), number) if count else np.zeros(0, int)
        near = boxes[i][chosen] + random.normal(0, 4, (len(chosen), 4))
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
        label = np.where(random.random(len(chosen)) < 0.8, classes[i][chosen], random.integers(0, NC, len(chosen)))
        scores = -np.sort(-random.random(len(chosen)))
        found.append(Detections(*map(torch.tensor, (near.astype(np.float32), scores.astype(np.float32), label))))
    return build_ground_truth([220] * images, [220] * images, boxes, classes, crowd), found


def by_pycocotools(truth, found, drawn):
    """(C, T) AP on the images `drawn`, each occurrence an image of its own; NaN where there is nothing to find."""
    annotations, results = [], []
    for new, i in enumerate(drawn):
        for box, label, crowd in zip(*truth.of_image(i), strict=True):
            wh = (box[2:] - box[:2]).tolist()
            annotations.append(
                {"id": len(annotations) + 1, "image_id": new, "category_id": int(label), "iscrowd": int(crowd)}
                | {"bbox": [*box[:2].tolist(), *wh], "area": wh[0] * wh[1]}
            )
        for box, score, label in zip(*(field.numpy() for field in found[i]), strict=True):
            box = box.astype(float)
            xywh = [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()]
            results.append({"image_id": new, "category_id": int(label), "bbox": xywh, "score": float(score)})
    whole, other = COCO(), COCO()
    shared = {
        "images": [{"id": new, "height": 220, "width": 220} for new in range(len(drawn))],
        "categories": [{"id": c, "name": str(c)} for c in range(NC)],
    }
    whole.dataset = {**shared, "annotations": annotations}
    areas = [{"area": one["bbox"][2] * one["bbox"][3], "iscrowd": 0, "id": k} for k, one in enumerate(results, 1)]
    other.dataset = {**shared, "annotations": [{**a, **b} for a, b in zip(results, areas, strict=True)]}
    whole.createIndex()
    other.createIndex()
    evaluation = COCOeval(whole, other, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 2]  # (T, R, C), all areas, 100 detections
    return np.where(precision == -1, np.nan, precision).mean(axis=1).T


# --- the bootstrap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_precision_of_a_draw_is_that_of_pycocotools_on_the_drawn_images(seed):
    truth, found = scene(seed=seed)
    weights = draw_images(len(truth), range(5), seed)
    weights = np.concatenate((weights, np.eye(len(truth))[:2] * 3))  # one image alone: some classes are not there
    ours = average_precision(match(truth, found, NC), weights)
    for draw, row in zip(weights, ours, strict=True):
        images = np.repeat(np.arange(len(truth)), draw.astype(int))
        np.testing.assert_allclose(row, by_pycocotools(truth, found, images), rtol=0, atol=1e-12)


def test_the_whole_set_gives_the_metrics_that_validation_prints():
    truth, found = scene(40, seed=7)
    metrics = coco.evaluate(truth, found, [str(c) for c in range(NC)])
    (both,) = mean_precisions(match(truth, found, NC), np.ones((1, 40)))
    np.testing.assert_allclose(both, (metrics.map50_95, metrics.map50), atol=1e-12)


def test_the_blocks_of_the_computation_do_not_show(monkeypatch):
    truth, found = scene(seed=1)
    weights = draw_images(len(truth), range(20), 0)
    whole = mean_precisions(match(truth, found, NC), weights)
    monkeypatch.setattr("detector.evaluation.resampling.AT_ONCE", 1)
    np.testing.assert_array_equal(mean_precisions(match(truth, found, NC), weights), whole)


def test_nothing_found_and_nothing_to_find():
    truth, found = scene(4, seed=2)
    nothing = [one.above(2.0) for one in found]
    np.testing.assert_array_equal(mean_precisions(match(truth, nothing, NC), np.ones((1, 4))), [[0, 0]])
    empty = build_ground_truth([9] * 4, [9] * 4, [[]] * 4, [[]] * 4)
    assert np.isnan(mean_precisions(match(empty, found, NC), np.ones((1, 4)))).all()


def test_draws_are_of_as_many_images_and_follow_from_the_seed():
    weights = draw_images(30, range(400), 5)
    assert (weights.sum(axis=1) == 30).all()
    np.testing.assert_array_equal(weights[100:], draw_images(30, range(100, 400), 5))
    assert (weights != draw_images(30, range(400), 6)).any()
    assert abs((weights == 0).mean() - (1 - 1 / 30) ** 30) < 0.02  # the share of images that a draw leaves out


@pytest.mark.slow
@pytest.mark.long
def test_an_interval_covers_as_often_as_it_says():
    """The mean of normal numbers, whose noise is known: about 95% of intervals hold the true mean."""
    random = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        values = random.normal(3, 1, 60)
        one = interval(values.mean(), draw_images(60, range(400), trial) @ values / 60)
        held += one.low <= 3 <= one.high
    assert 180 <= held <= 198


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((0.1, 0.02, 0.2, 1), "better"),
        ((-0.1, -0.2, -0.02, 0), "worse"),
        ((0.1, -0.02, 0.2, 0.9), "open"),
        ((0.0, 0.0, 0.0, 0), "equal"),
        ((0.0, 0.0, 0.1, 0.01), "open"),
        ((np.nan, 0, 0, 0), "unknown"),
        ((0.1, np.nan, np.nan, np.nan), "unknown"),
    ],
)
def test_verdicts(numbers, verdict):
    assert Interval(*numbers).verdict == verdict


# --- found and missed ------------------------------------------------------------------------------------------------


def slow_sighting(truth, found, confidence):
    """COCO's rule in loops: by falling score each takes the free object of its class that it overlaps most."""
    hit, wrong = [], []
    for i, one in enumerate(found):
        boxes, classes, crowd = truth.of_image(i)
        taken, left = [False] * len(boxes), 0
        overlaps = box_iou(one.boxes_xyxy.double(), torch.tensor(boxes)).numpy() if len(boxes) else None
        for d in range(len(one.scores)):
            if one.scores[d] < confidence:
                continue
            best, excused = None, False
            for g in range(len(boxes)):
                if classes[g] != one.classes[d]:
                    continue
                if crowd[g]:
                    a, b = one.boxes_xyxy[d].double().numpy(), boxes[g]
                    shared = max(min(a[2], b[2]) - max(a[0], b[0]), 0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0)
                    excused = excused or shared >= 0.5 * (a[2] - a[0]) * (a[3] - a[1])
                elif not taken[g] and overlaps[d, g] >= 0.5 and (best is None or overlaps[d, g] >= overlaps[d, best]):
                    best = g
            if best is not None:
                taken[best] = True
            elif not excused:
                left += 1
        hit += taken
        wrong.append(left)
    return hit, wrong


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("confidence", [0.0, 0.4, 1.0])
def test_objects_found_are_those_of_the_slow_loop(seed, confidence):
    truth, found = scene(10, seed=seed, dets=25, crowded_image=False)
    one = sighting(truth, found, confidence)
    hit, wrong = slow_sighting(truth, found, confidence)
    assert one.found.tolist() == hit
    assert list(map(len, one.wrong)) == wrong


# --- words and charts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/runs/a", "/runs/b"], ["a", "b"]),
        (["/x/run", "/y/run"], ["x/run", "y/run"]),
        (["/runs/a", "/runs/a", "/runs/b"], ["a", "a (2)", "b"]),
        (["/runs/a/weights/best.pt", "/runs/a/weights/last.pt"], ["a", "a last"]),
        (["/runs/a", "/runs/a/weights/best.pt"], ["a", "a (2)"]),
        (["/m/one.pt", "/m/two.pt"], ["one", "two"]),
        (["/a", "/b/a"], ["//a", "b/a"]),
        (["/r/кот\n<b>", "/r/x"], ["кот\\n<b>", "x"]),
    ],
)
def test_labels_tell_runs_apart(paths, labels):
    assert labels_of([Path(path) for path in paths]) == labels


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0), (0, 0.003), (0, 1e5), (-0.2, 7), (1, 1), (1, 2), (1, 300), (0, 0.30000001)]
)
def test_an_axis_has_few_round_numbers_whatever_the_range(low, high):
    chart = svg.line_chart("a", np.array([1.0, 2.0]), [svg.Series("run", np.array([low, high], dtype=float))], "epoch")
    numbers = re.findall(r'text-anchor="end">([^<]*)<', chart)
    assert 2 <= len(numbers) <= 8
    assert len(set(numbers)) == len(numbers)
    assert max(map(len, numbers)) <= 7
    assert chart.count("<polyline") == 1


def test_signs():
    assert [signed(value) for value in (0.0123, -0.0123, 0.0, -0.0001, float("nan"))] == [
        "+0.012",
        "-0.012",
        "0",
        "0",
        "-",
    ]


# --- the command -----------------------------------------------------------------------------------------------------


METRICS = "epoch,step,box,mAP50-95,mAP50\n1,1,4.0,0.1,0.2\n2,2,3.0,0.2,0.4\n"


def make(folder, data, seed=1, names=("square", "disc"), metrics=METRICS, **settings):
    """A run's folder with a checkpoint, as training leaves it."""
    (folder / "weights").mkdir(parents=True)
    shown = {"data": str(data), "names": None, "epochs": 2, "seed": seed, **settings}
    write_checkpoint(folder / "weights" / "best.pt", seed=seed, settings=shown, names=list(names), epoch=2)
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("set"), train=2, val=9, size=96)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words):
    return main(["compare", *map(str, words), "device=cpu", "workers=0", "draws=50"])


def compared(capsys, *words):
    capsys.readouterr()
    assert call(*words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def parsed(path):
    """The page as XML: it is well-formed, and holds no address and no script but that of the charts."""
    text = Path(path).read_text(encoding="utf-8").replace(f"<script>{svg.SCRIPT}</script>", "", 1)
    assert "<script" not in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "url(" not in text
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def test_a_run_and_itself_do_not_differ(here, data, capsys, monkeypatch):
    run = make(here / "runs" / "a", data)
    times = []
    measured = command.measured
    monkeypatch.setattr(command, "measured", lambda *given: times.append(given) or measured(*given))
    shown = compared(capsys, run, run)
    assert len(times) == 1
    assert [line.split()[-5:] for line in shown.splitlines() if line.startswith("a (2) - a")] == (
        [["0", "0", "0", "no", "difference"]] * 2
    )
    assert "No image in which that differs" in shown
    assert "none" in shown.split("Settings that differ")[1].split("Metrics")[0]
    assert "no difference" in "".join(parsed(here / "runs" / "compare" / "compare.html").itertext())
    monkeypatch.setattr("detector.evaluation.comparing.AT_ONCE", 1)
    copied = make(here / "runs" / "copy", data)  # measured on its own
    assert "no difference" in compared(capsys, run, copied, "html=false")
    assert len(times) == 3


def test_numbers_are_those_of_validation(here, data, capsys):
    runs = [make(here / "runs" / name, data, seed) for name, seed in (("a", 1), ("b", 2))]
    shown = compared(capsys, *runs, "html=false")
    assert not (here / "runs" / "compare").exists()
    row = next(line.split() for line in shown.splitlines() if line.startswith("mAP50 "))
    for run, value in zip(runs, row[1:3], strict=True):
        assert main(["val", str(run), "device=cpu", "workers=0", "plots=false"]) == 0
        table = capsys.readouterr().out
        assert next(line.split()[-2] for line in table.splitlines() if line.startswith("all")) == value
    assert re.search(r"^seed +1 +2$", shown, flags=re.M)
    assert "not that of training: another seed" in shown


def test_each_run_is_measured_at_its_own_size(here, data, capsys):
    runs = [make(here / "a", data), make(here / "b", data)]
    saved = checkpoint_file.read(runs[1] / "weights" / "best.pt")
    checkpoint_file.write(runs[1] / "weights" / "best.pt", {**saved, "imgsz": 64})
    shown = compared(capsys, *runs, "html=false")
    assert "imgsz 96, cpu" in shown.splitlines()[0]
    assert "imgsz 64, cpu" in shown.splitlines()[1]
    assert compared(capsys, *runs, "html=false", "imgsz=64").count("imgsz 64, cpu") == 2


def test_classes_in_another_order_are_the_same_classes(here, data, capsys):
    first = make(here / "a", data)
    saved = checkpoint_file.read(first / "weights" / "best.pt")
    network = network_from_description({**saved["description"], "nc": 2})
    network.load_state_dict(saved["ema"])
    with torch.no_grad():
        for layer in network.head.class_outputs:
            layer.weight.copy_(layer.weight[[1, 0]].clone())
            layer.bias.copy_(layer.bias[[1, 0]].clone())
    other = make(here / "b", data, names=("disc", "square"))
    contents = {**checkpoint_file.read(other / "weights" / "best.pt"), "ema": network.state_dict()}
    checkpoint_file.write(other / "weights" / "best.pt", contents)
    shown = compared(capsys, first, other, f"data={data}", "html=false")
    assert shown.count("no difference") == 2
    rows = [line.split() for line in shown.split("AP50-95 by class")[1].splitlines()[3:5]]
    assert [row[0] for row in rows] == ["square", "disc"]
    assert all(row[1] == row[2] and row[3] == "0" for row in rows)


def looking(monkeypatch, misses):
    """Have the runs find all objects but those that `misses(seed, object's number in the set)` names."""

    def found_by(settings, subject, images, judged):
        index, found, number = images.index, {}, 0
        for i in range(len(index)):
            boxes = torch.tensor(index.boxes_xyxy(i), dtype=torch.float32)
            keep = torch.tensor([not misses(subject.trained["seed"], number + k) for k in range(len(boxes))]).bool()
            number += len(boxes)
            labels = torch.tensor(index.labels(i))[keep]
            found[i] = Detections(boxes[keep], torch.linspace(0.9, 0.8, len(labels)), labels)
        return judge_found(ground_truth_of(index), found, subject.detector.names, judged)

    monkeypatch.setattr(command, "measured", found_by)


def test_what_one_finds_and_the_other_misses_is_counted(here, data, capsys, monkeypatch):
    looking(monkeypatch, lambda seed, number: number in {1: (0, 1, 4), 2: (1, 2)}[seed])
    shown = compared(capsys, make(here / "a", data), make(here / "b", data, 2), "out=page.html")
    objects = shown.split("Objects found")[1].splitlines()
    total = int(re.search(r"with (\d+) objects", shown)[1])
    assert objects[3].split() == ["a", "0.000", str(total - 3), "3", "0"]
    assert objects[4].split() == ["b", "0.000", str(total - 2), "2", "0", "2", "1"]
    owners = np.repeat(np.arange(9), np.arange(9) % 3)  # image i has i % 3 objects
    differ = np.bincount(owners[[0, 2, 4]], minlength=9)
    assert f"Images in which that differs: {np.count_nonzero(differ)} of 9" in shown
    listed = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith("images/val/")}
    missed = {"a": np.bincount(owners[[0, 4]], minlength=9), "b": np.bincount(owners[[2]], minlength=9)}
    assert listed == {
        f"images/val/{i:03d}.png": [str(i % 3), str(differ[i]), str(missed["a"][i]), str(missed["b"][i])]
        for i in np.flatnonzero(differ)
    }
    root = parsed(here / "page.html")
    assert len(list(root.iter("img"))) == 2 * np.count_nonzero(differ)
    assert f"All images that differ: {np.count_nonzero(differ)} of 9" in "".join(root.itertext())


def test_an_image_that_is_gone_has_no_picture(here, tmp_path, capsys, monkeypatch):
    own = write_dataset(tmp_path / "own", train=1, val=3, size=96)
    runs = [make(here / name, own, seed) for name, seed in (("a", 1), ("b", 2))]
    looking(monkeypatch, lambda seed, number: seed == 1)
    pictured = command.page

    def page(found, index):
        for file in (own.parent / "images" / "val").iterdir():
            file.write_bytes(b"")
        return pictured(found, index)

    monkeypatch.setattr(command, "page", page)
    assert "higher, by more than the noise" in compared(capsys, *runs, "out=page.html")
    text = "".join(parsed(here / "page.html").itertext())
    assert "no picture" in text


def test_three_runs_with_odd_names_and_tables(here, data, capsys, monkeypatch):
    looking(monkeypatch, lambda seed, number: number % 3 == seed - 1)
    name = "<b>&\"кот'"
    runs = [
        make(here / "x" / name, data),
        make(here / "y" / name, data, 2, metrics="epoch,box,mAP50-95,mAP50\n1,nan,nan,nan\n2,2.0,,\n3,bad,0.1,inf\n"),
        make(here / "z", data, 3, metrics="epoch,step,box\n1,1,3.0\n", val=False),
    ]
    shown = compared(capsys, *runs, "out=page.htm")
    assert f"y/{name} - x/{name}" in shown
    assert f"z - x/{name}" in shown
    root = parsed(here / "page.htm")
    text = "".join(root.itertext())
    assert f"x/{name}" in text
    assert "measures" not in text
    assert not list(root.iter("script"))
    assert len(list(root.iter("img"))) % 3 == 0
    assert list(root.iter("img"))
    assert "NaN" not in text
    assert "nan" not in Path("page.htm").read_text(encoding="utf-8").split("<body>")[1].split("<img")[0]


def test_a_checkpoint_alone_has_no_curves(here, data, capsys):
    run = make(here / "runs" / "a", data)
    alone = here / "other.pt"
    alone.write_bytes((run / "weights" / "best.pt").read_bytes())
    assert "other - a" in compared(capsys, run, alone)
    text = "".join(parsed(here / "runs" / "compare" / "compare.html").itertext())
    assert "Without a table of epochs: other" in text
    assert "other - a" in compared(capsys, run, alone, data)  # the data set as a word
    assert (here / "runs" / "compare2" / "compare.html").is_file()


def test_settings_that_are_not_known_are_not_compared(here, data, capsys):
    runs = [make(here / name, data, seed) for seed, name in enumerate("abc", 1)]
    saved = checkpoint_file.read(runs[2] / "weights" / "best.pt")
    checkpoint_file.write(runs[2] / "weights" / "best.pt", {**saved, "settings": {}})
    shown = compared(capsys, *runs, f"data={data}", "out=page.html")
    assert re.search(r"^setting +a +b$", shown, flags=re.M)
    shown = compared(capsys, runs[0], runs[2], f"data={data}", "out=page.html")
    assert "Settings that differ\nnot known of c\n" in shown
    assert "not known of c" in "".join(parsed(here / "page.html").itertext())


def test_a_set_without_boxes_leaves_it_open(here, data, capsys, tmp_path):
    empty = write_dataset(tmp_path / "empty", train=1, val=2)
    for file in (empty.parent / "labels" / "val").iterdir():
        file.write_text("")
    runs = [make(here / "runs" / name, data, seed) for name, seed in (("a", 1), ("b", 2))]
    shown = compared(capsys, *runs, f"data={empty}")
    assert shown.count("not known: there is nothing to find") == 2
    assert "2 images are few" in shown
    parsed(here / "runs" / "compare" / "compare.html")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_named(here, data, capsys, tmp_path):
    other = write_dataset(tmp_path / "else", train=1, val=3, size=96)
    a, b = make(here / "r" / "a", data), make(here / "r" / "b", other, 2)
    strange = make(here / "r" / "c", data, names=("cat", "dog"))
    part = make(here / "r" / "d", data, classes=["disc"])
    public = make(here / "r" / "e", data)
    contents = checkpoint_file.read(public / "weights" / "best.pt")
    checkpoint_file.write(public / "weights" / "best.pt", {**contents, "settings": {}})
    (here / "r" / "fresh" / "weights").mkdir(parents=True)
    for words, messages in (
        ([a], ["two runs or more"]),
        ([], ["two runs or more"]),
        ([a, b], [str(data), str(other), "data=my_data.yaml"]),
        ([a, strange], [f"{a}/weights/best.pt", f"{strange}/weights/best.pt", "only here cat, dog"]),
        ([a, part], ["all classes", "['disc']", "classes="]),
        ([a, public], [str(data), "does not name", "data=my_data.yaml"]),
        ([public, public], ["does not say where its data set is"]),
        ([a, here / "r" / "fresh"], [f"{here}/r/fresh: has no weights/best.pt"]),
        ([a, here / "r" / "gone"], ["gone: no such checkpoint file"]),
        ([a, data, "data=x.yaml"], ["not a checkpoint"]),
        ([a, a, "out=page.txt"], ["ends in .html"]),
        ([a, a, "out=no/page.html"], ["no is no folder"]),
        ([a, a, "epochs=3"], ["'epochs' is not a setting of detector compare"]),
        ([a, "runs=[x]"], ["runs= is set already"]),
        ([a, a, "split=test"], ["test"]),
    ):
        assert call(*words) == 2, words
        error = capsys.readouterr().err
        for message in messages:
            assert message in error, words
    assert not (here / "runs").exists() or not list((here / "runs").iterdir())
    assert "b - a" in compared(capsys, a, b, f"data={data}", "html=false")
    assert "d - a" in compared(capsys, a, part, "classes=disc", "html=false")


def test_a_place_that_cannot_be_written_to_is_told_before_the_measuring(here, data, capsys, monkeypatch):
    run = make(here / "r" / "a", data)
    monkeypatch.setattr(command, "measured", None)
    (here / "file").write_text("")
    assert call(run, run, "project=file") == 2
    assert "cannot make a run folder here" in capsys.readouterr().err
    monkeypatch.setattr(command.os, "access", lambda *_: False)  # a test may be run by who may write anywhere
    assert call(run, run, "out=page.html") == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_measuring_that_fails_leaves_no_folder_and_the_old_page(here, data, capsys, monkeypatch):
    run = make(here / "r" / "a", data)
    (here / "page.html").write_text("old")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measured", stopped)
    assert call(run, run) == 130
    assert not list((here / "runs").iterdir())
    assert call(run, run, "out=page.html") == 130
    assert (here / "page.html").read_text() == "old"


@pytest.mark.slow
def test_in_the_c_locale_without_a_terminal(here, data):
    runs = [make(here / "кот", data), make(here / "b", data, 2)]
    words = [os.fsencode(runs[0]), runs[1], "device=cpu", "workers=0", "draws=20"]
    done = subprocess.run(
        [sys.executable, "-m", "detector", "compare", *words],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd=here,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"page      " in done.stdout
    assert b"Traceback" not in done.stderr
    root = parsed(here / "runs" / "compare" / "compare.html")
    assert "More than noise?" in "".join(root.itertext())
    assert yaml.safe_load(data.read_text())["names"][0] in "".join(root.itertext())
