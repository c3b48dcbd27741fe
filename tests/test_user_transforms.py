"""Transforms that the user lists: seeded by the sample, and mistakes told with their remedy."""

import pickle
import sys

import numpy as np
import pytest
from scenes import write_dataset

from detector.data.augment import Augmentation, Example
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.loader import TrainingLoader
from detector.data.reading import build_index
from detector.data.user_transforms import UserTransforms
from detector.errors import ConfigError, DataError

PLAIN = Augmentation(**dict.fromkeys(Augmentation.__dataclass_fields__, 0.0))
CHANGING = [{"HorizontalFlip": {"p": 0.5}}, {"GaussNoise": {"p": 1.0}}, "RandomBrightnessContrast"]


@pytest.fixture
def package():
    pytest.importorskip("albumentations")


def example() -> Example:
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Example(image, np.array([[3.0, 5, 20, 30], [40, 1, 64, 48]]), np.array([2, 7]))


def test_a_missing_package_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(ConfigError, match=r"pip install 'detector\[albumentations\]'"):
        UserTransforms(["HorizontalFlip"])


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (["HorizontalFlipp"], "'HorizontalFlipp' is not a transform"),
        (["Compose"], "'Compose' is not a transform"),
        ([{"HorizontalFlip": {"q": 0.5}}], "HorizontalFlip: .*'q'"),
        ([{"HorizontalFlip": {"p": 7}}], "HorizontalFlip: "),
        ([{"HorizontalFlip": None, "VerticalFlip": None}], "is not one transform"),
    ],
)
def test_a_wrong_entry_is_told(package, listed, message):
    with pytest.raises(ConfigError, match=message):
        UserTransforms(listed)


def test_boxes_follow_the_image(package):
    before = example()
    after = UserTransforms([{"HorizontalFlip": {"p": 1.0}}])(before, np.random.default_rng(0))
    assert np.array_equal(after.image, before.image[:, ::-1])
    assert after.boxes_xyxy == pytest.approx(np.array([[44.0, 5, 61, 30], [0, 1, 24, 48]]), abs=1e-3)
    assert after.classes.tolist() == [2, 7]
    none = before._replace(boxes_xyxy=np.zeros((0, 4)), classes=np.zeros(0, np.int64))
    after = UserTransforms([{"HorizontalFlip": {"p": 1.0}}])(none, np.random.default_rng(0))
    assert after.boxes_xyxy.shape == (0, 4)
    assert after.classes.dtype == np.int64


def test_what_changes_the_size_is_told(package):
    with pytest.raises(DataError, match="take out what changes the size"):
        UserTransforms([{"Resize": {"height": 10, "width": 10}}])(example(), np.random.default_rng(0))


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_the_generator_alone_decides(package, channels):
    transforms = UserTransforms(CHANGING[:2])
    before = example()._replace(image=np.random.default_rng(0).integers(0, 256, (48, 64, channels), dtype=np.uint8))
    found = {seed: transforms(before, np.random.default_rng(seed)).image for seed in range(6)}
    again = pickle.loads(pickle.dumps(transforms))
    np.random.seed(1)
    for seed in reversed(found):
        assert np.array_equal(again(before, np.random.default_rng(seed)).image, found[seed])
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_do_not_depend_on_who_makes_them(package, tmp_path, workers):
    index = build_index(load_description(write_dataset(tmp_path, train=6, val=1)), "train")

    def images():
        return TrainingSet(index, 64, PLAIN, 0, 5, 0, transforms=UserTransforms(CHANGING))

    alone = [images()[1, i] for i in range(6)]
    loader = TrainingLoader(images(), workers, False)
    batches = list(loader.batches([(1, [5, 2]), (1, [0]), (1, [4, 3, 1])]))
    loader.close()
    for batch in batches:
        for row, i in enumerate(batch.samples.tolist()):
            assert np.array_equal(batch.images[row].numpy(), alone[i].image)
            assert np.array_equal(batch.boxes_xyxy[batch.image_index == row].numpy(), alone[i].boxes_xyxy)
    plain = TrainingSet(index, 64, PLAIN, 0, 5, 0)
    assert not np.array_equal(plain[1, 0].image, alone[0].image)
