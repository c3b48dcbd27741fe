"""Samples, batches and loaders: what a sample looks like depends on (seed, epoch, i) and on nothing else."""

import dataclasses
import multiprocessing
import pickle
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from detector.data.augment import Augmentation
from detector.data.batch import Batch, Sample, blank_batch, collate, joined, recut_batches
from detector.data.cache import ImageCache
from detector.data.dataset import TrainingSet, ValidationSet
from detector.data.description import load_description
from detector.data.image import read_image
from detector.data.index import Index
from detector.data.loader import TrainingLoader, validation_batches
from detector.data.reading import build_index
from detector.errors import DataError
from detector.inference.postprocess import Detections, to_original

EVERYTHING = Augmentation(degrees=10, shear=3, perspective=0.0005, flipud=0.3, mosaic=0.7, mixup=0.4, cutmix=0.4)
IMGSZ = 64


def make_index(root: Path, count: int = 9) -> Index:
    random = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (root / folder).mkdir()
    for number in range(count):
        height, width = (48, 80) if number % 3 else (90, 60)
        image = cv2.GaussianBlur(random.integers(0, 256, (height, width, 3), dtype=np.uint8), (7, 7), 2)
        cv2.imwrite(str(root / "images" / f"{number}.png"), image)
        rows = [f"{random.integers(2)} {x:.4f} {y:.4f} .3 .25" for x, y in random.uniform(0.2, 0.8, (number % 4, 2))]
        (root / "labels" / f"{number}.txt").write_text("\n".join(rows))
    (root / "data.yaml").write_text("train: images\nval: images\nnames: [a, b]\n")
    return build_index(load_description(root / "data.yaml"), "train")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return make_index(tmp_path)


def training_set(index: Index, **changes) -> TrainingSet:
    settings = {"augmentation": EVERYTHING, "seed": 0, "epochs": 5, "close_mosaic": 2, "cache": "ram"} | changes
    return TrainingSet(index, IMGSZ, **settings)


def same(first: tuple, second: tuple) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_sample_depends_on_seed_epoch_and_index_alone(index):
    once, again = training_set(index), training_set(index)
    positions = [(epoch, i) for epoch in range(5) for i in range(len(index))]
    samples = {position: once[position] for position in positions}
    np.random.seed(1)
    torch.manual_seed(1)
    for position in reversed(positions):
        assert same(samples[position], again[position])
    assert not np.array_equal(samples[0, 0].image, samples[1, 0].image)
    assert not np.array_equal(samples[0, 0].image, training_set(index, seed=1)[0, 0].image)


def test_sample_is_what_training_expects(index):
    for i in range(len(index)):
        for epoch in (0, 4):
            sample = training_set(index)[epoch, i]
            assert sample.image.shape == (IMGSZ, IMGSZ, 3)
            assert sample.image.dtype == np.uint8
            assert sample.boxes_xyxy.dtype == np.float32
            assert sample.boxes_xyxy.shape == (len(sample.classes), 4)
            assert sample.classes.dtype == np.int64
            assert sample.index == i
            assert np.all((sample.boxes_xyxy >= 0) & (sample.boxes_xyxy <= IMGSZ))


@pytest.mark.parametrize("other", ["off", "auto"])
def test_cache_changes_nothing(index, other):
    kept, loaded = training_set(index, cache="ram"), training_set(index, cache=other)
    for position in [(0, 3), (1, 3), (4, 3), (4, 0)]:
        assert same(kept[position], loaded[position])
        assert same(kept[position], loaded[position])


def test_cache_decodes_an_image_once_and_protects_it(index, monkeypatch):
    decoded = []
    whole = Index.fitted
    monkeypatch.setattr(Index, "fitted", lambda self, i, imgsz: decoded.append(i) or whole(self, i, imgsz))
    cache = ImageCache(index, IMGSZ, "ram")
    first = cache[2].copy()
    assert np.array_equal(cache[2], first)
    assert len(decoded) == 1
    assert max(first.shape[:2]) == IMGSZ
    with pytest.raises(ValueError, match="read-only"):
        cache[2][0] = 0


def test_auto_cache_is_off_when_memory_is_short(index, monkeypatch):
    assert ImageCache(index, IMGSZ, "auto").count == len(index)
    monkeypatch.setattr("detector.data.cache.available_memory", lambda: 3 * ImageCache(index, IMGSZ, "off").bytes)
    assert ImageCache(index, IMGSZ, "auto").count == 0


def test_cache_is_right_after_pickling(index):
    dataset = training_set(index)
    expected = dataset[0, 1]
    assert same(pickle.loads(pickle.dumps(dataset))[0, 1], expected)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_forked_workers_fill_one_cache(index):
    dataset = training_set(index)
    for _ in TrainingLoader(dataset, 2, False).batches([(4, list(range(len(index))))]):
        pass
    assert dataset.cache.kept() == len(index)


def test_image_that_changed_since_it_was_indexed_is_named(index):
    cv2.imwrite(str(index.path(1)), np.zeros((10, 20, 3), np.uint8))
    for dataset, position in (
        (training_set(index, bad_images="error"), (4, 1)),
        (ValidationSet(index, IMGSZ, bad_images="error"), 1),
    ):
        with pytest.raises(DataError, match="is 20 x 10 pixels, and was 80 x 48 when the data set was read"):
            dataset[position]
    assert not training_set(index)[4, 1].good
    assert ValidationSet(index, IMGSZ)[1] is None


def test_last_epochs_show_one_whole_image(index):
    still = Augmentation(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 1.0, 1.0)
    dataset = training_set(index, augmentation=still)
    for i in range(len(index)):
        image = cv2.resize(read_image(index.path(i)), (64, 38) if i % 3 else (43, 64), interpolation=cv2.INTER_AREA)
        sample = dataset[3, i]
        expected = np.full((IMGSZ, IMGSZ, 3), 114, dtype=np.uint8)
        top, left = (IMGSZ - image.shape[0]) // 2, (IMGSZ - image.shape[1]) // 2
        expected[top : top + image.shape[0], left : left + image.shape[1]] = image
        assert np.array_equal(sample.image, expected)
        ratio = image.shape[1] / index.widths[i], image.shape[0] / index.heights[i]
        boxes = (index.boxes_xyxy(i).reshape(-1, 2, 2) * ratio + (left, top)).reshape(-1, 4)
        assert sample.boxes_xyxy == pytest.approx(boxes, abs=1e-4)
        assert not np.array_equal(dataset[2, i].image, sample.image)


def test_collate_keeps_order_and_owners():
    def sample(count: int, index: int) -> Sample:
        boxes = np.arange(4 * count, dtype=np.float32).reshape(-1, 4) + index
        return Sample(np.full((2, 3, 3), index, np.uint8), boxes, np.arange(count), index)

    batch = collate([sample(2, 7), sample(0, 5), sample(1, 9)])
    assert batch.images.shape == (3, 2, 3, 3)
    assert batch.images[:, 0, 0, 0].tolist() == [7, 5, 9]
    assert batch.image_index.tolist() == [0, 0, 2]
    assert batch.image_index.dtype == torch.int64
    assert batch.classes.tolist() == [0, 1, 0]
    assert batch.classes.dtype == torch.int64
    assert batch.samples.tolist() == [7, 5, 9]
    assert batch.boxes_xyxy[:, 0].tolist() == [7, 11, 9]
    assert batch.boxes_xyxy.dtype == torch.float32
    assert batch.bad.tolist() == []
    assert batch.bad.dtype == torch.int64
    empty = collate([sample(0, 1)])
    assert empty.boxes_xyxy.shape == (0, 4)
    assert empty.image_index.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_network_input_is_channels_last_in_0_1(dtype):
    images = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(2, 16, 8, 3)
    batch = Batch(images, *(torch.zeros(0),) * 5)
    out = batch.to("cpu").network_input(dtype)
    assert out.shape == (2, 3, 16, 8)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, (images.permute(0, 3, 1, 2).double() / 255).to(dtype))
    assert images.max() == 255


@pytest.mark.parametrize("side", [32, 64, 96, 160])
def test_a_resized_batch_is_the_same_however_it_is_cut(index, side):
    """And its boxes stay on what they are around."""
    dataset = training_set(index)
    whole = collate([dataset[0, i] for i in range(9)])
    resized = whole.resized(side)
    assert resized.images.shape == (9, side, side, 3)
    assert resized.images.dtype == torch.uint8
    assert torch.equal(resized.boxes_xyxy, whole.boxes_xyxy * side / IMGSZ)
    parts = [whole.part(start, start + 2).resized(side) for start in range(0, 9, 2)]
    for a, b in zip(joined(parts), resized, strict=True):
        assert torch.equal(a, b) or torch.equal(a, whole.bad)
    expected = np.stack([cv2.resize(image, (side, side)) for image in whole.images.numpy()])
    assert abs(resized.images.numpy().astype(int) - expected).max() <= 1
    assert resized.network_input().is_contiguous(memory_format=torch.channels_last)


def collected(dataset: TrainingSet, workers: int, epochs: list) -> list[Batch]:
    loader = TrainingLoader(dataset, workers, False)
    return [batch for plan in epochs for batch in loader.batches(plan)]


def test_batches_are_as_planned_and_the_same_with_any_workers(index):
    plans = [[(0, [3, 1, 2]), (0, [8]), (0, [0, 7])], [(4, [5, 6])], []]
    alone, shared = (collected(training_set(index), workers, plans) for workers in (0, 2))
    assert [batch.samples.tolist() for batch in alone] == [[3, 1, 2], [8], [0, 7], [5, 6]]
    assert all(same(a, b) for a, b in zip(alone, shared, strict=True))
    dataset = training_set(index)
    assert all(same(alone[1], collate([dataset[0, 8]])) for _ in range(2))


def test_loading_leaves_the_global_generators_alone(index):
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    collected(training_set(index), 2, [[(0, [1, 2])]])
    list(validation_batches(ValidationSet(index, IMGSZ), 2, 0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_a_pass_given_up_half_way_does_not_spoil_the_next(index):
    loader = TrainingLoader(training_set(index), 2, False)
    plan = [(0, [i]) for i in range(9)]
    assert next(loader.batches(plan)).samples.tolist() == [0]
    assert [batch.samples.tolist() for batch in loader.batches(plan[3:])] == [[i] for i in range(3, 9)]


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_a_worker_arrives_as_it_was_raised(index, workers):
    index.path(4).write_bytes(b"damaged")
    with pytest.raises(DataError) as error:
        collected(training_set(index, bad_images="error"), workers, [[(4, [0]), (4, [4])]])
    assert str(error.value).startswith(f"{index.path(4)}: cannot be decoded")


@pytest.mark.parametrize("workers", [0, 2])
def test_image_that_is_gone_is_not_skipped(index, workers):
    """A folder that is no longer there must not pass for a data set of damaged images."""
    index.path(4).unlink()
    with pytest.raises(DataError, match="cannot be read"):
        collected(training_set(index), workers, [[(4, [0]), (4, [4])]])
    with pytest.raises(DataError, match="cannot be read"):
        list(validation_batches(ValidationSet(index, IMGSZ), 2, workers))


def cut_short(*paths: Path) -> None:
    """Damage images where it shows only when they are decoded."""
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("cache", ["ram", "off"])
@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_have_no_row_and_are_told(index, workers, cache):
    plan = [(0, [3, 1, 2]), (0, [8]), (0, [0, 7, 5]), (4, [4, 6])]
    cut_short(*(index.path(i) for i in (1, 4, 6, 0)))
    batches = collected(training_set(index, cache=cache), workers, [plan])
    assert [batch.samples.tolist() for batch in batches] == [[3, 2], [8], [7, 5], []]
    assert [batch.bad.tolist() for batch in batches] == [[1], [], [0], [4, 6]]
    for batch in batches[:3]:
        assert batch.images.shape == (len(batch.samples), IMGSZ, IMGSZ, 3)
        assert set(batch.image_index.tolist()) <= set(range(len(batch.samples)))
    assert same(batches[3]._replace(bad=torch.zeros(0)), blank_batch(IMGSZ)._replace(bad=torch.zeros(0)))


def test_damaged_partner_is_grey_and_without_boxes(index):
    """As if the image were grey and unlabelled, which is another way to make the same sample."""
    grey = dataclasses.replace(index, boxes_xywh=index.boxes_xywh.copy())
    broken = [2, 3, 7]
    kept = [training_set(index)[epoch, i] for epoch in range(5) for i in range(len(index))]
    for i in broken:
        grey.boxes_xywh[grey.box_offsets[i] : grey.box_offsets[i + 1]] = 0
        cv2.imwrite(str(index.path(i)), np.full((*index.size(i), 3), 114, np.uint8))
    positions = [(epoch, i) for epoch in range(5) for i in range(len(index)) if i not in broken]
    expected = training_set(grey)
    expected = [expected[position] for position in positions]
    for i in broken:
        index.path(i).write_bytes(index.path(i).read_bytes()[:-30])
    found = training_set(index)
    found = [found[position] for position in positions]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert all(sample.good for sample in found)
    changed = [
        not same(sample, kept[epoch * len(index) + i]) for sample, (epoch, i) in zip(found, positions, strict=True)
    ]
    assert any(changed)
    assert not all(changed)  # those without a damaged partner are as they were


def test_damaged_images_are_the_same_to_every_process(index):
    """Whatever else a process has seen before, and with a pickled data set."""
    cut_short(index.path(5), index.path(1))
    positions = [(epoch, i) for epoch in (0, 4) for i in range(len(index))]
    once = training_set(index)
    first = [once[position] for position in positions]
    assert [sample.index for sample in first if not sample.good] == [1, 5, 1, 5]
    again = pickle.loads(pickle.dumps(once))
    assert all(same(a, again[position]) for a, position in zip(first, positions, strict=True))
    for position, sample in zip(reversed(positions), reversed(first), strict=True):
        assert same(sample, training_set(index, cache="off")[position])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_validation_leaves_damaged_images_out(index, workers, batch):
    everything = {
        i: image
        for images, _, found in validation_batches(ValidationSet(index, IMGSZ), 1, 0)
        for i, image in zip(found, images, strict=True)
    }
    cut_short(index.path(0), index.path(1), index.path(3))
    found = {}
    for images, mappings, indices in validation_batches(ValidationSet(index, IMGSZ), batch, workers):
        assert len(images) == len(mappings) == len(indices) > 0
        found |= dict(zip(indices, images, strict=True))
    assert sorted(found) == [2, 4, 5, 6, 7, 8]
    assert all(torch.equal(image, everything[i]) for i, image in found.items())


@pytest.mark.parametrize("sizes", [[5], [3, 2], [1] * 5, [2, 2, 1, 0]])
def test_batches_cut_again_leave_out_what_was_damaged(index, sizes):
    """However a window is cut, before or after its images are loaded, the micro-batches are the same."""
    cut_short(index.path(7), index.path(2))
    order, dataset = [3, 7, 2, 0, 5], training_set(index)
    ends = np.cumsum(sizes)
    micro_batches = [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    expected = [collate([dataset[0, i] for i in micro]) if micro else blank_batch(IMGSZ) for micro in micro_batches]
    for held in ([[3], [7], [2], [0], [5]], [[3, 7, 2], [0, 5]], [[3, 7, 2, 0, 5]], [[3], [7, 2], [0, 5], []]):
        batches = [collate([dataset[0, i] for i in micro]) if micro else blank_batch(IMGSZ) for micro in held]
        cut = recut_batches(batches, micro_batches)
        assert all(same(a, b) for a, b in zip(cut, expected, strict=True))
    nothing = [collate([dataset[0, 7]]), collate([dataset[0, 2]])]
    assert [batch.bad.tolist() for batch in recut_batches(nothing, [[7, 2]])] == [[7, 2]]


@pytest.mark.parametrize("imgsz", [32, 64, 160, 320])
@pytest.mark.parametrize(("height", "width"), [(48, 80), (90, 60), (64, 64), (31, 17), (400, 300)])
def test_training_and_validation_show_the_same_pixels(tmp_path, imgsz, height, width):
    """Up and down, without augmentation; and the boxes of training come back where the labels are."""
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    random = np.random.default_rng(0)
    cv2.imwrite(str(tmp_path / "images" / "0.png"), random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    (tmp_path / "labels" / "0.txt").write_text("0 .5 .5 .3 .25\n1 .25 .6 .2 .7\n0 .5 .5 1 1")
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [a, b]\n")
    index = build_index(load_description(tmp_path / "data.yaml"), "train")
    plain = Augmentation(**dict.fromkeys(Augmentation.__dataclass_fields__, 0.0))
    training = TrainingSet(index, imgsz, plain, seed=0, epochs=1, close_mosaic=0)
    sample = training[0, 0]
    image, mapping, _ = ValidationSet(index, imgsz, rect=False)[0]
    inside = image[mapping.top :, mapping.left :][: training.cache[0].shape[0], : training.cache[0].shape[1]]
    assert np.array_equal(inside, training.cache[0])
    assert max(inside.shape[:2]) == imgsz
    assert np.array_equal(image, sample.image)
    boxes = Detections(torch.from_numpy(sample.boxes_xyxy), torch.zeros(3), torch.from_numpy(sample.classes))
    assert to_original(boxes, mapping).boxes_xyxy.numpy() == pytest.approx(index.boxes_xyxy(0), abs=1e-3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [1, 4])
def test_validation_never_pads_an_image_for_anothers_sake(index, workers, batch):
    dataset = ValidationSet(index, IMGSZ)
    seen = []
    for images, mappings, indices in validation_batches(dataset, batch, workers):
        assert len(images) == len(mappings) == len(indices) <= batch
        for image, mapping, i in zip(images, mappings, indices, strict=True):
            alone = dataset[i]
            assert np.array_equal(image.numpy(), alone[0])
            assert mapping == alone[1]
            assert alone[0].shape[:2] == dataset.shape(i)
            seen.append(i)
    assert sorted(seen) == list(range(len(index)))
