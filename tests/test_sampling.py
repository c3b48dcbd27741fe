"""Rare classes: what they weigh in the loss, and how often their images come."""

import math
import pickle
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import MINUTE, TINY, TINY26, cut_batch, random_batch, write_dataset
from test_fingerprint import EVERYTHING, fingerprint, joined, prints_of
from test_step import Double, gradient, new_state, rates_of, relative, total
from test_training import run, same, train

from detector import checkpoint_file
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.loader import TrainingLoader
from detector.data.reading import build_index
from detector.data.sampling import Sampling, class_weights, repeat_factors, sampling_of
from detector.loss.criterion import DetectionLoss
from detector.run import loop
from detector.step.gradients import GradientSum
from detector.step.plan import Window, epoch_windows, nominal_cut
from detector.step.step import StepRules, train_window

SEED, IMAGES = 3, 13
STILL = replace(EVERYTHING, **dict.fromkeys(EVERYTHING.__dataclass_fields__, 0.0))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=IMAGES, val=2)


@pytest.fixture(scope="module")
def index(data):
    return build_index(load_description(data), "train")


def with_labels(index, labels, names=("a", "b", "c")):
    """The index with these classes in its images, every box the same."""
    counts = [len(labels[i]) if i < len(labels) else 0 for i in range(len(index))]
    flat = np.array([one for image in labels for one in image], dtype=np.int32)
    boxes, none = np.full((len(flat), 4), 0.5), np.zeros(len(flat), dtype=bool)
    offsets = np.cumsum([0, *counts])
    return replace(
        index, names=names, classes=flat, boxes_xywh=boxes, box_offsets=offsets, ignored_boxes=none,
        areas=np.full(len(flat), np.nan), rows=np.arange(len(flat)), point_offsets=np.zeros(0, np.int64),
    )  # fmt: skip


# --- weights in the loss


def test_class_weights_by_hand(index):
    """8, 2 and no boxes: by power 1 as 1/8 to 1/2, whose mean over the two is 5/16."""
    imbalanced = with_labels(index, [[0] * 8, [1, 1]])
    assert class_weights(imbalanced, 1) == pytest.approx([0.4, 1.6, 1])
    assert class_weights(imbalanced, 0.5) == pytest.approx([2 / 3, 4 / 3, 1])
    assert class_weights(imbalanced, 0).tolist() == [1, 1, 1]
    assert class_weights(with_labels(index, []), 1).tolist() == [1, 1, 1]
    many = class_weights(with_labels(index, [[0] * 70, [1] * 9, [2]]), 0.7)
    assert many.mean() == pytest.approx(1)
    assert many[2] / many[0] == pytest.approx(70**0.7)


def weighted(state, weights):
    return DetectionLoss(state.network.head, torch.tensor(weights))


@pytest.mark.parametrize("model", [TINY, TINY26], ids=["one head", "two heads"])
@pytest.mark.parametrize(
    ("boxes", "sizes"), [([1, 9, 0, 3, 14, 0], [3, 2, 1]), ([0, 0, 0], [2, 1]), ([0, 150, 0, 1], [1] * 4)], ids=str
)
def test_any_cut_of_a_window_is_one_batch_with_class_weights_too(model, boxes, sizes):
    """In fp64, against autograd of one batch: images * sums / max(weight, 1) of each branch."""
    batch, weights = random_batch(boxes), [0.25, 1.75]
    state = new_state(torch.float64, model=model)
    parts = [Double(part) for part in cut_batch(batch, sizes)]
    samples = tuple(tuple(part.samples.tolist()) for part in parts)
    rules = StepRules(criterion=weighted(state, weights))
    report = train_window(state, GradientSum(state.network), rules, Window(0, 0, (samples,)), parts, rates_of(state))

    fresh = new_state(torch.float64, model=model)
    double = Double(batch)
    losses = weighted(fresh, weights)(fresh.network(double.network_input()), double)
    gains = torch.tensor(rates_of(fresh).gains, dtype=torch.float64)
    one = sum(loss.terms * gain / loss.weight.clamp(min=1) for loss, gain in zip(losses, gains, strict=True))
    (len(boxes) * one.sum()).backward()
    assert relative(gradient(state), gradient(fresh)) < 1e-10
    assert report.losses == pytest.approx(one.tolist(), rel=1e-10)


def test_the_class_term_is_weighted_class_by_class_and_nothing_else_is():
    state, batch = new_state(torch.float64), random_batch([3, 9, 1])
    outputs = state.network(batch.network_input(torch.float64))
    plain, (a, b, both) = DetectionLoss(state.network.head)(outputs, batch)[0], [
        weighted(state, weights)(outputs, batch)[0] for weights in ([1.0, 0.0], [0.0, 1.0], [0.25, 1.75])
    ]  # fmt: skip
    for one in (a, b, both):
        assert one.weight == plain.weight
        assert one.terms[[0, 2]].tolist() == plain.terms[[0, 2]].tolist()
    assert (a.terms + b.terms)[1].item() == pytest.approx(plain.terms[1].item(), rel=1e-12)
    assert both.terms[1].item() == pytest.approx((0.25 * a.terms + 1.75 * b.terms)[1].item(), rel=1e-12)
    assert total(both) != total(plain)


# --- how often images come


def test_repeat_factors_by_hand(index):
    """Class a in 8 images, b in 2, c in none: an image with b comes as often as sqrt(8 / 2) with a alone."""
    skewed = with_labels(index, [[0, 0, 0]] * 7 + [[0, 1]] + [[1, 1]] + [[]] * 4)
    assert repeat_factors(skewed, 0.5).tolist() == [1] * 7 + [2, 2] + [1] * 4
    assert repeat_factors(skewed, 1).tolist() == [1] * 7 + [4, 4] + [1] * 4
    assert repeat_factors(skewed, 0).tolist() == [1] * 13
    assert repeat_factors(with_labels(index, []), 1).tolist() == [1] * 13


def test_an_even_epoch_holds_every_image_in_its_own_slot(index):
    for sampling in (sampling_of(index, "uniform", 0), Sampling(np.full(13, 7.3), 0)):
        assert sampling.expected is None
        assert sampling.drawn(5).tolist() == list(range(13))


factors = st.lists(st.floats(1, 50), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(factors, st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_keeps_its_slots_and_each_image_comes_as_often_as_expected(factors, seed, epoch):
    factors = np.array(factors)
    drawn = Sampling(factors, seed).drawn(epoch)
    assert drawn.dtype == np.int64
    assert len(drawn) == len(factors)
    assert (np.diff(drawn) >= 0).all()
    counts = np.bincount(drawn, minlength=len(factors))
    expected = len(factors) * factors / factors.sum()
    assert (np.abs(counts - expected) < 1 + 1e-9).all()
    assert np.array_equal(drawn, Sampling(factors, seed).drawn(epoch))


def test_over_many_epochs_images_come_as_often_as_they_should():
    factors = np.array([1, 1, 1, 2, 5.5, 1, 1.25, 1])
    sampling = Sampling(factors, seed=0)
    counts = Counter(np.concatenate([sampling.drawn(epoch) for epoch in range(2000)]).tolist())
    for i, expected in enumerate(8 * factors / factors.sum()):
        assert counts[i] / 2000 == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 2000))


def test_an_epoch_is_drawn_anew_and_does_not_depend_on_those_before():
    factors = np.linspace(1, 9, 50)
    sampling = Sampling(factors, seed=1)
    forwards = [sampling.drawn(epoch).tolist() for epoch in range(6)]
    assert [Sampling(factors, 1).drawn(epoch).tolist() for epoch in reversed(range(6))] == forwards[::-1]
    assert pickle.loads(pickle.dumps(sampling)).drawn(2).tolist() == forwards[2]
    assert all(a != b for a, b in pairwise(forwards))
    assert Sampling(factors, seed=2).drawn(0).tolist() != forwards[0]


@pytest.fixture
def skewed(index):
    """One image alone shows a class, and most show the other."""
    return with_labels(index, [[0]] * 9 + [[0, 1]] + [[]] * 3, ("square", "disc"))


RARE = 9


def balanced_set(index, strengths=EVERYTHING, seed=SEED):
    return TrainingSet(index, 64, strengths, seed, epochs=9, close_mosaic=0, sampling=sampling_of(index, 1.0, seed))


def test_an_image_that_comes_again_looks_different(skewed):
    images = balanced_set(skewed)
    for epoch in range(3):
        slots = np.flatnonzero(images.drawn(epoch) == RARE).tolist()
        assert len(slots) > 1
        prints = {fingerprint(one.image, one.boxes_xyxy, one.classes) for one in (images[epoch, s] for s in slots)}
        assert len(prints) == len(slots)


def test_a_slot_without_augmentation_is_the_image_that_it_holds(skewed):
    balanced, plain = balanced_set(skewed, STILL), TrainingSet(skewed, 64, STILL, SEED, epochs=9, close_mosaic=0)
    for slot, image in enumerate(balanced.drawn(2).tolist()):
        sample, other = balanced[2, slot], plain[2, image]
        assert np.array_equal(sample.image, other.image)
        assert sample.classes.tolist() == other.classes.tolist()
        assert sample.index == slot


def test_partners_in_a_mosaic_are_of_the_images_that_an_epoch_holds(skewed):
    """With every slot a mosaic of four, discs would else come hardly more often."""
    mosaics = replace(STILL, mosaic=1.0)
    plain = TrainingSet(skewed, 64, mosaics, SEED, epochs=9, close_mosaic=0)
    shown = [
        sum((images[epoch, slot].classes == 1).sum() for epoch in range(4) for slot in range(IMAGES))
        for images in (balanced_set(skewed, mosaics), plain)
    ]
    factors = repeat_factors(skewed, 1.0)
    assert shown[0] > 0.6 * shown[1] * IMAGES * factors[RARE] / factors.sum() > shown[1]


@pytest.mark.parametrize(("batch", "ranks", "workers"), [(1, 1, 0), (3, 2, 2), (16, 3, 0)])
def test_samples_do_not_depend_on_batch_ranks_and_workers(skewed, batch, ranks, workers):
    prints = {}
    for epoch in range(2):
        windows = list(epoch_windows(IMAGES, nominal_cut(6, batch, ranks), SEED, epoch))
        for rank in range(ranks):
            loader = TrainingLoader(balanced_set(skewed), workers, pin_memory=False)
            mine = [micro for window in windows for micro in window.micro_batches[rank]]
            prints |= joined(prints_of(epoch, loader.batches((epoch, micro) for micro in mine if micro)))
            loader.close()
    images = balanced_set(skewed)
    samples = {(epoch, slot): images[epoch, slot] for epoch in range(2) for slot in range(IMAGES)}
    assert prints == {at: fingerprint(one.image, one.boxes_xyxy, one.classes) for at, one in samples.items()}


# --- runs


@pytest.fixture
def common(data):
    return [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "workers=0", "plots=false",
            "amp=fp32", "sampling=1", "cls_pw=0.5"]  # fmt: skip


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_images_that_its_epoch_holds(tmp_path, common, monkeypatch, capsys):
    whole = train(tmp_path, common, "whole", "epochs=2", "batch=4")
    shown = capsys.readouterr().out
    assert "sampling  1.0: an image 0." in shown
    assert "boxes^-0.5, mean 1" in shown
    taken = []
    take = loop.recover.take

    def stopping(run, window, held, rates):
        taken.append(window)
        run.interruption.number = 15 if len(taken) == 2 else None
        return take(run, window, held, rates)

    with monkeypatch.context() as patched:
        patched.setattr(loop.recover, "take", stopping)
        assert run("train", *common, "epochs=2", "batch=4", f"project={tmp_path}", "name=halves") == 128 + 15
    assert run("train", f"resume={tmp_path / 'halves'}") == 0
    assert same(tmp_path / "halves", whole)


@pytest.mark.slow
def test_damaged_images_are_told_by_their_own_number_wherever_they_come(tmp_path, data, common, capsys):
    shutil.copytree(data.parent, tmp_path / "data")
    path = tmp_path / "data/images/train/005.png"
    path.write_bytes(path.read_bytes()[:-2000])
    words = [f"data={tmp_path / 'data/data.yaml'}", *common[1:], "epochs=3"]
    folder = train(tmp_path, words, "run")
    assert checkpoint_file.read(folder / "weights" / "last.pt")["bad_images"]["train"] == [5]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: train:")]
    assert len(said) == 1
    assert str(path) in said[0]
