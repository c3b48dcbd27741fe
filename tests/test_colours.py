"""Random colours, on the host and on the device: one rule, whatever is done at once."""

import colorsys

import numpy as np
import pytest
import torch
from scenes import write_dataset
from test_dataset import training_set

from detector.data import colours
from detector.data.augment import Augmentation
from detector.data.batch import collate, joined, recut_batches
from detector.data.colours import Colours, random_colours, recolour, recoloured
from detector.data.description import load_description
from detector.data.reading import build_index

CHANGES = [Colours(0.06, 1.5, 0.8), Colours(-0.1, 0.4, 1.4), Colours(0.015, 1.7, 1.39), Colours(0.0, 1.0, 1.0)]


def slowly(image, change):
    """(H, W, 3) float 0..255, pixel by pixel by the standard library."""
    out = []
    for red, green, blue in image.reshape(-1, 3) / 255:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        changed = (hue + change.hue) % 1, min(1, saturation * change.saturation), min(1, value * change.value)
        out.append(colorsys.hsv_to_rgb(*changed))
    return np.array(out).reshape(image.shape) * 255


@pytest.fixture(scope="module")
def image():
    """Random colours, and the corners of the cube: black, grey, white and pure colours among them."""
    image = np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image[:, :4] = np.random.default_rng(4).choice([0, 128, 255], (16, 4, 3))
    return image


def as_input(images):
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).double() / 255


@pytest.mark.parametrize("change", CHANGES)
def test_colours_equal_a_slow_formula(image, change):
    expected, out = slowly(image, change), image.copy()
    recolour(out, change)
    assert np.abs(out - expected).mean() < 2
    assert np.abs(out - expected).max() < 13  # hue in units of 2 degrees, saturation in 255
    exact = recoloured(as_input([image]), torch.tensor([change]))
    assert np.abs(exact[0].permute(1, 2, 0).numpy() * 255 - expected).max() < 1e-4


def test_the_strengths_are_the_largest_changes():
    strengths, many = Augmentation(hsv_h=0.1, hsv_s=0.7, hsv_v=0.4), np.random.default_rng(0)
    drawn = np.array([random_colours(strengths, many) for _ in range(2000)]) - (0, 1, 1)
    assert np.all(np.abs(drawn) <= (0.1, 0.7, 0.4))
    assert np.abs(drawn).max(axis=0) == pytest.approx((0.1, 0.7, 0.4), rel=0.01)
    assert drawn.mean(axis=0) == pytest.approx((0, 0, 0), abs=0.05)


def test_no_strengths_draw_nothing():
    random = np.random.default_rng(0)
    assert random_colours(Augmentation(hsv_h=0, hsv_s=0, hsv_v=0), random) is None
    assert random.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (640, 640), (103, 700)])
def test_colours_do_not_depend_on_the_rows_done_at_once(height, width, monkeypatch):
    image = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    whole, by_rows = image.copy(), image.copy()
    recolour(by_rows, CHANGES[0])
    monkeypatch.setattr(colours, "STRIP", 10**9)
    recolour(whole, CHANGES[0])
    assert np.array_equal(whole, by_rows)
    assert not np.array_equal(whole, image)


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_those_of_other_channels_are_their_brightness(channels):
    image = np.random.default_rng(3).integers(0, 256, (9, 7, channels), dtype=np.uint8)
    out = image.copy()
    recolour(out, CHANGES[1])
    assert abs(out - np.clip(image * 1.4, 0, 255)).max() <= 0.51
    exact = recoloured(as_input([image]), torch.tensor(CHANGES[1:2]))
    assert abs(exact[0].permute(1, 2, 0).numpy() * 255 - np.clip(image * 1.4, 0, 255)).max() < 1e-4


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return build_index(load_description(write_dataset(tmp_path_factory.mktemp("data"), train=7, val=1)), "train")


def test_colours_made_later_are_those_made_at_once(index):
    once, later = training_set(index), training_set(index, colours_later=True)
    positions = [(0, i) for i in range(7)]
    made, to_make = collate([once[one] for one in positions]), collate([later[one] for one in positions])
    assert torch.equal(made.boxes_xyxy, to_make.boxes_xyxy)
    assert made.colours.shape == (0, 3)
    assert to_make.colours.shape == (7, 3)
    assert len(to_make.colours.unique(dim=0)) == 7
    assert (made.images != to_make.images).float().mean() > 0.2
    apart = (made.network_input() - to_make.network_input()).abs()
    assert apart.mean() < 1.5 / 255
    assert to_make.network_input().is_contiguous(memory_format=torch.channels_last)


def test_colours_made_later_do_not_depend_on_the_cut(index):
    dataset = training_set(index, colours_later=True)
    whole = collate([dataset[0, i] for i in range(7)])
    expected = whole.network_input()
    parts = [whole.part(0, 3), whole.part(3, 7)]
    for cut in (parts, recut_batches(parts, [[0], [1, 2, 3, 4], [5, 6]]), [joined(parts)]):
        assert torch.equal(torch.cat([part.network_input() for part in cut]), expected)
    half = whole.network_input(torch.bfloat16)
    assert half.dtype == torch.bfloat16
