"""Sliced inference: tiles cover an image, and what they find is what is in it, once and whole."""

from itertools import pairwise

import numpy as np
import pytest
from sighted import sighted

from detector.inference.tiles import Tile, cut_by, merged, taken_of_whole, tiles_of


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
            if shared / (mine + other - shared) > iou or (cut[i] and shared / mine > iou):
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
    for iou, most in ((0.5, 300), (0.7, 20)):
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
