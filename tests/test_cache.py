"""How seldom an image is decoded, and that what is kept of it, anywhere, is the image."""

import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from scenes import write_dataset

from detector.data import cache as cache_module
from detector.data import disk_cache, neighbours
from detector.data.augment import Augmentation
from detector.data.cache import GIB, ImageCache
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.image import (
    DamagedImageError,
    decode_fitted,
    fit_long_side,
    fitted_size,
    fitted_sizes,
    read_image,
)
from detector.data.index import Index
from detector.data.loader import TrainingLoader
from detector.data.neighbours import Neighbours
from detector.data.reading import build_index
from detector.data.ring import Ring
from detector.data.shard_writing import write_shards
from detector.rng import epoch_order

IMAGES, IMGSZ = 60, 32


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=IMAGES, val=1, size=40)


@pytest.fixture
def index(data):
    return build_index(load_description(data), "train")


@pytest.fixture
def decoded(monkeypatch):
    """Counts decoded images, in forked workers too."""
    count, real = multiprocessing.get_context("fork").Value("i", 0), Index.fitted

    def counted(*arguments):
        with count.get_lock():
            count.value += 1
        return real(*arguments)

    monkeypatch.setattr(Index, "fitted", counted)
    return count


def fitted(path, imgsz: int, size: tuple[int, int]) -> np.ndarray:
    return decode_fitted(path.read_bytes(), str(path), imgsz, size)


def plain(index, i: int) -> np.ndarray:
    return fit_long_side(read_image(index.path(i)), IMGSZ)


# --- partners


def test_partners_are_the_samples_before_in_the_order(monkeypatch):
    monkeypatch.setattr(neighbours, "NEAR", 8)
    near, order = Neighbours(30, seed=3), epoch_order(30, 3, 2).tolist()
    for at, sample in enumerate(order):
        place = near.place(2, sample)
        found = [near.partner(place, number) for number in range(8)]
        first = max(at - 7, 0)
        assert [one for _, one in found] == order[first : first + 8]
        assert [place for place, _ in found] == [near.place(2, one) for _, one in found]
        assert near.place(2, sample) == 60 + at
        near.place(1, 0)  # another epoch asked for in between


def test_a_set_smaller_than_the_neighbourhood_is_one_neighbourhood():
    near = Neighbours(5, seed=0)
    assert near.near == 5
    assert {near.partner(near.place(0, 2), number)[1] for number in range(5)} == set(range(5))


def test_each_image_is_a_partner_as_often_as_any_other(monkeypatch):
    monkeypatch.setattr(neighbours, "NEAR", 4)
    near, random, shown = Neighbours(12, seed=0), np.random.default_rng(0), np.zeros(12)
    for epoch in range(400):
        for sample in range(12):
            shown[near.partner(near.place(epoch, sample), int(random.integers(4)))[1]] += 1
    assert shown / shown.mean() == pytest.approx(np.ones(12), abs=0.15)


# --- decoding once


@pytest.mark.parametrize("workers", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 3))])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_an_image_is_decoded_about_once_an_epoch(index, decoded, monkeypatch, workers, batch):
    """Although it is in four samples."""
    monkeypatch.setattr(neighbours, "NEAR", 16)
    monkeypatch.setattr(cache_module, "NEAR", 16)
    images = TrainingSet(index, IMGSZ, Augmentation(), 0, 9, 0, "off", processes=workers)
    loader = TrainingLoader(images, workers, False, "fork")
    for epoch in range(2):
        order = epoch_order(IMAGES, 0, epoch).tolist()
        for _ in loader.batches([(epoch, order[start : start + batch]) for start in range(0, IMAGES, batch)]):
            pass
    loader.close()
    assert 2 * IMAGES <= decoded.value <= (2 if workers == 0 else 2.6) * IMAGES


def test_what_is_recent_is_bounded(index):
    images = ImageCache(index, IMGSZ, "off")
    for i in range(IMAGES):
        images[i]
    assert len(images._recent) <= images._most_recent
    assert images.kept() == 0


# --- the ring


def test_ring_gives_back_what_was_put_last_and_nothing_else():
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, (5, 7, 3), dtype=np.uint8) for _ in range(6)]
    ring = Ring(4, 5 * 7 * 3)
    assert ring.get(0, 0, (5, 7, 3)) is None
    for place, one in enumerate(pixels):
        ring.put(place, place, one)
    assert [one for one in range(6) if ring.get(one, one, (5, 7, 3)) is not None] == [2, 3, 4, 5]
    assert np.array_equal(ring.get(5, 5, (5, 7, 3)), pixels[5])
    assert ring.get(5, 1, (5, 7, 3)) is None  # another image at that place


@pytest.mark.parametrize("byte", [0, 50, 104])
def test_ring_does_not_give_what_another_is_writing(byte):
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    ring = Ring(2, pixels.size)
    ring.put(1, 9, pixels)
    assert ring.get(1, 9, pixels.shape) is not None
    ring._pixels.array(start=ring._stride, count=pixels.size)[byte] += 1
    assert ring.get(1, 9, pixels.shape) is None


# --- memory and disk


@pytest.mark.parametrize("mode", ["ram", "disk", "off", "auto"])
def test_every_way_of_keeping_gives_the_image(index, tmp_path, mode):
    images = ImageCache(index, IMGSZ, mode, folder=tmp_path)
    for _ in range(2):
        for i in (3, 59, 0):
            assert np.array_equal(images[i], plain(index, i))
            with pytest.raises(ValueError, match="read-only"):
                images[i][0] = 0
    assert images.kept() == (0 if mode == "off" else 3)


@pytest.mark.parametrize("mode", ["ram", "disk"])
def test_of_more_than_the_budget_the_first_are_kept(index, tmp_path, decoded, mode):
    one = 3 * IMGSZ * IMGSZ
    images = ImageCache(index, IMGSZ, mode, budget=7 * one + one // 2, folder=tmp_path)
    assert images.count == 7
    assert "7 of 60 images" in images.told()
    for _ in range(2):
        for i in range(IMAGES):
            assert np.array_equal(images[i], plain(index, i))
    assert images.kept() == 7
    assert decoded.value >= IMAGES


def test_memory_that_is_short_keeps_a_part(index, monkeypatch):
    monkeypatch.setattr(cache_module, "available_memory", lambda: 10 * 3 * IMGSZ * IMGSZ)
    assert ImageCache(index, IMGSZ, "ram").count == 8
    assert ImageCache(index, IMGSZ, "ram", budget=GIB).count == 8
    assert ImageCache(index, IMGSZ, "auto").count == 0


def test_a_later_run_takes_up_the_file(index, tmp_path, decoded):
    first = ImageCache(index, IMGSZ, "disk", folder=tmp_path / "new")
    for i in range(IMAGES):
        first[i]
    again = pickle.loads(pickle.dumps(ImageCache(index, IMGSZ, "disk", folder=tmp_path / "new")))
    for i in range(IMAGES):
        assert np.array_equal(again[i], first[i])
    assert decoded.value == IMAGES
    assert len(list((tmp_path / "new").iterdir())) == 1
    assert again.told().endswith(f"GiB in {again._kept.path}")


def test_an_image_that_changed_gets_another_file(data, tmp_path):
    copy = Path(shutil.copytree(data.parent, tmp_path / "data"))
    index = build_index(load_description(copy / "data.yaml"), "train")
    assert ImageCache(index, IMGSZ, "disk", folder=tmp_path)[4].any()
    cv2.imwrite(str(index.path(4)), np.full((40, 40, 3), 7, np.uint8))
    os.utime(index.path(4), (1, 1))
    assert np.all(ImageCache(index, IMGSZ, "disk", folder=tmp_path)[4] == 7)
    assert len(list(tmp_path.glob("*.pixels"))) == 2
    assert (
        "; 1 more there, for other images or sizes, 0.00 GiB"
        in ImageCache(index, IMGSZ, "disk", folder=tmp_path).told()
    )


def test_a_file_of_some_images_is_taken_up_though_less_is_free_than_before(index, tmp_path, monkeypatch):
    image_bytes = 8 + 3 * IMGSZ * IMGSZ
    monkeypatch.setattr(disk_cache, "free_space", lambda folder: 10 * image_bytes)
    assert ImageCache(index, IMGSZ, "disk", folder=tmp_path).count == 8
    monkeypatch.setattr(disk_cache, "free_space", lambda folder: 2 * image_bytes)  # the file takes the rest
    assert ImageCache(index, IMGSZ, "disk", folder=tmp_path).count == 8
    assert ImageCache(index, IMGSZ, "disk", 12 * image_bytes, tmp_path).count == 12  # the user's word
    assert ImageCache(index, IMGSZ, "disk", 3 * image_bytes, tmp_path).count == 3
    assert ImageCache(index, IMGSZ, "disk", 0, tmp_path).count == 0
    assert ImageCache(index, IMGSZ, "disk", folder=tmp_path).count == 12
    assert len(list(tmp_path.iterdir())) == 3


def test_images_of_shards_are_kept_on_disk_too(index, tmp_path):
    pattern = write_shards(index, tmp_path / "shards", 25)
    (tmp_path / "shards" / "data.yaml").write_text(f"train: {pattern}\nval: none\nnames: [square, disc]")
    index = build_index(load_description(tmp_path / "shards" / "data.yaml"), "train")
    images = ImageCache(index, IMGSZ, "disk", folder=tmp_path)
    assert images.count == len(index)
    path = images._kept.path
    assert ImageCache(index, IMGSZ, "disk", folder=tmp_path)._kept.path == path
    for file in (tmp_path / "shards").rglob("*.tar"):
        os.utime(file, (1, 1))
    assert ImageCache(index, IMGSZ, "disk", folder=tmp_path)._kept.path != path


@pytest.mark.parametrize("damage", ["pixels", "shorter"])
def test_a_damaged_file_is_written_anew(index, tmp_path, damage):
    path = ImageCache(index, IMGSZ, "disk", folder=tmp_path)._kept.path
    first = ImageCache(index, IMGSZ, "disk", folder=tmp_path)
    assert np.array_equal(first[2], plain(index, 2))
    if damage == "pixels":
        with path.open("r+b") as file:
            file.seek(8 * IMAGES + 2 * 3 * IMGSZ * IMGSZ + 100)
            file.write(bytes(50))
    else:
        path.write_bytes(path.read_bytes()[:1000])
    assert np.array_equal(ImageCache(index, IMGSZ, "disk", folder=tmp_path)[2], plain(index, 2))


def test_a_folder_that_cannot_be_written_to_is_said_and_nothing_kept(index, tmp_path):
    (tmp_path / "file").write_text("no folder")
    images = ImageCache(index, IMGSZ, "disk", folder=tmp_path / "file")
    assert images.count == 0
    assert f"{tmp_path / 'file'}" in images.told()
    assert "cache_dir" in images.told()
    assert np.array_equal(images[3], plain(index, 3))


def test_a_full_disk_is_said_and_leaves_no_file(index, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.os, "posix_fallocate", full)
    images = ImageCache(index, IMGSZ, "disk", folder=tmp_path)
    assert "No space left on device" in images.told()
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(images[3], plain(index, 3))


# --- reduced decoding


def photograph(path: Path, height: int, width: int, **options) -> np.ndarray:
    random = np.random.default_rng(height)
    image = cv2.GaussianBlur(
        random.integers(0, 256, (height, width, 3), dtype=np.uint8), (0, 0), max(height, width) / 150
    )
    image = cv2.normalize(image, None, 0, 255, cv2.NORM_MINMAX)
    Image.fromarray(image).save(path, quality=92, **options)
    return image


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [
        ("a.png", 480, 640),
        *(("a.jpg", *size) for size in [(480, 640), (639, 481), (322, 1000), (1281, 800), (1600, 1200), (2600, 1900)]),
    ],
)
def test_reduced_decoding_gives_the_resized_image(tmp_path, name, height, width):
    photograph(tmp_path / name, height, width)
    expected = fit_long_side(read_image(tmp_path / name), 320)
    found = fitted(tmp_path / name, 320, (height, width))
    assert found.shape == expected.shape
    assert found.flags.c_contiguous
    if name == "a.png":
        assert np.array_equal(found, expected)
    assert abs(found.astype(int) - expected).mean() < 1.5


@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_decoding_turns_as_the_orientation_says(tmp_path, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    photograph(tmp_path / "a.jpg", 640, 480, exif=exif)
    whole = read_image(tmp_path / "a.jpg")
    found = fitted(tmp_path / "a.jpg", 160, whole.shape[:2])
    assert abs(found.astype(int) - fit_long_side(whole, 160)).mean() < 1.5


def test_reduced_decoding_finds_damage_and_names_it(tmp_path):
    path = tmp_path / "a.jpg"
    photograph(path, 640, 480)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:-2], b"", b"\xff\xd8 no image"):
        path.write_bytes(damaged)
        with pytest.raises(DamagedImageError, match="cannot be decoded"):
            fitted(path, 160, (640, 480))
    path.write_bytes(content)
    with pytest.raises(DamagedImageError, match="and was 640 x 480"):
        fitted(path, 160, (480, 640))


def test_sizes_of_many_images_are_those_of_each():
    sides = np.random.default_rng(0).integers(1, 9000, (2, 5000)).astype(np.int32)
    sides[:, :3] = ((1, 9000, 3), (9000, 1, 6))  # a line; halves are rounded alike
    for imgsz in (32, 321, 640):
        each = [fitted_size(height, width, imgsz) for height, width in sides.T.tolist()]
        assert fitted_sizes(*sides, imgsz).tolist() == [list(size) for size in each]
