"""The plan, checked exhaustively over small sizes and by hand."""

import itertools

import pytest

from detector.step.plan import (
    Cut,
    Window,
    count_steps,
    enough_steps,
    epoch_windows,
    input_side,
    input_sides,
    lr_factor,
    next_window,
    nominal_cut,
    ramped,
    split,
    spread,
)


@pytest.mark.parametrize(
    ("nbs", "batch", "devices", "accumulate"),
    [
        (64, 16, 1, 4),
        (64, 8, 1, 8),
        (64, 64, 1, 1),
        (64, 128, 1, 1),
        (64, 24, 1, 3),
        (128, 4, 4, 8),
        (64, 1, 1, 64),
        (64, 16, 2, 2),
    ],
)
def test_accumulate_is_nbs_over_batch_and_devices(nbs, batch, devices, accumulate):
    cut = nominal_cut(nbs, batch, devices)
    assert cut.accumulate == accumulate
    assert cut.window == batch * accumulate * devices


@pytest.mark.parametrize(
    ("batch", "devices", "nbs", "per_device", "window", "factor"),
    [
        (16, 1, 64, False, 64, 1),
        (24, 1, 64, False, 72, 1),  # rounding alone scales nothing
        (16, 4, 64, False, 64, 1),
        (4, 4, 128, False, 128, 1),
        (4, 4, 32, True, 128, 4),
        (16, 8, 64, False, 128, 2),
        (128, 1, 64, False, 128, 2),
        (256, 4, 64, False, 1024, 16),
        (16, 1, 64, True, 64, 1),
        (16, 2, 64, True, 128, 2),
        (1, 1, 64, False, 64, 1),
    ],
)
def test_lr_grows_only_with_windows_beyond_nominal(batch, devices, nbs, per_device, window, factor):
    cut = nominal_cut(nbs, batch, devices, per_device)
    assert cut.window == window
    assert lr_factor(cut, nbs, "linear", per_device) == factor
    assert lr_factor(cut, nbs, "sqrt", per_device) == pytest.approx(factor**0.5)
    assert lr_factor(cut, nbs, "none", per_device) == 1


def test_halves_round_up_and_not_to_even():
    assert [nominal_cut(nbs, 2).accumulate for nbs in (1, 3, 5, 7)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("images", "epochs", "nbs"),
    [
        (118_287, 100, 64),
        (640, 100, 64),  # 10 steps of 64 an epoch, 1,000 in all
        (640, 99, 32),  # 990, and 20 of 32 are 1,980
        (205, 60, 16),  # 240 of 64, 420 of 32
        (45, 60, 16),
        (1, 1, 16),  # nothing would make them enough
        (1, 1000, 64),  # nothing would make more of them
        (640 / 4, 400, 64),  # each device's share
    ],
)
def test_the_nominal_batch_is_the_largest_that_makes_enough_steps(images, epochs, nbs):
    assert enough_steps(images, epochs) == nbs


def test_an_epoch_is_spread_evenly_over_its_windows():
    windows = list(epoch_windows(205, Cut(16, 4), seed=0, epoch=3))
    assert [window.images for window in windows] == [52, 51, 51, 51]
    assert [len(micro) for micro in windows[0].micro_batches[0]] == [13, 13, 13, 13]
    assert [window.done for window in windows] == [0, 52, 103, 154]


def test_a_window_is_cut_evenly():
    assert [len(micro) for micro in split(range(61), 16, 1)[0]] == [16, 15, 15, 15]


def test_every_small_plan_keeps_the_rules():
    for images, batch, accumulate, devices in itertools.product(range(1, 30), (1, 2, 3, 5), (1, 2, 4), (1, 2, 3)):
        cut = Cut(batch, accumulate, devices)
        windows = list(epoch_windows(images, cut, seed=1, epoch=0))
        sizes = [window.images for window in windows]
        assert len(windows) == -(-images // cut.window)
        assert max(sizes) <= cut.window
        assert max(sizes) - min(sizes) <= 1
        seen = []
        for window in windows:
            counts = [len(device) for device in window.micro_batches]
            assert len(window.micro_batches) == devices
            assert len(set(counts)) == 1
            assert counts[0] <= accumulate
            lengths = [len(micro) for device in window.micro_batches for micro in device]
            assert max(lengths) <= batch
            assert max(lengths) - min(lengths) <= 2  # uneven by one over devices, by one more inside
            seen += [sample for device in window.micro_batches for micro in device for sample in micro]
        assert sorted(seen) == list(range(images))


def test_a_plan_taken_up_anywhere_goes_on_as_planned():
    for images, warmup in itertools.product((7, 23, 61), (0.0, 0.5, 2.0)):
        cut = Cut(2, 4)
        for epoch in (0, 1, 2):
            windows = list(epoch_windows(images, cut, seed=3, epoch=epoch, warmup=warmup))
            for position, window in enumerate(windows):
                assert list(epoch_windows(images, cut, 3, epoch, window.done, warmup)) == windows[position:]


def test_the_images_of_a_window_do_not_depend_on_how_it_is_cut():
    def images_of(cut):
        return [
            [sample for device in window.micro_batches for micro in device for sample in micro]
            for window in epoch_windows(61, cut, seed=5, epoch=2)
        ]

    whole = images_of(Cut(16, 1))
    for cut in (Cut(8, 2), Cut(4, 4), Cut(1, 16), Cut(4, 2, 2), Cut(2, 2, 4)):
        assert images_of(cut) == whole


def test_no_runt_is_left_at_the_end_of_an_epoch():
    for remaining, nominal in itertools.product(range(1, 200), range(1, 70)):
        sizes, left = [], remaining
        while left:
            sizes.append(next_window(left, nominal))
            left -= sizes[-1]
        assert sizes == spread(remaining, -(-remaining // nominal))


def test_the_warmup_ramp_grows_by_images_seen_and_then_stays():
    cut = Cut(4, 8)
    grown = [ramped(cut, progress, 2.0).accumulate for progress in (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 9.0)]
    assert grown == sorted(grown)
    assert (grown[0], grown[3], grown[-1]) == (1, 4, 8)
    assert ramped(cut, 0.0, 0.0) == cut
    sizes = [window.images for window in epoch_windows(200, cut, seed=0, epoch=0, warmup=1.0)]
    assert sizes[0] <= 4
    assert sum(sizes) == 200
    assert max(sizes) <= 32


def test_counted_steps_are_the_steps_of_the_plan():
    for images, warmup, epochs in itertools.product((5, 33, 64), (0.0, 1.5, 3.0), (1, 4)):
        cut = Cut(2, 4)
        planned = sum(len(list(epoch_windows(images, cut, 0, epoch, warmup=warmup))) for epoch in range(epochs))
        assert count_steps(images, cut, epochs, warmup) == planned


def test_the_order_is_another_each_epoch_and_the_same_for_a_seed():
    def order(seed, epoch):
        return [window.micro_batches for window in epoch_windows(40, Cut(8, 1), seed, epoch)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize(
    ("batch", "images", "devices", "expected"),
    [
        (1000, 8, 1, Cut(8, 1, 1)),  # a micro-batch larger than the data set
        (2, 8, 1, Cut(2, 4, 1)),  # nbs larger: four micro-batches are all there are
        (16, 205, 1, Cut(16, 4, 1)),  # as ever
        (1000, 9, 2, Cut(5, 1, 2)),
        (3, 10, 2, Cut(3, 2, 2)),
    ],
)
def test_no_window_is_planned_larger_than_an_epoch(batch, images, devices, expected):
    """What follows from the window's size (learning rate, weight decay, the lines printed) is that of steps taken."""
    cut = nominal_cut(64, batch, devices, images=images)
    assert cut == expected
    largest = max(window.images for window in epoch_windows(images, cut, seed=0, epoch=5))
    assert largest <= min(cut.window, images)
    assert cut.window - images < cut.batch * devices  # never more than one micro-batch each too large
    assert lr_factor(cut, 64, "linear") == 1.0


@pytest.mark.parametrize(
    ("imgsz", "share", "stride", "sides"),
    [
        (640, 0.5, 32, (320, 960)),
        (640, 0.0, 32, (640, 640)),
        (640, 0.25, 32, (480, 800)),
        (320, 0.33, 64, (192, 384)),
        (64, 0.9, 32, (32, 96)),
    ],
)
def test_sides_are_multiples_of_the_stride_and_all_of_them_are_met(imgsz, share, stride, sides):
    assert input_sides(imgsz, share, stride) == sides
    windows = [Window(epoch, done, ()) for epoch in range(20) for done in range(0, 1000, 50)]
    found = [input_side(imgsz, share, stride, 3, window) for window in windows]
    assert sorted(set(found)) == list(range(sides[0], sides[1] + 1, stride))
    assert found == [input_side(imgsz, share, stride, 3, window) for window in windows]


def test_side_does_not_depend_on_the_cut():
    """Of windows that begin at the same image, whatever comes after and however they are cut."""
    whole = list(epoch_windows(205, nominal_cut(64, 16), 0, 2))
    finer = list(epoch_windows(205, nominal_cut(64, 16), 0, 2, batch=3, devices=2))
    resumed = list(epoch_windows(205, nominal_cut(64, 16), 0, 2, done=whole[2].done))
    sides = [[input_side(640, 0.5, 32, 7, window) for window in windows] for windows in (whole, finer, resumed)]
    assert sides[0] == sides[1]
    assert sides[0][2:] == sides[2]
    assert len(set(sides[0])) > 1
