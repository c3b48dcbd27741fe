"""Augmentations: what is drawn lands where its box says, and the numbers are those of their formulas."""

import math

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from detector.data import augment
from detector.data.augment import Augmentation, Example
from detector.data.compose import Plane, boxes_of, drawn, random_perspective
from detector.data.mosaic import mosaic, mosaic_centre

STILL = Augmentation(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
SIZE = 64
seeds = st.integers(0, 2**32 - 1)


def marked(height: int, width: int, box_xyxy: tuple[int, int, int, int], label: int = 0) -> Example:
    """A grey image with one white rectangle, and its box."""
    image = np.full((height, width, 3), 114, dtype=np.uint8)
    left, top, right, bottom = box_xyxy
    image[top:bottom, left:right] = 255
    return Example(image, np.array([box_xyxy], dtype=np.float64), np.array([label]))


def extent(image: np.ndarray) -> np.ndarray:
    """The box around what is more white than grey."""
    rows, columns = np.nonzero(image[..., 0] > 184)
    return np.array((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))


@st.composite
def marked_examples(draw: st.DrawFn, height: int = SIZE, width: int = SIZE, label: int = 0) -> Example:
    left, top = draw(st.integers(0, width - 13)), draw(st.integers(0, height - 13))
    right, bottom = draw(st.integers(left + 12, width)), draw(st.integers(top + 12, height))
    return marked(height, width, (left, top, right, bottom), label)


def viewed(example: Example, size: int, strengths: Augmentation, seed: int) -> Example:
    """A random perspective of one image."""
    out = np.empty((size, size, 3), dtype=np.uint8)
    return random_perspective(Plane.of(example), out, strengths, np.random.default_rng(seed))


def axis_aligned(example: Example) -> np.ndarray:
    return example.boxes_xyxy[0]


@settings(max_examples=60, deadline=None)
@given(marked_examples(50, 64), seeds)
def test_shifted_and_scaled_mark_lands_where_its_box_says(example, seed):
    strengths = Augmentation(translate=0.3, scale=0.5)
    out = viewed(example, SIZE, strengths, seed)
    assume(len(out.classes))
    assert extent(out.image) == pytest.approx(axis_aligned(out), abs=1.01)


@settings(max_examples=100, deadline=None)
@given(marked_examples(50, 64), seeds)
def test_mark_fills_its_box_under_every_strength_at_once(example, seed):
    """Rotated and tilted, the mark still touches all four sides of its box where the box is not cut by the window."""
    strengths = Augmentation(degrees=180, translate=0.2, scale=0.4, shear=15, perspective=0.002)
    out = viewed(example, SIZE, strengths, seed)
    assume(len(out.classes))
    box = axis_aligned(out)
    assume(box.min() > 0 and box.max() < SIZE)
    assert extent(out.image) == pytest.approx(box, abs=2.5)  # half-white corners are sharp and fade


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_pixel_goes_where_the_matrix_sends_it(seed):
    random = np.random.default_rng(seed)
    strengths = Augmentation(degrees=180, translate=0.2, scale=0.4, shear=15, perspective=0.002)
    matrix, scale = augment.perspective_matrix(80, 120, SIZE, strengths, random)
    image = np.zeros((80, 120, 3), dtype=np.uint8)
    x, y = int(random.integers(30, 90)), int(random.integers(20, 60))
    image[y - 1 : y + 2, x - 1 : x + 2] = 255
    moved = matrix @ (x + 0.5, y + 0.5, 1)
    target = moved[:2] / moved[2]
    assume(target.min() > 5 and target.max() < SIZE - 5 and scale > 0.7)
    weights = augment.warp(image, matrix, SIZE)[..., 0].astype(float)
    grid = np.arange(SIZE) + 0.5
    near = (abs(grid[None] - target[0]) < 5) & (abs(grid[:, None] - target[1]) < 5)
    weights = np.where(near, weights, 0)
    centre = np.array(((weights * grid[None]).sum(), (weights * grid[:, None]).sum())) / weights.sum()
    assert centre == pytest.approx(target, abs=0.35)


def test_nothing_random_is_a_centred_crop_without_a_change():
    image = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    example = Example(image, np.array([[40.0, 40, 80, 90]]), np.array([3]))
    out = viewed(example, SIZE, STILL, 0)
    assert np.array_equal(out.image, image[32:96, 32:96])
    assert out.boxes_xyxy.tolist() == [[8, 8, 48, 58]]


def test_affine_and_perspective_warps_agree():
    image = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8), (9, 9), 3)
    strengths = Augmentation(degrees=30, translate=0.1, scale=0.4, shear=5)
    matrix, _ = augment.perspective_matrix(90, 90, SIZE, strengths, np.random.default_rng(1))
    flat = augment.warp(image, matrix, SIZE)
    matrix[2, 0] = 1e-12
    assert abs(flat.astype(int) - augment.warp(image, matrix, SIZE)).max() <= 3


def test_matrix_is_the_product_of_its_steps():
    random = np.random.default_rng(5)
    strengths = Augmentation(degrees=30, translate=0.2, scale=0.4, shear=10, perspective=0.001)
    matrix, scale = augment.perspective_matrix(80, 100, SIZE, strengths, random)
    again = np.random.default_rng(5)
    tilt, angle, expected_scale = again.uniform(-0.001, 0.001, 2), again.uniform(-30, 30), again.uniform(0.6, 1.4)
    shear, shift = again.uniform(-10, 10, 2), SIZE * again.uniform(0.3, 0.7, 2)
    rotation = np.eye(3)
    rotation[:2] = cv2.getRotationMatrix2D((0, 0), angle, expected_scale)
    shears = np.array(((1, math.tan(math.radians(shear[0])), 0), (math.tan(math.radians(shear[1])), 1, 0), (0, 0, 1)))
    x, y = 13.0, 57.0
    point = np.array((x - 50, y - 40, 1))
    point = np.array((point[0], point[1], 1 + tilt @ point[:2]))
    point = shears @ rotation @ point
    point = np.array((point[0] + shift[0] * point[2], point[1] + shift[1] * point[2], point[2]))
    assert matrix @ (x, y, 1) == pytest.approx(point)
    assert scale == expected_scale


def test_boxes_too_small_too_thin_or_mostly_outside_are_dropped():
    boxes = [
        [30, 10, 32, 30],  # sides must exceed 2
        [30, 10, 33, 30],
        [1, 10, 22.2, 30],  # 0.104 inside
        [1, 10, 22.05, 30],  # 0.097 inside
        [20, 20, 660, 26],
        [20, 20, 660, 26.5],
    ]
    example = Example(np.zeros((640, 680, 3), np.uint8), np.array(boxes, dtype=np.float64), np.arange(6))
    out = viewed(example, 640, STILL, 0)
    assert out.classes.tolist() == [1, 2, 5]
    assert out.boxes_xyxy[1] == pytest.approx([0, 10, 2.2, 30])


def test_a_corner_behind_the_viewer_drops_its_box():
    matrix = np.array(((1.0, 0, 0), (0, 1, 0), (-0.02, 0, 1)))
    boxes = augment.warped_boxes(np.array([[10.0, 10, 20, 20], [40, 10, 60, 20]]), matrix)
    assert boxes[0] == pytest.approx((12.5, 12.5, 20 / 0.6, 20 / 0.6))
    assert np.isnan(boxes[1]).any()


@settings(max_examples=60, deadline=None)
@given(st.data(), seeds)
def test_marks_land_where_their_boxes_say_through_a_mosaic(data, seed):
    sizes = [(64, 40), (50, 64), (64, 64), (30, 64)]
    tiles = [data.draw(marked_examples(*size, label=k)) for k, size in enumerate(sizes)]
    plane = mosaic(tiles, SIZE, mosaic_centre(SIZE, np.random.default_rng(seed)))
    image, (boxes_xyxy, classes, counts) = drawn(plane), boxes_of(plane)
    assert image.shape == (2 * SIZE, 2 * SIZE, 3)
    assert classes.tolist() == [0, 1, 2, 3]
    assert counts == [1, 1, 1, 1]
    covered = np.zeros(image.shape[:2], dtype=bool)
    for left, top, right, bottom in boxes_xyxy.astype(int):
        assert np.all(image[top:bottom, left:right] == 255)
        covered[top:bottom, left:right] = True
    assert np.all(image[~covered] == 114)


def test_mosaic_tiles_meet_at_the_centre():
    colours = (10, 60, 160, 210)
    tiles = [Example(np.full((64, 48, 3), c, np.uint8), np.zeros((0, 4)), np.zeros(0, np.int64)) for c in colours]
    canvas = drawn(mosaic(tiles, SIZE, (40, 90)))[..., 0]
    assert [canvas[89, 39], canvas[89, 40], canvas[90, 39], canvas[90, 40]] == list(colours)
    for colour, area in zip(colours, (40 * 64, 48 * 64, 40 * 38, 48 * 38), strict=True):
        assert (canvas == colour).sum() == area


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_mosaic_centre_lies_in_the_middle_half(seed):
    x, y = mosaic_centre(SIZE, np.random.default_rng(seed))
    assert SIZE // 2 <= x < 3 * SIZE // 2
    assert SIZE // 2 <= y < 3 * SIZE // 2


@pytest.mark.parametrize(("flipud", "fliplr"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_flipped_mark_lands_where_its_box_says(flipud, fliplr):
    example = marked(48, 64, (5, 9, 20, 17))
    strengths = Augmentation(flipud=flipud, fliplr=fliplr)
    before = example.image.copy()
    out = augment.random_flips(example, strengths, np.random.default_rng(0))
    assert np.array_equal(out.image, before[:: -1 if flipud else 1, :: -1 if fliplr else 1])
    assert extent(out.image).tolist() == axis_aligned(out).tolist()


def test_mixup_blends_and_joins():
    first, second = marked(SIZE, SIZE, (1, 2, 20, 30), 0), marked(SIZE, SIZE, (40, 30, 60, 50), 1)
    ratio = np.random.default_rng(4).beta(32, 32)
    expected = ratio * first.image + (1 - ratio) * second.image
    out = augment.mixup(first, second, np.random.default_rng(4))
    assert abs(out.image - expected).max() <= 0.51
    assert out.classes.tolist() == [0, 1]
    assert out.boxes_xyxy.tolist() == [[1, 2, 20, 30], [40, 30, 60, 50]]


@settings(max_examples=150, deadline=None)
@given(marked_examples(), marked_examples(label=1), seeds)
def test_cutmix_covers_no_box_and_keeps_what_is_pasted(example, partner, seed):
    example.image[example.image == 114] = 30
    before = example.image.copy()
    out = augment.cutmix(example, partner, np.random.default_rng(seed))
    left, top, right, bottom = example.boxes_xyxy[0].astype(int)
    assert np.all(out.image[top:bottom, left:right] == 255)
    assert out.boxes_xyxy[0].tolist() == example.boxes_xyxy[0].tolist()
    changed = np.any(out.image != before, axis=2)
    if not changed.any():
        assert len(out.classes) == 1
        return
    rows, columns = np.nonzero(changed)
    window = slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1)
    assert np.array_equal(out.image[window], partner.image[window])
    white = partner.image[window][..., 0] == 255
    whole = (partner.image[..., 0] == 255).sum()
    assert len(out.classes) == 1 + (white.sum() >= 0.1 * whole)
    if len(out.classes) == 2:
        left, top, right, bottom = out.boxes_xyxy[1].astype(int)
        assert (right - left) * (bottom - top) == white.sum()
        assert np.all(out.image[top:bottom, left:right] == 255)


def test_cutmix_gives_up_when_every_rectangle_would_cover_a_box():
    example = marked(SIZE, SIZE, (0, 0, SIZE, SIZE))
    out = augment.cutmix(example, marked(SIZE, SIZE, (1, 2, 20, 30), 1), np.random.default_rng(0))
    assert out is example
