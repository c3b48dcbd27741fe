"""The public trainer's validation input, against its rule in words and against shapes that it was seen to make."""

import math
from fractions import Fraction

import cv2
import numpy as np
import pytest
from scenes import write_dataset

from detector.data.dataset import ValidationSet
from detector.data.description import load_description
from detector.data.image import read_image
from detector.data.loader import validation_batches
from detector.data.public_letterbox import batch_shapes, public_letterbox, resized
from detector.data.reading import build_index

SIZES = [(37, 53), (480, 640), (1080, 1920), (500, 500), (640, 427), (300, 1000), (1000, 300), (333, 500), (224, 224)]


def shapes_in_words(sizes, imgsz, batch, stride=32):
    """The rule, image by image, with exact numbers."""
    order = sorted(range(len(sizes)), key=lambda i: Fraction(*sizes[i]))
    out = {}
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        low, high = (Fraction(*sizes[i]) for i in (group[0], group[-1]))
        height, width = (high, 1) if high < 1 else (1, 1 / low) if low > 1 else (1, 1)
        for i in group:
            out[i] = tuple(
                math.ceil(Fraction(side) * imgsz / stride + Fraction(1, 2)) * stride for side in (height, width)
            )
    return [out[i] for i in range(len(sizes))]


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("imgsz", [320, 416, 640])
def test_shapes_are_those_of_the_batch(imgsz, batch):
    heights, widths = np.array(SIZES).T
    assert [tuple(one) for one in batch_shapes(heights, widths, imgsz, batch)] == shapes_in_words(SIZES, imgsz, batch)


def test_a_square_image_gets_half_a_stride_on_every_side():
    assert batch_shapes(np.array([640]), np.array([640]), 640, 16).tolist() == [[672, 672]]
    image = np.full((640, 640, 3), 7, np.uint8)
    out, placed = public_letterbox(image, 640, (672, 672))
    assert (placed.left, placed.top) == (16, 16)
    assert (out[16:656, 16:656] == 7).all()
    assert (out == 7).sum() == 640 * 640 * 3


@pytest.mark.parametrize(
    ("size", "expected"), [((37, 53), (224, 320)), ((480, 640), (240, 320)), ((333, 500), (214, 320))]
)
def test_sides_are_rounded_up(size, expected):
    assert resized(*size, 320) == expected


def test_an_odd_pixel_goes_right_and_bottom_and_enlarging_is_bilinear():
    image = np.random.default_rng(0).integers(0, 255, (37, 53, 3), dtype=np.uint8)
    out, placed = public_letterbox(image, 320, (257, 352))
    assert (placed.left, placed.top) == (16, 16)  # 33 pixels of height to share: 16 above, 17 below
    expected = cv2.resize(image, (320, 224), interpolation=cv2.INTER_LINEAR)
    assert np.array_equal(out[16:240, 16:336], expected)
    assert (placed.ratio_x, placed.ratio_y) == (320 / 53, 224 / 37)
    assert (out[240:] == 114).all()


def test_a_validation_set_takes_the_public_shapes(tmp_path):
    data = write_dataset(tmp_path, train=2, val=7)
    index = build_index(load_description(data), "val")
    images = ValidationSet(index, 96, public_batch=4)
    expected = shapes_in_words([index.size(i) for i in range(7)], 96, 4)
    assert [images.shape(i) for i in range(7)] == expected
    for i in range(7):
        array, placed, _ = images[i]
        theirs, theirs_placed = public_letterbox(read_image(index.path(i)), 96, expected[i])
        assert np.array_equal(array, theirs)
        assert placed == theirs_placed
    seen = [i for _, _, indices in validation_batches(images, 3, 0) for i in indices]
    assert sorted(seen) == list(range(7))
