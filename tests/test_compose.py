"""Views of images and mosaics: against the whole plane drawn and warped, which is slower and shares no code with it."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector.data.augment import Augmentation, Example, perspective_matrix
from detector.data.compose import Plane, random_perspective
from detector.data.mosaic import mosaic, mosaic_centre

SIZE = 96
DEFAULT = Augmentation()
TURNED = Augmentation(degrees=20, shear=5, perspective=0.0005)
seeds = st.integers(0, 2**32 - 1)


def smooth(height: int, width: int, seed: int, channels: int = 3) -> Example:
    """Colours that change slowly, so that half a pixel changes them little, and random boxes."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 40 + random.uniform(0, 6)) + np.cos(y / 35 + random.uniform(0, 6)) for _ in range(channels)]
    image = np.clip(np.stack(waves, axis=2) * 50 + 128, 0, 255).astype(np.uint8)
    low = random.uniform(0, (width - 13, height - 13), (6, 2))
    high = np.minimum(low + random.uniform(8, 60, (6, 2)), (width, height))
    return Example(image, np.concatenate((low, high), axis=1), random.integers(0, 9, 6))


def slow_view(tiles, strengths: Augmentation, random: np.random.Generator):
    """The same view of one image, or of a mosaic of four, by a canvas and a warp: image, boxes and classes."""
    if len(tiles) == 1:
        canvas, boxes, classes, _ = tiles[0]
    else:
        x, y = mosaic_centre(SIZE, random)
        canvas = np.full((2 * SIZE, 2 * SIZE, tiles[0].image.shape[2]), 114, np.uint8)
        boxes, classes = [], []
        for number, (image, boxes_xyxy, labels, _) in enumerate(tiles):
            height, width = image.shape[:2]
            left, top = (x, x - width)[number % 2 == 0], (y, y - height)[number < 2]
            padded = np.full((5 * SIZE, 5 * SIZE, image.shape[2]), 0, np.uint8)
            covered = np.zeros((5 * SIZE, 5 * SIZE), bool)
            place = slice(top + SIZE, top + SIZE + height), slice(left + SIZE, left + SIZE + width)
            padded[place], covered[place] = image, True
            inner = slice(SIZE, 3 * SIZE), slice(SIZE, 3 * SIZE)
            canvas[covered[inner]] = padded[inner][covered[inner]]
            boxes.append(np.clip(boxes_xyxy + np.array((left, top, left, top)), 0, 2 * SIZE))
            classes.append(labels)
        boxes, classes = np.concatenate(boxes), np.concatenate(classes)
    matrix, scale = perspective_matrix(*canvas.shape[:2], SIZE, strengths, random)
    half = np.array(((1, 0, 0.5), (0, 1, 0.5), (0, 0, 1)))
    shifted = np.linalg.inv(half) @ matrix @ half
    warped = cv2.warpPerspective(canvas, shifted, (SIZE, SIZE), borderValue=(114,) * 4)
    moved, kept = [], []
    for (x1, y1, x2, y2), label in zip(boxes, classes, strict=True):
        corners = [matrix @ (x, y, 1) for x in (x1, x2) for y in (y1, y2)]
        points = np.array([corner[:2] / corner[2] for corner in corners])
        box = np.clip(np.concatenate((points.min(axis=0), points.max(axis=0))), 0, SIZE)
        width, height = box[2:] - box[:2]
        if min(width, height) > 2 and width * height > 0.1 * scale**2 * (x2 - x1) * (y2 - y1):
            moved.append(box)
            kept.append(label)
    return warped, np.array(moved).reshape(-1, 4), np.array(kept)


def view(tiles, strengths: Augmentation, random: np.random.Generator) -> Example:
    plane = Plane.of(tiles[0]) if len(tiles) == 1 else mosaic(tiles, SIZE, mosaic_centre(SIZE, random))
    out = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, tiles[0].image.shape[2]), dtype=np.uint8)
    return random_perspective(plane, out, strengths, random)


def tiles_of(count: int, seed: int, channels: int = 3) -> list[Example]:
    shapes = [(96, 72), (60, 96), (96, 96), (33, 96)]
    return [smooth(*shapes[(k + seed) % 4], seed + k, channels) for k in range(count)]


@settings(max_examples=80, deadline=None)
@given(seeds, st.sampled_from([1, 4]), st.sampled_from([DEFAULT, TURNED]))
def test_a_view_is_the_warped_canvas(seed, count, strengths):
    tiles = tiles_of(count, seed % 1000)
    found = view(tiles, strengths, np.random.default_rng(seed))
    image, _, _ = slow_view(tiles, strengths, np.random.default_rng(seed))
    apart = abs(found.image.astype(int) - image).max(axis=2)
    # Where images end, the warp's line of half-tones lies at another half of a pixel.
    assert np.mean(apart > 8) < 0.05
    assert np.median(apart) <= 3


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("strengths", [DEFAULT, TURNED, Augmentation(scale=0.9, translate=0.4)])
def test_boxes_are_those_of_the_warped_canvas_to_half_a_pixel(count, strengths):
    """Their sizes, places and numbers, over many samples; to one pixel where scale makes two of one of the image's."""
    numbers, errors = [], []
    for seed in range(150):
        tiles = tiles_of(count, seed)
        found = view(tiles, strengths, np.random.default_rng(seed))
        _, boxes, classes = slow_view(tiles, strengths, np.random.default_rng(seed))
        numbers.append((len(found.classes), len(classes)))
        if found.classes.tolist() == classes.tolist():
            errors.extend(np.ravel(found.boxes_xyxy - boxes))
    numbers = np.array(numbers)
    assert np.mean(numbers[:, 0] == numbers[:, 1]) > 0.9  # those at a limit may fall on either side
    assert abs(numbers[:, 0].sum() / numbers[:, 1].sum() - 1) < 0.01
    assert np.abs(errors).max() <= 1.05
    assert np.abs(errors).mean() < 0.3
    assert abs(np.mean(errors)) < 0.05  # neither to the left nor to the right


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_tiles_leave_no_gap_where_they_meet(seed):
    """A white mosaic that the window lies inside of is white everywhere."""
    white = Example(np.full((SIZE, SIZE, 3), 255, np.uint8), np.zeros((0, 4)), np.zeros(0, np.int64))
    strengths = Augmentation(scale=0.3, translate=0.0)
    found = view([white] * 4, strengths, np.random.default_rng(seed)).image[..., 0]
    grey = found != 255
    rows, columns = np.nonzero(~grey)
    inner = grey[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert not inner.any()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("strengths", [DEFAULT, TURNED])
def test_any_number_of_channels(channels, strengths):
    """Each channel is what it would be alone."""
    tiles = tiles_of(4, 5, channels)
    found = view(tiles, strengths, np.random.default_rng(1)).image
    assert found.shape == (SIZE, SIZE, channels)
    for channel in range(channels):
        alone = [tile._replace(image=np.ascontiguousarray(tile.image[..., channel : channel + 1])) for tile in tiles]
        one = view(alone, strengths, np.random.default_rng(1)).image[..., 0]
        assert abs(one - found[..., channel].astype(int)).max() <= 3  # OpenCV has several ways to compute one pixel
