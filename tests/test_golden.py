"""The first windows of a fixed run, in numbers: a change of the mathematics, however small, is a change of a file.

`golden/losses.csv` holds what each window reported, of a network with one head, and `golden/losses26.csv` of one with
two. After a change that is meant, write them again and commit them with it, so that the history says what moved and
why:

    python tests/test_golden.py

The run is all in fp64. Its images, boxes and first weights come from the raw stream of PCG64, which numpy promises
never to change; what torch or OpenCV would draw is nowhere in it.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scenes import TINY, TINY26
from test_step import GAINS, new_state, step_of

from detector.data.batch import Batch
from detector.step.ema import Ema
from detector.step.optim import Choice, build_optimizer
from detector.step.plan import Cut, epoch_windows, split
from detector.step.schedule import Leg, Schedule
from detector.step.statistics import set_modes

GOLDEN = Path(__file__).parent / "golden"
MODELS = {"losses": TINY, "losses26": TINY26}  # one head and two, by the names of their files
WINDOWS = 10
SIZE, BOXES = 64, [2, 0, 1, 5, 0, 3, 1, 9, 0, 0, 0, 0, 2, 1, 1, 4, 0, 2, 1, 0, 6, 1, 3]  # pixels; boxes of each image
CUT, WARMUP, EPOCHS = Cut(batch=4, accumulate=3), 1.5, 4  # windows of 4 to 12 images, in warmup and after it
OPTIMIZERS = {"SGD": Choice("SGD", 0.005, 0.937), "AdamW": Choice("AdamW", 0.001, 0.9)}
BIAS_LR = {"SGD": 0.02, "AdamW": 0.0}  # where warmup starts it


def uniform(stream, *shape):
    """Numbers in 0..1 from the raw bits of a generator."""
    count = int(np.prod(shape))
    return torch.from_numpy((stream.random_raw(count) >> np.uint64(11)) * 2.0**-53).reshape(shape)


def data_set(stream):
    """All images as one batch: noise, with boxes of 3 pixels up to half of the image."""
    images = (uniform(stream, len(BOXES), SIZE, SIZE, 3) * 256).to(torch.uint8)
    side = uniform(stream, sum(BOXES), 2) * (SIZE / 2 - 3) + 3
    low = uniform(stream, sum(BOXES), 2) * (SIZE - side)
    classes = (uniform(stream, sum(BOXES)) * 2).long()
    owners = torch.repeat_interleave(torch.arange(len(BOXES)), torch.tensor(BOXES))
    boxes_xyxy, nothing = torch.cat((low, low + side), dim=1).float(), torch.zeros(0, dtype=torch.int64)
    return Batch(images, boxes_xyxy, classes, owners, samples=torch.arange(len(BOXES)), bad=nothing)


def first_state(stream, choice, model):
    """Weights of the size that torch starts with, norms and biases a little off their start; norms learn."""
    state = new_state(torch.float64, model=model)
    with torch.no_grad():
        for parameter in [one for branch in state.network.branches() for one in branch]:
            noise = 2 * uniform(stream, *parameter.shape) - 1
            if parameter.ndim == 4:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(noise / 10)
    set_modes(state.network, freeze_norms=False)
    state.optimizer = build_optimizer(state.network, choice, decay=0.0005)
    state.ema = Ema(state.network, 2000.0)  # of which the file tells
    return state


def gains(state):
    """Of the first epoch and of the last."""
    if len(state.network.branches()) == 1:
        return [GAINS], None
    return tuple([[share * gain for gain in GAINS] for share in shares] for shares in ((0.8, 0.2), (0.1, 0.9)))


def rows(model, optimizer):
    """What each of the first windows reports, and how far the averaged weights are from the weights after it."""
    choice, stream = OPTIMIZERS[optimizer], np.random.PCG64(2024)
    images, state = data_set(stream), first_state(stream, choice, MODELS[model])
    legs = (Leg(0, EPOCHS, "linear"),)
    schedule = Schedule(legs, WARMUP, choice.lr0, 0.01, choice.momentum, 0.8, BIAS_LR[optimizer], *gains(state))
    plan = [window for epoch in range(EPOCHS) for window in epoch_windows(len(BOXES), CUT, 0, epoch, warmup=WARMUP)]
    for number, window in enumerate(plan[:WINDOWS], start=1):
        end = window.done + window.images
        progress = window.epoch + end / len(BOXES)
        rates = schedule.rates(progress)
        in_turn = replace(window, micro_batches=split(range(window.done, end), CUT.batch, 1))  # no order is drawn
        sizes = [len(micro) for micro in in_turn.micro_batches[0]]
        _, report = step_of(images.part(window.done, end), sizes, state=state, rates=rates)
        pairs = zip(state.network.parameters(), state.ema.network.parameters(), strict=True)
        behind = torch.cat([(one - other).detach().flatten() for one, other in pairs]).norm()
        about = {"optimizer": optimizer, "window": number, "images": "+".join(map(str, sizes))}
        losses = dict(zip(state.network.head.terms, report.losses, strict=True))
        yield about | losses | {"weight": report.weight, "norm": report.norm, "behind": float(behind)}


def write(model):
    found = [row for optimizer in OPTIMIZERS for row in rows(model, optimizer)]
    with (GOLDEN / f"{model}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, found[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_first_windows_report_what_they_always_did(model, optimizer):
    with (GOLDEN / f"{model}.csv").open(newline="") as file:
        expected = [row for row in csv.DictReader(file) if row["optimizer"] == optimizer]
    found = list(rows(model, optimizer))
    assert len(found) == len(expected) == WINDOWS
    for now, then in zip(found, expected, strict=True):
        for key, value in now.items():
            if isinstance(value, float):
                same = value == pytest.approx(float(then[key]), rel=1e-9, abs=0)
            else:
                same = str(value) == then[key]
            assert same, f"window {now['window']}: {key} was {then[key]} and is {value!r}"


if __name__ == "__main__":
    for name in MODELS:
        write(name)
