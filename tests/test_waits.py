"""What would make a GPU wait for its host: an operation whose result, or the shape of it, the host must know."""

import pytest
import torch
from scenes import TINY, TINY26, random_batch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from detector.loss.criterion import DetectionLoss
from detector.model.network import build_network
from detector.step import step
from detector.step.gradients import GradientSum
from detector.step.plan import Window
from detector.step.state import TrainState
from detector.step.step import StepRules, train_window

aten = torch.ops.aten
ASKS = {  # for a value, or for how many there are
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount,
    aten.repeat_interleave, aten._unique2, aten.unique_consecutive, aten.unique_dim,
}  # fmt: skip
INDEXES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Waits(TorchDispatchMode):
    """Notes the operations of this thread that ask."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operation = function.overloadpacket
        masked = operation in INDEXES and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if operation in ASKS or masked:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


def watched(monkeypatch, waits, owner, name):
    real = getattr(owner, name)

    def wrapped(*arguments):
        with waits:
            return real(*arguments)

    monkeypatch.setattr(owner, name, wrapped)


def test_the_count_sees_what_asks():
    x = torch.arange(6.0)
    for ask in (
        lambda: x[0].item(), lambda: bool(x[0]), lambda: x[x > 2], lambda: x.nonzero(), lambda: x.long().bincount(),
        lambda: torch.repeat_interleave(x, x.long()), lambda: x.clone().__setitem__(x > 2, x[:3]), lambda: x.unique(),
    ):  # fmt: skip
        with Waits() as waits:
            ask()
        assert waits.found


@pytest.mark.parametrize("model", [TINY, TINY26], ids=["one head", "two heads"])
def test_a_window_waits_for_its_device_once(monkeypatch, model):
    """At its end, where the losses and the norm are told; no micro-batch does, with boxes, many or none."""
    network, waits, told = build_network(model, nc=2, seed=0), Waits(), []
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    state, rules = TrainState.of(network, optimizer), StepRules(DetectionLoss(network.head), clip_norm=10.0)
    real_cells, real_on_host = DetectionLoss.cells, step.on_host

    def cells(*arguments):  # of boxes in the host's memory
        with _disable_current_modes():
            return real_cells(*arguments)

    monkeypatch.setattr(DetectionLoss, "cells", cells)
    watched(monkeypatch, waits, step, "add_up")
    watched(monkeypatch, waits, step, "finish_gradient")
    monkeypatch.setattr(step, "on_host", lambda *numbers: told.append(numbers) or real_on_host(*numbers))
    batches = [random_batch(boxes) for boxes in ([2, 0], [30, 1], [0, 0])]
    window = Window(0, 0, (((0, 1), (2, 3), (4, 5)),))
    report = train_window(state, GradientSum(network), rules, window, batches)
    assert report.applied
    assert waits.found == []
    assert len(told) == 1
