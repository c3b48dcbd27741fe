"""Schedules against their formulas."""

import math
from types import SimpleNamespace

import pytest
from scenes import TINY

from detector.config.settings import Settings, load_settings
from detector.model.network import build_network
from detector.run.build import chosen_optimizer, class_parameters, schedule_of
from detector.step.optim import build_optimizer, set_rates
from detector.step.plan import Cut
from detector.step.schedule import EMA_LIMIT, EMA_SHARE, Leg, Schedule, ema_decay, extended


def schedule(**changes):
    values = {
        "legs": (Leg(0, 100, "linear"),),
        "warmup": 3.0,
        "lr0": 0.01,
        "lrf": 0.01,
        "momentum": 0.937,
        "warmup_momentum": 0.8,
        "warmup_bias_lr": 0.1,
    }
    return Schedule(**{**values, **changes})


def test_linear_decay_ends_at_lr0_times_lrf():
    assert schedule().lr(100) == pytest.approx(0.0001)
    assert schedule().lr(50) == pytest.approx(0.01 * (1 - 0.5 * 0.99))


def test_cosine_decay_follows_half_a_cosine():
    for progress in (3, 10, 50, 99, 100):
        expected = 0.01 * (0.01 + 0.99 * (1 + math.cos(math.pi * progress / 100)) / 2)
        assert schedule(legs=(Leg(0, 100, "cosine"),)).lr(progress) == pytest.approx(expected)


def test_a_rescaled_run_goes_on_as_if_it_was_always_so_long():
    assert extended((Leg(0, 100, "cosine"),), 200, "rescale") == (Leg(0, 200, "cosine"),)
    assert extended((Leg(0, 100, "linear"),), 60, "restart-cosine") == (Leg(0, 60, "linear"),)


def test_a_constant_extension_stays_at_the_final_rate_and_leaves_what_was():
    plan = schedule(legs=extended((Leg(0, 100, "linear"),), 200, "constant-final"))
    assert plan.lr(50) == schedule().lr(50)
    for progress in (100, 100.1, 150, 200):
        assert plan.lr(progress) == pytest.approx(0.0001)


def test_a_restart_goes_from_lr0_down_again_by_a_cosine():
    plan = schedule(legs=extended((Leg(0, 100, "linear"),), 140, "restart-cosine"))
    assert plan.lr(100) == pytest.approx(0.0001)
    for progress in (100.001, 110, 120, 140):
        expected = 0.01 * (0.01 + 0.99 * (1 + math.cos(math.pi * (progress - 100) / 40)) / 2)
        assert plan.lr(progress) == pytest.approx(expected)


def test_a_run_can_be_extended_and_shortened_again():
    legs = extended((Leg(0, 10, "linear"),), 20, "constant-final")
    legs = extended(legs, 30, "restart-cosine")
    assert legs == (Leg(0, 10, "linear"), Leg(10, 20, "constant"), Leg(20, 30, "cosine"))
    assert extended(legs, 40, "rescale") == (*legs[:2], Leg(20, 40, "cosine"))
    assert extended(legs, 15, "rescale") == (legs[0], Leg(10, 15, "constant"))
    assert extended(legs, 20, "rescale") == legs[:2]


def test_warmup_starts_weights_at_zero_and_biases_high_and_meets_the_decay():
    plan = schedule()
    assert plan.lr(0) == 0
    assert plan.lr(0, bias=True) == pytest.approx(0.1)
    assert plan.momentum_at(0) == pytest.approx(0.8)
    assert plan.lr(3 - 1e-9) == pytest.approx(plan.lr(3), rel=1e-6)
    assert plan.lr(3 - 1e-9, bias=True) == pytest.approx(plan.lr(3), rel=1e-6)
    assert plan.momentum_at(3) == 0.937
    assert plan.lr(1.5) == pytest.approx(0.01 * (1 - 0.015 * 0.99) / 2)


def test_no_warmup_is_full_rate_at_once():
    assert schedule(warmup=0.0).lr(0) == 0.01
    assert schedule(warmup=0.0).momentum_at(0) == 0.937


def shared(epochs):
    """Two branches of two terms, as a network with two heads has them."""
    gains, last = [[0.8 * 7.5, 0.8 * 0.5], [0.2 * 7.5, 0.2 * 0.5]], [[0.1 * 7.5, 0.1 * 0.5], [0.9 * 7.5, 0.9 * 0.5]]
    return schedule(legs=(Leg(0, epochs, "linear"),), gains=gains, last_gains=last)


@pytest.mark.parametrize("epochs", [1, 2, 3, 60])
def test_gains_move_from_epoch_to_epoch_and_not_inside_one(epochs):
    for epoch in range(epochs):
        many = 0.1 + 0.7 * max(1 - epoch / max(epochs - 1, 1), 0)
        for inside in (1e-9, 1 / 3, 0.999, 1.0):  # a step is rated at the progress that it ends at
            rates = shared(epochs).rates(epoch + inside)
            assert rates.gains[0] == pytest.approx([many * 7.5, many * 0.5], rel=1e-14)
            assert rates.gains[1] == pytest.approx([(1 - many) * 7.5, (1 - many) * 0.5], rel=1e-14)


def test_gains_of_some_epochs_by_hand():
    assert shared(60).gains_at(0.5)[0][0] / 7.5 == pytest.approx(0.8)
    assert shared(60).gains_at(1.5)[0][0] / 7.5 == pytest.approx(0.788136, abs=1e-6)
    assert shared(60).gains_at(30.5)[0][0] / 7.5 == pytest.approx(0.444068, abs=1e-6)
    assert shared(60).gains_at(60.0)[1][1] / 0.5 == pytest.approx(0.9)
    assert shared(1).gains_at(1.0)[0][0] / 7.5 == pytest.approx(0.8)


def test_gains_of_an_extended_run_are_those_of_one_that_was_always_so_long():
    for rule in ("rescale", "constant-final", "restart-cosine"):
        legs = extended((Leg(0, 10, "linear"),), 40, rule)
        plan = schedule(legs=legs, gains=shared(10).gains, last_gains=shared(10).last_gains)
        assert [plan.gains_at(epoch) for epoch in range(41)] == [shared(40).gains_at(epoch) for epoch in range(41)]


def test_gains_without_others_for_the_last_epoch_stay():
    assert schedule(gains=[[7.5, 0.5]]).gains_at(70.0) == [[7.5, 0.5]]
    assert schedule().gains_at(70.0) is None


def test_ema_decay_with_a_tau_follows_its_formula():
    assert ema_decay(1, 2000) == pytest.approx(0.9999 * (1 - math.exp(-1 / 2000)))
    assert ema_decay(2000, 2000) == pytest.approx(0.9999 * (1 - math.exp(-1)))
    assert ema_decay(10**6, 2000) == pytest.approx(0.9999)


@pytest.mark.parametrize("steps", [100, 1000, 20_000])
def test_an_ema_without_tau_is_over_the_same_share_of_a_run_of_any_length(steps):
    """The mean age of what is averaged, in steps, by a slow sum of the weights that each step has in the end."""
    weight, age = 1.0, 0.0
    for step in range(steps, 0, -1):
        age += weight * (1 - ema_decay(step)) * (steps - step)
        weight *= ema_decay(step)
    assert weight < 1e-3  # nothing is left of where the network began
    assert age / steps == pytest.approx(EMA_SHARE / (1 + EMA_SHARE), rel=0.1)
    assert ema_decay(10**7) == EMA_LIMIT


def test_each_group_warms_up_to_its_own_rate_and_keeps_it():
    """The faster ones at three times the rate, from the first step to the last; where biases start is not tripled."""
    plan = schedule()
    for progress in (0, 0.5, 1.5, 2.9, 3, 4, 60, 100):
        rates, done = plan.rates(progress), min(progress / 3, 1)
        target = 0.01 * (1 - 0.99 * progress / 100)
        for kind in ("muon", "weights", "norms"):
            assert rates.lr[kind] == pytest.approx(done * target)
            assert rates.lr[f"fast {kind}"] == pytest.approx(done * 3 * target)
        assert rates.lr["biases"] == pytest.approx(0.1 + done * (target - 0.1))
        assert rates.lr["fast biases"] == pytest.approx(0.1 + done * (3 * target - 0.1))
        assert rates.momentum == pytest.approx(0.8 + done * 0.137)


@pytest.mark.parametrize(
    ("words", "first", "last", "bias"),
    [
        (["optimizer=SGD"], 0.8, 0.937, 0.1),
        (["optimizer=MuSGD"], 0.8, 0.937, 0.1),
        (["optimizer=AdamW"], 0.937, 0.937, 0.0),
        (["optimizer=AdamW", "warmup_bias_lr=0.1"], 0.937, 0.937, 0.1),
        ([], 0.8, 0.9, 0.0),  # auto is MuSGD: its momentum ends at what was chosen
        (["warmup_bias_lr=0.02", "momentum=0.95"], 0.8, 0.95, 0.02),
        (["recipe=public"], 0.9, 0.9, 0.0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_momentum_and_biases_warm_up_by_optimizer(words, first, last, bias):
    """Adam's first beta does not move. From the settings to what an optimizer's groups are given."""
    settings, cut = load_settings(Settings, None, ["data=d", "nbs=64", *words]), Cut(4, 2)
    network = build_network(TINY, nc=2)
    choice = chosen_optimizer(settings, cut, 8, 2)
    settings = settings.model_copy(update=choice._asdict())
    optimizer = build_optimizer(network, choice, 0.0, class_parameters(network))
    state = SimpleNamespace(legs=(Leg(0, settings.epochs, "linear"),), cut=cut, network=network)
    plan = schedule_of(settings, state)
    for progress, expected in ((0, first), (3, last), (5, last)):
        set_rates(optimizer, plan.rates(progress))
        for group in optimizer.param_groups:
            now = group["betas"][0] if "betas" in group else group["momentum"]
            assert now == pytest.approx(expected)
            assert group["lr"] > 0 or progress == 0
            if progress == 0:
                assert group["lr"] == (bias if group["name"].endswith("biases") else 0)
