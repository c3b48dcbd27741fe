"""Memory runs out: the same images again in finer micro-batches, on all ranks, and the trajectory stays."""

import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import shortage_worker
import torch
from scenes import TINY, cut_batch, random_batch, write_dataset
from shortage_worker import BATCH, PLACES, Shortage, run_of, take
from test_step import RATES, new_state
from test_training import run as detector
from test_training import weights

from detector import checkpoint_file
from detector.data.batch import blank_batch, recut_batches
from detector.data.image import Letterbox
from detector.errors import TrainingError
from detector.evaluation.evaluate import detect
from detector.inference import infer as infer_module
from detector.inference.detector import Detector
from detector.inference.infer import JUDGED, NetworkRuntime
from detector.memory import OutOfMemoryError, attempt, is_out_of_memory
from detector.run import recover
from detector.step.plan import Window, recut, split
from detector.step.statistics import set_modes
from detector.step.step import StepReport

WORKER = Path(shortage_worker.__file__).name
LIMITED = Path(__file__).with_name("limited.py")


def everything(state):
    """All tensors of a state, copied."""
    found = {f"model {key}": value for key, value in state.network.state_dict().items()}
    found |= {f"ema {key}": value for key, value in state.ema.network.state_dict().items()}
    for number, one in state.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {number} {key}": value for key, value in one.items()}
    return {key: value.clone() for key, value in found.items()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("stage", "number"), [*PLACES, ("forward", 4), ("backward", 4)])
def test_a_step_without_memory_changes_nothing_to_the_bit(monkeypatch, stage, number, first):
    """Also not BatchNorm's statistics and the optimizer, whether it has a state yet or not."""
    state = new_state()
    set_modes(state.network, freeze_norms=False)
    run = run_of(state)
    if not first:
        take(run, seed=0)
    before, counted = everything(state), (state.step, state.skipped, state.ema.steps)
    monkeypatch.setattr(recover, "cut_finer", lambda run, window: pytest.fail("cut"))
    Shortage(state, stage, number)
    with pytest.raises(pytest.fail.Exception):
        take(run, seed=1)
    after = everything(state)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (state.step, state.skipped, state.ema.steps) == counted


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """What steps end with where memory never runs out, on one rank."""
    out = tmp_path_factory.mktemp("never") / "out.pt"
    assert ranks.run(1, WORKER, out, "-1").returncode == 0
    return torch.load(out, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("starts", [[0], [0, 2]], ids=["replicas", "stages"])
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_may_run_out_anywhere_on_either_rank(tmp_path, never, rank, starts):
    """In forward, backward and optimizer, in the first micro-batch and the last: no rank waits; the same weights."""
    done = ranks.run(2, WORKER, tmp_path / "out.pt", rank, starts)
    assert done.returncode == 0, done.stderr
    failing = torch.load(tmp_path / "out.pt", weights_only=True)
    assert never["sizes"] == [BATCH] * len(PLACES)
    assert failing["sizes"] == [BATCH // 2] * len(PLACES)
    assert len(failing["lines"]) == len(PLACES)
    for part in ("model", "ema"):
        for name, value in never[part].items():
            torch.testing.assert_close(failing[part][name], value, rtol=1e-9, atol=1e-12)


def test_micro_batches_are_halved_until_they_fit_and_grow_again(monkeypatch):
    said, sizes, state = [], [], new_state()
    real = recover.train_window

    def fits_two(state, gradients, rules, window, micro_batches, rates):
        sizes.append(len(window.micro_batches[0][0]))
        if sizes[-1] > 2:
            raise OutOfMemoryError
        return real(state, gradients, rules, window, micro_batches, rates)

    monkeypatch.setattr(recover, "train_window", fits_two)
    run = run_of(state, said.append, batch=8, grow_after=3)
    for seed in range(5):
        assert take(run, seed).applied
    assert sizes == [8, 4, 2, 2, 2, 4, 2, 2]
    assert said[0].startswith("memory    ran out at 8 images a micro-batch: the same 16 images again as 4 x 4")
    assert state.step == 5


def test_one_image_that_does_not_fit_stops_with_what_would_help(monkeypatch):
    def never(*arguments):
        raise OutOfMemoryError

    monkeypatch.setattr(recover, "train_window", never)
    with pytest.raises(TrainingError, match=r"with one image a micro-batch.*checkpoint=all, offload=true.*last\.pt"):
        take(run_of(new_state()), seed=0)


def test_one_image_that_does_not_fit_leaves_stages_fewer_at_once(monkeypatch):
    def fits_one(state, gradients, rules, window, micro_batches, rates):
        depths.append(rules.pipeline.depth)
        if rules.pipeline.depth > 1:
            raise OutOfMemoryError
        return StepReport((), 1.0, 1.0, True, 16)

    monkeypatch.setattr(recover, "train_window", fits_one)
    said, depths, state = [], [], new_state()
    run = run_of(state, said.append, batch=1)
    run.rules = replace(run.rules, pipeline=SimpleNamespace(depth=3))
    assert take_whole(run).applied
    assert take_whole(run).applied
    assert depths == [3, 2, 1, 1]
    assert said[-1] == (
        "memory    ran out at 1 image a micro-batch: the same images again with 1 of them in the pipeline at once, and "
        "so from here on"
    )


def take_whole(run):
    cut, whole = split(range(16), 1, 1), random_batch([1] * 16)
    return recover.take(run, Window(0, 0, cut), [whole.part(i, i + 1) for i in range(16)], RATES)


@pytest.mark.parametrize("sizes", [[3, 3, 2], [4, 4], [1] * 8, [8], [5, 3]])
def test_images_cut_again_are_those_that_one_batch_would_be_cut_into(sizes):
    whole = random_batch([2, 0, 3, 1, 0, 5, 1, 2])
    expected = cut_batch(whole, sizes)
    wanted = [one.samples.tolist() for one in expected]
    for found, one in zip(recut_batches(cut_batch(whole, [3, 3, 2]), wanted), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))


def test_windows_cut_again_keep_images_and_devices_and_blanks():
    window = Window(0, 0, split(range(5), 2, 2))
    assert recut(window, 1).micro_batches == (((0,), (1,), (2,)), ((3,), (4,), ()))
    cut = recut_batches(cut_batch(random_batch([1, 2]), [1, 1]), [[0], [1], []])
    assert [len(one.samples) for one in cut] == [1, 1, 0]
    assert [len(one.samples) for one in recut_batches([blank_batch(64)], [(), ()])] == [0, 0]


def test_the_allocators_own_errors_are_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert attempt(lambda: torch.empty(2**60, dtype=torch.uint8)) is None
    with pytest.raises(ValueError, match="another"):
        attempt(lambda: (_ for _ in ()).throw(ValueError("another")))


class Holding(torch.autograd.Function):
    """Keeps what it is given as long as its part of the graph lives."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_failed_backward_pass_leaves_nothing_in_memory():
    """Two paths, one of which fails: what the other was to do must not wait for the next backward pass."""

    def fail(gradient):
        raise torch.OutOfMemoryError

    def action():
        x = torch.ones(3, requires_grad=True)
        kept = type("Kept", (), {})()
        alive.append(weakref.ref(kept))
        failing, other = Holding.apply(x * 2, None), Holding.apply(x * 3, kept)
        failing = failing * 1
        failing.register_hook(fail)
        (failing + other).sum().backward()

    alive = []
    assert attempt(action) is None
    assert alive[0]() is None


@pytest.mark.parametrize("place", ["network", "selection"])
def test_what_is_detected_does_not_depend_on_the_memory(monkeypatch, place):
    """Memory runs out for more than two images, in validation and in prediction: both halve until it fits."""
    network, sizes = new_state().network.eval(), []
    images = torch.zeros(7, 64, 64, 3, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    batch = images, [Letterbox(64, 64, 1.0, 1.0, 0, 0)] * 7, list(range(7))
    detector = Detector(NetworkRuntime(network, "cpu"), ("a", "b"), 64)

    def found():
        return [
            one for _, one in detect(NetworkRuntime(network, "cpu"), [batch], JUDGED._replace(conf=0.1))
        ], detector.predict(list(images.numpy()), 0.1)

    validated, predicted = found()
    owner, name = (infer_module, "infer") if place == "network" else (type(network.head), "select")
    real = getattr(owner, name)

    def fits_two(one, tensor, *more):
        sizes.append(len(tensor))
        if len(tensor) > 2:
            raise torch.OutOfMemoryError
        return real(one, tensor, *more)

    monkeypatch.setattr(owner, name, fits_two)
    again, too = found()
    assert sizes == [7, 4, 2, 2, 2, 1] * 2
    assert len(validated[0].scores)
    for one, other in zip(again, validated, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)
    for one, other in zip(too, predicted, strict=True):
        np.testing.assert_allclose(one.boxes, other.boxes, rtol=1e-4)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    data = write_dataset(tmp_path_factory.mktemp("data"), train=16, size=256)
    return [f"data={data}", f"model={TINY}", "imgsz=256", "batch=16", "nbs=16", "workers=0", "plots=false", "epochs=2",
            "amp=fp32", "bn=frozen", "optimizer=SGD", "device=cpu", "val=false"]  # fmt: skip


@pytest.mark.slow
def test_a_process_with_too_little_memory_ends_with_the_weights_of_one_with_enough(tmp_path, common):
    """The allocator's own error at a real limit; and the finer cut is kept, saved, and said on a resume."""
    common = [*common, "epochs=3"]  # the last of which is resumed
    assert detector("train", *common, f"project={tmp_path}", "name=enough") == 0
    command = [sys.executable, LIMITED, "215", "train", *common, f"project={tmp_path}", "name=little", "save_period=1"]
    give_back = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed, to the system at once
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **give_back})
    assert done.returncode == 0, done.stderr
    assert "memory    ran out at 16 images a micro-batch: the same 16 images again" in done.stdout
    little, expected = weights(tmp_path / "little"), weights(tmp_path / "enough")
    for name, value in little.items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)

    folder = tmp_path / "little"
    batch = checkpoint_file.read(folder / "weights" / "last.pt")["batch"]
    assert batch < 16
    os.replace(folder / "weights" / "epoch2.pt", folder / "weights" / "last.pt")
    assert detector("train", f"resume={folder}") == 0
    assert checkpoint_file.read(folder / "weights" / "last.pt")["batch"] == batch
