"""Apple's GPUs have no float64: nothing that runs on a device may ask for one.

There is no such GPU here, so the rule is held on the CPU, and there for everything: whatever torch computes in a run
and in a prediction has no tensor of 64-bit floats, given or returned. What numpy does stays on the host.
"""

import pytest
import torch
from scenes import TINY, write_dataset
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import detector
from detector.model import selection

DOUBLE = (torch.float64, torch.complex128)


class NoDouble(TorchDispatchMode):
    """A mode in which an operation that takes or makes 64-bit floats fails, with its name."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for value in tree_leaves((arguments, options, result)):
            assert not (isinstance(value, torch.Tensor) and value.dtype in DOUBLE), f"{function} has a float64 tensor"
        return result


def test_the_mode_finds_doubles():
    with NoDouble():
        torch.zeros(3) + 1.5
        for action in (lambda: torch.zeros(3).double(), lambda: torch.arange(3, dtype=torch.float64)):
            with pytest.raises(AssertionError, match="has a float64 tensor"):
                action()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=4, val=2)


@pytest.fixture
def scaler_as_on_apples(monkeypatch):
    """Torch's loss scaler computes one number in float64, but not on Apple's GPUs, by its own choice."""
    unscale = torch.amp.GradScaler.unscale_

    def unscale_unseen(scaler, optimizer):
        with _disable_current_modes():
            unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_unseen)


def train(folder, data, **settings):
    common = {"model": str(TINY), "imgsz": 64, "batch": 2, "nbs": 4, "workers": 0, "device": "cpu", "epochs": 1}
    with NoDouble():
        return detector.train(data=data, project=folder, plots=False, **(common | settings))


@pytest.fixture
def suppression_as_on_apples(monkeypatch):
    """Of a device without float64 the overlap is compared on the host; `test_postprocess.py` holds that it is."""
    greedy = selection._greedy

    def greedy_unseen(*arguments):
        with _disable_current_modes():
            return greedy(*arguments)

    monkeypatch.setattr(selection, "_greedy", greedy_unseen)


@pytest.mark.slow
@pytest.mark.usefixtures("scaler_as_on_apples")
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "SGD", "amp": "fp32"},
        {"optimizer": "AdamW", "amp": "fp16"},
        {"bn": "frozen", "checkpoint": "all", "amp": "bf16"},
    ],
    ids=lambda settings: settings["amp"],
)
def test_training_asks_for_no_float64(tmp_path, data, settings, monkeypatch):
    """But for the validation, which is below."""
    monkeypatch.setattr("detector.run.loop.validate", lambda *_: None)
    train(tmp_path, data, val=False, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("suppression_as_on_apples")
def test_validation_and_prediction_ask_for_no_float64(tmp_path, data):
    result = train(tmp_path, data)
    found = detector.load(result.best, device="cpu")
    with NoDouble():
        assert len(found.predict(data.parent / "images" / "val", conf=0.0)) == 2


@pytest.mark.usefixtures("suppression_as_on_apples")
def test_selecting_detections_asks_for_no_float64():
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 500, 4, generator=generator) * 50
    boxes_xyxy = torch.cat((corners[..., :2], corners[..., :2] + corners[..., 2:]), dim=-1)
    with NoDouble():
        found = selection.non_max_suppression(boxes_xyxy, torch.rand(2, 500, 3, generator=generator), conf=0.5, iou=0.7)
    assert all(len(one.scores) for one in found)
