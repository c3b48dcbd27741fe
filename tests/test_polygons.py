"""Polygons through a warp, and copy-paste: what is drawn lies where its box says, and each mask is a polygon's."""

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import write_dataset

from detector.data.augment import Augmentation, Example
from detector.data.compose import Plane, boxes_of, drawn, polygons_of, random_perspective
from detector.data.copy_paste import copy_paste
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.mosaic import mosaic
from detector.data.polygons import box_around, clipped_polygon, moved_polygon
from detector.data.reading import Reading, build_index

SIZE = 96
seeds = st.integers(0, 2**32 - 1)


def star(random: np.random.Generator, centre, radius: float) -> np.ndarray:
    """A polygon with a few spikes around a point."""
    angles = np.sort(random.uniform(0, 2 * np.pi, 9))
    lengths = random.uniform(0.3, 1.0, 9) * radius
    return np.array(centre) + np.stack((np.cos(angles), np.sin(angles)), axis=1) * lengths[:, None]


def area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2 if len(polygon) else 0.0


def filled(polygon: np.ndarray, side: int = 100, fine: int = 8) -> np.ndarray:
    """(side, side) which pixels' centres a polygon holds, by OpenCV's test of one point after the other."""
    contour = (polygon * fine).astype(np.float32)
    points = ((np.mgrid[:side, :side] + 0.5) * fine).reshape(2, -1).T.tolist()
    return np.array([cv2.pointPolygonTest(contour, (x, y), False) > 0 for y, x in points]).reshape(side, side)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_clipping_keeps_what_is_inside(seed):
    random = np.random.default_rng(seed)
    polygon = star(random, random.uniform(20, 80, 2), 45)
    left, top = random.uniform(0, 50, 2)
    right, bottom = random.uniform(55, 100, 2)
    clipped = clipped_polygon(polygon, (left, top, right, bottom))
    inside = filled(polygon)
    y, x = np.mgrid[:100, :100] + 0.5
    inside &= (x > left) & (x < right) & (y > top) & (y < bottom)
    assert area(clipped) == pytest.approx(inside.sum(), abs=0.03 * inside.sum() + 25)
    if len(clipped):
        assert np.all(clipped >= (left - 1e-9, top - 1e-9))
        assert np.all(clipped <= (right + 1e-9, bottom + 1e-9))


def test_clipping_by_hand():
    square = np.array(((0.0, 0), (4, 0), (4, 4), (0, 4)))
    assert box_around(clipped_polygon(square, (1, 2, 9, 9))).tolist() == [1, 2, 4, 4]
    assert len(clipped_polygon(square, (5, 5, 9, 9))) == 0
    assert box_around(clipped_polygon(square, (5, 5, 9, 9))).tolist() == [0, 0, 0, 0]
    assert clipped_polygon(square, (-1, -1, 9, 9)) == pytest.approx(np.roll(square, -1, axis=0)) or np.array_equal(
        clipped_polygon(square, (-1, -1, 9, 9)), square
    )
    triangle = np.array(((0.0, 0), (4, 0), (0, 4)))
    assert area(clipped_polygon(triangle, (0, 0, 2, 2))) == pytest.approx(4)


def test_a_corner_behind_the_viewer_leaves_nothing():
    matrix = np.array(((1.0, 0, 0), (0, 1, 0), (-0.02, 0, 1)))
    polygon = np.array(((40.0, 10), (60, 10), (60, 20)))
    assert len(clipped_polygon(moved_polygon(polygon, matrix), (0, 0, 96, 96))) == 0


def shown(seed: int, height: int = 96, width: int = 80, white: bool = True) -> Example:
    """A white star on black with its box and polygon, and a box without a polygon."""
    random = np.random.default_rng(seed)
    polygon = star(random, random.uniform((25, 25), (width - 25, height - 25)), 24)
    image = np.zeros((height, width, 3), np.uint8)
    cv2.fillPoly(image, [np.rint((polygon - 0.5) * 256).astype(np.int32)], (255,) * 3, shift=8)
    boxes = np.stack((box_around(polygon), (1.0, 1, 6, 6)))
    return Example(image, boxes, np.array([3, 4]), (polygon, None))


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([Augmentation(), Augmentation(degrees=180, shear=10, perspective=0.0005)]))
def test_a_box_is_that_of_the_turned_polygon(seed, strengths):
    """Which a turned box is only around."""
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    found = random_perspective(Plane.of(shown(seed % 1000)), out, strengths, np.random.default_rng(seed))
    assume(3 in found.classes)
    box = found.boxes_xyxy[found.classes.tolist().index(3)]
    white = (out[..., 0] > 127) & (out[..., 0] != 114)
    rows, columns = np.nonzero(white)
    assume(len(rows))
    extent = np.array((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
    assert extent == pytest.approx(box, abs=3.5)  # the tips of spikes are thinner than a pixel
    assert np.all(extent[:2] >= box[:2] - 2.5)
    assert np.all(extent[2:] <= box[2:] + 2.5)


def test_polygons_move_with_their_tiles():
    tiles = [shown(seed) for seed in range(4)]
    plane = mosaic(tiles, SIZE, (90, 100))
    boxes_xyxy, classes, _ = boxes_of(plane)
    polygons = polygons_of(plane)
    assert sorted(polygons) == [0, 2, 4, 6]
    assert classes.tolist() == [3, 4] * 4
    for number, polygon in polygons.items():
        assert box_around(polygon) == pytest.approx(boxes_xyxy[number], abs=1e-6)


# --- copy-paste


def alone(seed: int) -> Plane:
    """A star in the left half of a plane, alone."""
    random = np.random.default_rng(seed)
    polygon = star(random, (35, 50), 25)
    image = random.integers(0, 256, (100, 140, 3), dtype=np.uint8)
    return Plane.of(Example(image, box_around(polygon)[None], np.array([5]), (polygon,)))


@pytest.mark.parametrize("seed", range(5))
def test_an_object_is_pasted_mirrored_along_its_polygon(seed):
    plane = alone(seed)
    before = plane.parts[0].example
    pixels = before.image.copy()
    pasted = copy_paste(plane, 1.0, np.random.default_rng(0))
    image, (boxes_xyxy, classes, _) = drawn(pasted), boxes_of(pasted)
    assert np.array_equal(before.image, pixels), "the image itself, which others are shown, too"
    assert classes.tolist() == [5, 5]
    left, top, right, bottom = before.boxes_xyxy[0]
    assert boxes_xyxy[1] == pytest.approx((140 - right, top, 140 - left, bottom))
    assert box_around(polygons_of(pasted)[1]) == pytest.approx(boxes_xyxy[1])
    changed = np.any(image != pixels, axis=2)
    mask = np.zeros((100, 140), bool)
    mask[:, 40:] = filled(polygons_of(pasted)[1] - (40, 0))
    assert (changed != mask).sum() <= 0.25 * mask.sum() + 20  # but for its outline
    assert np.array_equal(image[changed], pixels[:, ::-1][changed])


def test_nothing_is_pasted_onto_another_object_or_without_a_polygon():
    plane = alone(0)
    example = plane.parts[0].example
    left, top, right, bottom = example.boxes_xyxy[0]
    there = np.array((140 - right, top, 140 - left, bottom))
    taken = example._replace(boxes_xyxy=np.vstack((example.boxes_xyxy, there)), classes=np.array([5, 6]))
    for full in (taken._replace(polygons=(*example.polygons, None)), example._replace(polygons=())):
        plane = Plane.of(full)
        assert copy_paste(plane, 1.0, np.random.default_rng(0)) is plane
    assert copy_paste(alone(0), 0.0, np.random.default_rng(0)).parts[0].example.classes.tolist() == [5]


def test_each_object_is_pasted_with_its_probability():
    count = [len(boxes_of(copy_paste(alone(0), 0.3, np.random.default_rng(seed)))[1]) - 1 for seed in range(400)]
    assert np.mean(count) == pytest.approx(0.3, abs=0.07)


def test_copy_paste_in_training(tmp_path):
    """From label rows that are polygons to samples, in the epochs before it closes."""
    data = write_dataset(tmp_path, train=6, val=1)
    for file in (tmp_path / "labels" / "train").iterdir():
        file.write_text("0 .1 .1 .3 .1 .2 .3\n")
    index = build_index(load_description(data), "train", Reading(polygons=True))
    strengths = Augmentation(copy_paste=1.0, mosaic=0.0, scale=0.0, translate=0.0, fliplr=0.0)
    images = TrainingSet(index, 64, strengths, 0, epochs=2, close_mosaic=1)
    for i in range(6):
        assert images[0, i].boxes_xyxy == pytest.approx(np.array([[6.4, 6.4, 19.2, 19.2], [44.8, 6.4, 57.6, 19.2]]))
        assert len(images[1, i].classes) == 1
