"""Sliced inference: tiles cover an image, and what they find is what is in it, once and whole."""

import json
from itertools import pairwise

import numpy as np
import pytest
import yaml
from PIL import Image
from pycocotools import coco
from pycocotools.cocoeval import COCOeval
from scenes import TINY
from sighted import sighted

from detector import checkpoint_file
from detector.cli import main
from detector.commands import val
from detector.data.dataset import ValidationSet, WholeImages
from detector.data.description import load_description
from detector.data.loader import validation_batches
from detector.data.reading import build_index
from detector.errors import DataError
from detector.evaluation.evaluate import evaluate_runtime, ground_truth_of
from detector.inference.infer import JUDGED
from detector.inference.sliced import Slicing
from detector.inference.tiles import Tile, cut_by, merged, taken_of_whole, tiles_of
from detector.model.network import load_description as load_model
from detector.model.network import network_from_description
from detector.reporting.result_files import coco_rows


@pytest.mark.parametrize(("height", "width"), [(1, 1), (64, 64), (65, 64), (100, 300), (1000, 37), (511, 513)])
@pytest.mark.parametrize("overlap", [0, 0.2, 0.9])
def test_tiles_cover_the_image_and_neighbours_share_what_they_should(height, width, overlap):
    tiles = tiles_of(height, width, 64, overlap)
    covered = np.zeros((height, width), int)
    parts = tiles[:-1] if len(tiles) > 1 else tiles
    for left, top, right, bottom in parts:
        assert (right - left, bottom - top) == (min(64, width), min(64, height))
        covered[top:bottom, left:right] += 1
    assert covered.min() == 1 or overlap
    assert covered.min() >= 1
    assert len(set(parts)) == len(parts)
    assert (tiles[-1] == Tile(0, 0, width, height)) == (len(tiles) > 1 or max(height, width) <= 64)
    for starts in (sorted({tile.left for tile in parts}), sorted({tile.top for tile in parts})):
        assert all(64 - (b - a) >= int(overlap * 64) for a, b in pairwise(starts))


def slow_merge(boxes, scores, classes, cut, iou, max_det):
    """The rule in words: whole boxes first, each in falling order of score; each asks the kept ones of its class."""
    kept = []
    for i in sorted(range(len(boxes)), key=lambda i: (bool(cut[i]), -scores[i], i)):
        ok = True
        for k in kept:
            if classes[k] != classes[i]:
                continue
            width = min(boxes[i][2], boxes[k][2]) - max(boxes[i][0], boxes[k][0])
            height = min(boxes[i][3], boxes[k][3]) - max(boxes[i][1], boxes[k][1])
            shared = max(width, 0) * max(height, 0)
            mine, other = ((b[2] - b[0]) * (b[3] - b[1]) for b in (boxes[i], boxes[k]))
            if shared > iou * (mine + other - shared) or (cut[i] and shared > iou * mine):
                ok = False
        if ok:
            kept.append(i)
    return sorted(kept, key=lambda i: -scores[i])[:max_det]


@pytest.mark.parametrize("seed", range(6))
def test_merging_is_that_of_the_slow_version(seed):
    random = np.random.default_rng(seed)
    count = 150
    low = random.uniform(0, 60, (count, 2))
    boxes = np.concatenate((low, low + random.uniform(5, 40, (count, 2))), axis=1).astype(np.float32)
    scores = random.permutation(count).astype(np.float32) / count
    classes = random.integers(0, 3, count)
    cut = random.random(count) < 0.4
    boxes[:20, 2:] = boxes[:20, :2] + random.choice((0, 1e-3, 1, 16, 64, 500), (20, 2))  # of no area, and large ones
    for iou, most in ((0.5, 300), (0.7, 20), (0.0, 300), (1.0, 300)):
        assert merged(boxes, scores, classes, cut, iou, most).tolist() == slow_merge(
            boxes.astype(float).tolist(), scores.tolist(), classes.tolist(), cut.tolist(), iou, most
        )
    assert merged(boxes[:0], scores[:0], classes[:0], cut[:0], 0.5, 300).tolist() == []


def test_a_part_gives_way_to_the_whole_even_with_a_higher_score():
    boxes = np.array([[50, 0, 60, 20], [40, 0, 60, 20], [40, 0, 60, 20]], np.float32)
    kept = merged(boxes, np.array([0.9, 0.5, 0.4]), np.array([0, 0, 1]), np.array([True, False, False]), 0.7, 300)
    assert kept.tolist() == [1, 2]


def test_only_borders_inside_the_image_cut():
    boxes = np.array([[0, 5, 20, 30], [30, 5, 64, 30], [30, 60, 40, 64]], np.float32)
    assert cut_by(boxes, Tile(0, 0, 64, 64), 64, 200).tolist() == [False, True, False]
    assert cut_by(boxes, Tile(0, 0, 64, 64), 200, 64).tolist() == [False, False, True]
    assert taken_of_whole(np.array([[0, 0, 10, 3], [0, 0, 3, 30]], np.float32), 64, 0.2).tolist() == [False, True]


def scene(height, width, boxes):
    image = np.full((height, width, 3), 20, np.uint8)
    for x1, y1, x2, y2 in boxes:
        image[y1:y2, x1:x2] = 255
    return image


@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_small_objects_of_a_large_image_are_found_once_and_where_they_are(order):
    random = np.random.default_rng(3)
    places = [(x + dx, y + dy, x + dx + 9, y + dy + 7) for x, y, dx, dy in (
        (x, y, *random.integers(0, 20, 2).tolist()) for y in range(5, 900, 45) for x in range(5, 1200, 45)
    )]  # fmt: skip
    image = scene(940, 1240, places)
    model = sighted(128, by_shape=False)
    (result,) = model.predict(image, tile=128, overlap=0.2, max_det=2000, batch=8, order=order)
    assert sorted(map(tuple, result.boxes.round().astype(int).tolist())) == sorted(places)
    assert max(shape[0] for shape in model.runtime.shapes) == 8
    assert {shape[1:3] for shape in model.runtime.shapes[:-1]} == {(128, 128)}
    assert (np.diff(result.scores) <= 0).all()
    assert result.size == (940, 1240)


def test_an_object_larger_than_a_tile_is_found_whole():
    places = [(100, 120, 420, 300), (500, 20, 510, 28)]
    (result,) = sighted(128, by_shape=False).predict(scene(400, 600, places), tile=128, overlap=0.25)
    boxes = result.boxes[np.argsort(-result.scores)]
    assert np.abs(boxes[0] - places[0]).max() < 6  # as exact as the look at the whole is
    assert [500, 20, 510, 28] in result.boxes.round().astype(int).tolist()


def test_an_image_that_one_tile_holds_is_looked_at_as_without_tiles():
    images = [scene(60, 100, [(10, 10, 30, 20)]), scene(128, 128, [(100, 90, 120, 120)])]
    plain, tiled = sighted(128).predict(images), sighted(128).predict(images, tile=128)
    for a, b in zip(plain, tiled, strict=True):
        assert np.array_equal(a.boxes, b.boxes)
        assert np.array_equal(a.scores, b.scores)
    (empty,) = sighted(128).predict(scene(300, 300, []), tile=128)
    assert empty.boxes.shape == (0, 4)


# --- validation ------------------------------------------------------------------------------------------------------


def write_scenes(folder, count=4, classes=("small",)):
    """Large images with small bright areas, of which some have no box and some boxes are askew; returns the YAML."""
    random = np.random.default_rng(5)
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for number in range(count):
        height, width = ((300, 420), (130, 700), (90, 110), (300, 420))[number % 4]
        places = [(x, y, x + 14, y + 12) for x in range(10, width - 30, 60) for y in range(10, height - 30, 50)]
        Image.fromarray(scene(height, width, places)).save(folder / "images" / f"{number}.png")
        lines = []
        for x1, y1, x2, y2 in places:
            askew = random.integers(0, 6)
            x, y, w, h = (x1 + x2) / 2 + askew, (y1 + y2) / 2, x2 - x1, y2 - y1
            if random.random() < 0.8:
                lines.append(
                    f"{int(random.integers(len(classes)))} {x / width} {y / height} {w / width} {h / height}\n"
                )
        (folder / "labels" / f"{number}.txt").write_text("".join(lines))
    path = folder / "data.yaml"
    path.write_text(yaml.safe_dump({"train": "images", "val": "images", "names": list(classes)}))
    return path


def pycocotools_on(index, rows):
    """mAP50-95 and mAP50 by the official tools of COCO results whose images go by their names."""
    truth = coco.COCO()
    images = [index.path(i).stem for i in range(len(index))]
    truth.dataset = {
        "images": [{"id": name} for name in images],
        "categories": [{"id": c, "name": name} for c, name in enumerate(index.names)],
        "annotations": [],
    }  # fmt: skip
    for i, name in enumerate(images):
        for (x1, y1, x2, y2), label in zip(index.boxes_xyxy(i).tolist(), index.labels(i).tolist(), strict=True):
            truth.dataset["annotations"].append({
                "id": len(truth.dataset["annotations"]) + 1, "image_id": name, "category_id": label, "iscrowd": 0,
                "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1),
            })  # fmt: skip
    truth.createIndex()
    judged = COCOeval(truth, truth.loadRes(rows), "bbox")
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    return judged.stats[:2]


@pytest.mark.parametrize("batch", [1, 5])
def test_validation_in_tiles_measures_what_predict_finds_in_tiles(tmp_path, batch, capsys):
    index = build_index(load_description(write_scenes(tmp_path)), "val")
    model = sighted(128, by_shape=False)
    results = model.predict([index.path(i) for i in range(len(index))], conf=0.001, tile=128, overlap=0.25)
    expected = pycocotools_on(index, [row for result in results for row in coco_rows(result, result.path.stem)])
    images = WholeImages(index, 128)
    slicing = Slicing(128, 0.25, 128, batch)
    evaluation = evaluate_runtime(
        model.runtime, validation_batches(images, 1, 0), ground_truth_of(index), index.names, JUDGED, slicing=slicing
    )
    assert 0.2 < expected[0] < 0.9  # what is measured is neither nothing nor all
    assert (evaluation.metrics.map50_95, evaluation.metrics.map50) == pytest.approx(expected, abs=1e-6)
    whole = evaluate_runtime(
        model.runtime, validation_batches(ValidationSet(index, 128), 1, 0), ground_truth_of(index), index.names
    )
    assert whole.metrics.map50_95 < evaluation.metrics.map50_95 - 0.1  # at a fraction of their size


def checkpoint(path):
    """An untrained network of one class."""
    network = network_from_description({**load_model(TINY), "nc": 1})
    saved = {"ema": network.state_dict(), "description": network.description, "names": ["small"], "imgsz": 64}
    checkpoint_file.write(path, saved | {"settings": {}})


def test_val_and_predict_write_the_same_boxes_of_tiles(tmp_path, capsys):
    data = write_scenes(tmp_path / "set", 3)
    checkpoint(tmp_path / "a.pt")
    said = [
        f"project={tmp_path}",
        "device=cpu",
        "tile=96",
        "overlap=0.3",
        "conf=0.001",
        "iou=1",
        "batch=7",
        "save_json=true",
    ]
    assert main(["val", str(tmp_path / "a.pt"), str(data), *said, "workers=0", "plots=false", "name=val"]) == 0
    assert "3 images at 64, in tiles of 96" in capsys.readouterr().out
    assert (
        main(["predict", str(tmp_path / "a.pt"), str(tmp_path / "set/images"), *said, "save=false", "name=seen"]) == 0
    )
    rows, seen = (json.loads((tmp_path / name / "detections.json").read_text()) for name in ("val", "seen"))
    assert len(rows) > 100
    assert rows == seen


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("predict", ["overlap=0.3"], "overlap=0.3: is shared by tiles, of which there are none; say tile=640, too"),
        ("val", ["overlap=0.3"], "say tile=640, too"),
        ("val", ["tile=640", "letterbox=public"], "letterbox=public: is how the public trainer puts whole images"),
        ("val", ["tile=16"], "tile=16"),
    ],
)
def test_settings_of_tiles_that_make_no_sense_are_refused(tmp_path, command, words, told, capsys):
    assert main([command, str(tmp_path / "a.pt"), *([str(tmp_path)] if command == "predict" else []), *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["name=there"], ["project={tmp}/a.pt"]])
def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path, monkeypatch, words, capsys):
    data = write_scenes(tmp_path / "set", 1)
    (tmp_path / "there").mkdir()
    checkpoint(tmp_path / "a.pt")
    words = [word.format(tmp=tmp_path) for word in words]
    monkeypatch.setattr(val, "measured", lambda *_: pytest.fail("measured"))
    assert main(["val", str(tmp_path / "a.pt"), str(data), "device=cpu", f"project={tmp_path}", *words]) == 2
    assert "choose another" in capsys.readouterr().err


def test_measuring_that_fails_leaves_no_empty_folder(tmp_path, monkeypatch):
    data = write_scenes(tmp_path / "set", 1)
    checkpoint(tmp_path / "a.pt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()

    def stopped(*_):
        raise DataError("stopped")

    monkeypatch.setattr(val, "measured", stopped)
    for words in (["name=new"], ["name=full", "exist_ok=true"]):
        assert main(["val", str(tmp_path / "a.pt"), str(data), "device=cpu", f"project={tmp_path}", *words]) == 2
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "full" / "a.txt").exists()
