"""The promise of the same images: sample i of epoch e looks the same however a run is cut, loaded and interrupted."""

import hashlib
from collections.abc import Iterable, Iterator

import pytest
from scenes import write_dataset

from detector.data.augment import Augmentation
from detector.data.batch import Batch
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.loader import TrainingLoader
from detector.data.reading import build_index
from detector.step.plan import Cut, Window, epoch_windows, nominal_cut

EVERYTHING = Augmentation(degrees=10, shear=3, perspective=0.0005, flipud=0.3, mosaic=0.7, mixup=0.4, cutmix=0.4)
SEED, NBS, IMAGES, EPOCHS = 3, 6, 13, 2
WARMUP = 0.5  # epochs: windows of several sizes

Prints = dict[tuple[int, int], str]  # (epoch, sample) -> SHA-256 of pixels, boxes and classes


def training_set(data, workers: int = 0, cache: str = "auto") -> TrainingSet:
    """A new one, with mosaic, mixup and cutmix in all epochs."""
    index = build_index(load_description(data), "train")
    return TrainingSet(index, 64, EVERYTHING, SEED, EPOCHS, 0, cache, processes=workers)


def fingerprint(image, boxes_xyxy, classes) -> str:
    return hashlib.sha256(image.tobytes() + boxes_xyxy.tobytes() + classes.tobytes()).hexdigest()


def prints_of(epoch: int, batches: Iterable[Batch]) -> Iterator[tuple[tuple[int, int], str]]:
    for batch in batches:
        for place, sample in enumerate(batch.samples.tolist()):
            mine = batch.image_index == place
            parts = batch.images[place], batch.boxes_xyxy[mine], batch.classes[mine]
            yield (epoch, sample), fingerprint(*(part.numpy() for part in parts))


def joined(prints: Iterable[tuple[tuple[int, int], str]]) -> Prints:
    """All of them; a sample must not come twice."""
    found: Prints = {}
    for position, one in prints:
        assert position not in found, position
        found[position] = one
    return found


def loaded(data, windows: list[Window], workers: int) -> Iterator[tuple[tuple[int, int], str]]:
    """The fingerprints of windows as every rank loads its share of them, in its own data set and processes."""
    for rank in range(len(windows[0].micro_batches)):
        cache = ("auto", "off")[workers % 2 or rank % 2]
        loader = TrainingLoader(training_set(data, workers, cache), workers, pin_memory=False)
        for epoch in sorted({window.epoch for window in windows}):
            mine = [micro for window in windows if window.epoch == epoch for micro in window.micro_batches[rank]]
            yield from prints_of(epoch, loader.batches((epoch, micro) for micro in mine if micro))


def planned(cut: Cut) -> list[Window]:
    return [window for epoch in range(EPOCHS) for window in epoch_windows(IMAGES, cut, SEED, epoch, warmup=WARMUP)]


@pytest.fixture(scope="module", autouse=True)
def few_neighbours():
    """So few that they are others for each sample, and that they fall into several micro-batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("detector.data.neighbours.NEAR", 5)
        patch.setattr("detector.data.cache.NEAR", 5)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=IMAGES, val=1)


@pytest.fixture(scope="module")
def expected(data) -> Prints:
    """Every sample drawn alone, without plan, loader and batch."""
    found = {}
    for epoch in range(EPOCHS):
        for i in range(IMAGES):
            sample = training_set(data)[epoch, i]
            found[epoch, i] = fingerprint(sample.image, sample.boxes_xyxy, sample.classes)
    return found


def test_every_sample_of_every_epoch_looks_different(expected):
    assert len(set(expected.values())) == EPOCHS * IMAGES


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_samples_do_not_depend_on_batch_ranks_and_workers(data, expected, batch, ranks, workers):
    windows = planned(nominal_cut(NBS, batch, ranks))
    workers += workers and (batch + ranks) % 2  # 2 or 3
    assert joined(loaded(data, windows, workers)) == expected


@pytest.mark.parametrize("stop", range(1, 2 * EPOCHS))
def test_samples_do_not_depend_on_an_interruption(data, expected, stop):
    """Killed between any two windows, and gone on with other batches, ranks and workers from the position alone."""
    before = planned(nominal_cut(NBS, 3))
    assert len(before) > 2 * EPOCHS
    trained, next_one = before[:stop], before[stop]
    now = nominal_cut(NBS, 2, devices=2)
    after = list(epoch_windows(IMAGES, now, SEED, next_one.epoch, next_one.done, warmup=WARMUP))
    after += [w for epoch in range(next_one.epoch + 1, EPOCHS) for w in epoch_windows(IMAGES, now, SEED, epoch)]
    parts = [*loaded(data, trained, workers=0), *loaded(data, after, workers=2 if stop == 1 else 0)]
    assert joined(parts) == expected


def test_another_seed_shows_other_images(data, expected):
    index = build_index(load_description(data), "train")
    other = TrainingSet(index, 64, EVERYTHING, SEED + 1, epochs=EPOCHS, close_mosaic=0)[0, 0]
    assert fingerprint(other.image, other.boxes_xyxy, other.classes) != expected[0, 0]
