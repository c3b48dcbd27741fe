"""`nbs: auto`: what a run's nominal batch comes to, what is told of it, and that it depends on no device."""

import pytest

from detector.config.settings import Settings, load_settings
from detector.run.build import chosen_optimizer, warn_of_rate
from detector.run.nominal import with_nominal_batch
from detector.step.plan import Cut


def resolved(*words, images=205, devices=1):
    said = []
    settings = load_settings(Settings, None, ["data=d", "epochs=60", *words])
    return with_nominal_batch(settings, images, devices, said.append), said


def test_a_short_run_has_smaller_steps_told_as_arithmetic():
    settings, said = resolved()
    assert (settings.nbs, settings.batch) == (16, 16)
    assert said == ["nbs       16: 60 epochs make 780 steps; of 64 images it would be 240, fewer than 1,000"]
    settings, said = resolved(images=5000)
    assert (settings.nbs, settings.batch) == (64, 16)
    assert said == ["nbs       64: 60 epochs make 4,740 steps, and 1,000 are enough"]


def test_what_was_written_is_kept():
    for nbs in (1, 8, 64, 256):
        settings, said = resolved(f"nbs={nbs}", "batch=64")
        assert (settings.nbs, settings.batch, said) == (nbs, 64, [])


@pytest.mark.parametrize(
    ("words", "devices", "batch"),
    [
        (("batch=64",), 1, 16),
        (("batch=16",), 4, 4),
        (("batch=2",), 4, 2),
        (("batch=16",), 32, 1),
        (("batch=64", "nbs_scope=device"), 4, 16),
        (("batch=auto",), 4, "auto"),
    ],
)
def test_a_lowered_nominal_batch_is_that_of_any_devices_and_micro_batches(words, devices, batch):
    """Else a step would have batch x devices images, and a learning rate for so many."""
    settings, said = resolved(*words, devices=devices)
    assert (settings.nbs, settings.batch) == (16, batch)
    assert len(said) == 1 + (f"batch={batch}" not in words)


def test_a_nominal_batch_of_64_leaves_larger_micro_batches_alone():
    settings, _ = resolved("batch=128", images=5000)
    assert (settings.nbs, settings.batch) == (64, 128)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("lr0=0.001",), 1),
        (("lr0=0.01",), 0),
        ((), 0),
        (("lr0=0.001", "optimizer=MuSGD"), 0),
        (("lr0=0.001", "optimizer=AdamW"), 0),
        (("lr0=0.001", "recipe=public"), 0),  # which takes AdamW for a short run
    ],
)
def test_a_rate_that_was_written_for_another_optimizer_is_told(words, told):
    said = []
    settings = load_settings(Settings, None, ["data=d", "epochs=3", "nbs=16", *words])
    warn_of_rate(settings, chosen_optimizer(settings, Cut(16, 1), 200, 3), said.append)
    assert len(said) == told
    assert all("optimizer=AdamW" in line for line in said)
