"""Checkpointing and offload change where activations are, and no bit of a step; the assigner fills no dense table."""

import copy
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import ranks
import torch
from scenes import TINY, cut_batch, random_batch, write_dataset
from test_distributed import WINDOWS, WORKER
from test_step import RATES
from test_training import weights
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from detector.config.settings import Settings, load_settings
from detector.loss.criterion import DetectionLoss
from detector.model.network import build_network
from detector.model.norm import set_norms
from detector.model.recompute import rerun
from detector.precision import Precision
from detector.step import offload
from detector.step.ema import Ema
from detector.step.gradients import GradientSum
from detector.step.optim import Choice, build_optimizer
from detector.step.plan import Window
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import StepRules, train_window

BOXES = [2, 9, 0, 3, 1]


def new_state(model=TINY, norm="batch", checkpoint="off", amp="fp32"):
    """A fresh network in training; the loss scaler of fp16 starts low enough not to overflow."""
    network = build_network(model, nc=2, seed=0)
    with torch.no_grad():  # predictions that overlap the boxes, so that every term has a gradient
        for branch in network.head.cv3:
            branch[-1].bias.fill_(-1.0)
    if norm == "sync":
        nn.SyncBatchNorm.convert_sync_batchnorm(network)  # alone it runs on a CPU too
    else:
        set_norms(network, norm, torch.device("cpu"), world_size=1)
    set_modes(network, norm == "frozen")
    network.set_checkpoint(checkpoint)
    optimizer = build_optimizer(network, Choice("SGD", 0.01, 0.9), decay=0.0005)
    state = TrainState(network, Ema(network), optimizer, Precision(amp, "cpu"))
    state.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=amp == "fp16")
    return state


def step(state, batch, sizes, keeping=nullcontext):
    """Train one window, cut into micro-batches of these sizes; returns what it did."""
    micro_batches = cut_batch(batch, sizes)
    samples = tuple(tuple(int(sample) for sample in micro.samples) for micro in micro_batches)
    criterion = DetectionLoss(state.network.head)
    rules = StepRules(criterion, clip_norm=10.0, keeping=keeping)
    return train_window(state, GradientSum(state.network), rules, Window(0, 0, (samples,)), micro_batches, RATES)


def outcome(state, reports):
    """All that a step leaves: losses and norms, gradients, weights, statistics, counters, averages."""
    left = {"report": torch.tensor([[*report.losses, report.weight, report.norm] for report in reports])}
    left |= {f"gradient {name}": one.grad for name, one in state.network.named_parameters() if one.grad is not None}
    left |= state.network.state_dict()
    return left | {f"average {name}": value for name, value in state.ema.network.state_dict().items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def two_windows(sizes, amp="fp32", keeping=nullcontext, size=64, **options):
    """Two steps, so that the second starts from statistics and weights that moved."""
    state = new_state(amp=amp, **options)
    reports = [step(state, random_batch(BOXES, size, seed=seed), sizes, keeping) for seed in (0, 1)]
    assert all(report.applied for report in reports)
    return outcome(state, reports)


def kept_bytes(network, images):
    """Bytes that a forward pass keeps for the backward pass; each storage counts once."""
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        predictions = network(images)  # held, so that no address is used again
    assert predictions.logits.requires_grad
    return sum(found.values())


# --- checkpointing


@pytest.mark.parametrize("amp", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpoint", ["stages", "all"])
@pytest.mark.parametrize("norm", ["batch", "frozen", "sync"])
def test_a_checkpointed_step_is_the_plain_one_to_the_bit(norm, checkpoint, amp):
    plain = two_windows([3, 2], amp, norm=norm)
    assert_same(two_windows([3, 2], amp, norm=norm, checkpoint=checkpoint), plain)
    moved = not torch.equal(plain["model.0.bn.running_mean"], torch.zeros(8))
    assert moved == (norm != "frozen")
    assert plain["model.0.bn.num_batches_tracked"] == (4 if moved else 0)


@pytest.mark.parametrize("checkpoint", ["stages", "all"])
def test_a_checkpointed_v11n_is_the_plain_one_to_the_bit(checkpoint):
    plain = two_windows([5], "bf16", model="v11n")
    assert_same(two_windows([5], "bf16", model="v11n", checkpoint=checkpoint), plain)


def test_checkpoints_keep_less():
    network, images, kept = new_state("v11n").network, torch.rand(2, 3, 64, 64), {}
    for checkpoint in ("off", "stages", "all"):
        network.set_checkpoint(checkpoint)
        kept[checkpoint] = kept_bytes(network, images) - sum(one.numel() * 4 for one in network.parameters())
    assert kept["stages"] < kept["off"] / 2
    assert kept["all"] < kept["stages"]


def test_a_second_run_happens_and_moves_no_statistics():
    norm, inputs = nn.BatchNorm2d(3), []
    norm.register_forward_pre_hook(lambda module, given: inputs.append((module.running_mean.clone(), given[0].clone())))
    module = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.SiLU())
    out = rerun(module, torch.rand(2, 3, 4, 4))
    buffers = dict(norm.named_buffers())
    after = {name: buffer.clone() for name, buffer in buffers.items()}
    out.sum().backward()
    assert len(inputs) == 2
    assert all(torch.equal(a, b) for a, b in zip(*inputs, strict=True))  # the same images, the same statistics
    for name, buffer in norm.named_buffers():
        assert buffer is buffers[name]  # what optimizer and average know
        assert torch.equal(buffer, after[name])
    assert norm.num_batches_tracked == 1


def test_it_can_run_a_third_time():
    norm = nn.BatchNorm2d(3)
    x = torch.rand(2, 3, 4, 4)
    loss = rerun(norm, x).square().sum()
    loss.backward(retain_graph=True)
    first = norm.weight.grad.clone()
    loss.backward()
    assert torch.equal(norm.weight.grad, 2 * first)


def test_random_numbers_are_those_of_a_plain_call():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    found = []
    with torch.random.fork_rng():
        for call in (lambda x: module(x), lambda x: rerun(module, x)):
            torch.manual_seed(5)
            module.zero_grad(set_to_none=True)
            call(torch.ones(4, 8)).square().sum().backward()
            found.append([*(one.grad.clone() for one in module.parameters()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_evaluation_never_checkpoints():
    network, images = new_state(checkpoint="all").network.eval(), torch.rand(2, 3, 64, 64)
    kept = kept_bytes(network, images)
    network.set_checkpoint("off")
    assert kept == kept_bytes(network, images)


def test_a_checkpointed_network_has_the_same_names_parameters_and_copies():
    network = build_network(TINY, nc=2, seed=0)
    names, branches = list(network.state_dict()), network.branches()
    network.set_checkpoint("all")
    assert list(network.state_dict()) == names
    assert all(a is b for a, b in zip(network.branches()[0], branches[0], strict=True))
    copied = copy.deepcopy(network.train())
    copied(torch.rand(2, 3, 64, 64)).boxes.sum().backward()
    assert copied.model[0].conv.weight.grad is not None
    assert network.model[0].conv.weight.grad is None
    assert network.model[0].bn.num_batches_tracked == 0


# --- offload


@pytest.fixture
def moved(monkeypatch):
    """Offload moves everything, however small; returns the sizes of what it moved."""
    sizes = []
    original = offload.Host.__init__

    def counted(self, storage):
        sizes.append(storage.nbytes())
        original(self, storage)

    monkeypatch.setattr(offload.Host, "__init__", counted)
    monkeypatch.setattr(offload, "LEAST", 0)
    return sizes


@pytest.mark.parametrize("checkpoint", ["off", "stages", "all"])
@pytest.mark.parametrize("amp", ["fp32", "bf16"])
def test_an_offloaded_window_of_16_is_the_plain_one_to_the_bit(moved, amp, checkpoint):
    found = []
    for options in ({}, {"keeping": offload.offloaded}):
        state = new_state(amp=amp, checkpoint=checkpoint if options else "off")
        report = step(state, random_batch([2, 9, 0, 3] * 4), [16], **options)
        found.append(outcome(state, [report]))
        assert bool(moved) == bool(options)
    assert_same(*found)


def test_small_tensors_and_weights_stay(monkeypatch):
    weight = nn.Parameter(torch.rand(600, 600))  # more than a MiB
    big, small = torch.rand(600, 600, requires_grad=True) * 1, torch.rand(100, 100, requires_grad=True) * 1
    hooks = offload.Offload()
    assert isinstance(hooks.pack(big), offload.Placed)
    assert hooks.pack(small) is small
    assert hooks.pack(weight) is weight
    cast = weight.to(torch.float16)
    monkeypatch.setattr(offload, "LEAST", 0)
    assert hooks.pack(cast) is cast  # autocast's copy
    assert isinstance(hooks.pack(small), offload.Placed)


def test_what_is_kept_twice_is_stored_once_and_comes_back_with_its_strides(moved):
    x = torch.rand(2, 8, 6, 6).to(memory_format=torch.channels_last)
    half = x.chunk(2, dim=1)[1]
    hooks = offload.Offload()
    kept = [hooks.pack(one) for one in (x, x.detach(), half, half)]
    assert moved == [x.untyped_storage().nbytes()]
    for one, before in zip(kept, (x, x, half, half), strict=True):
        back = hooks.unpack(one)
        assert torch.equal(back, before)
        assert back.stride() == before.stride()
        assert back.data_ptr() != before.data_ptr()


def test_a_tensor_that_is_written_to_is_another(moved):
    x = torch.zeros(4)
    hooks = offload.Offload()
    before = hooks.pack(x)
    x.add_(1)
    after = hooks.pack(x)
    assert torch.equal(hooks.unpack(before), torch.zeros(4))
    assert torch.equal(hooks.unpack(after), torch.ones(4))
    other = hooks.pack(torch.full((4,), 2.0))
    assert torch.equal(hooks.unpack(other), torch.full((4,), 2.0))


def test_memory_that_is_used_again_is_not_taken_for_what_it_was(moved):
    hooks, kept = offload.Offload(), []
    for number in range(50):  # the allocator gives the same address again
        kept.append(hooks.pack(torch.full((64,), float(number))))
    assert [hooks.unpack(one)[0].item() for one in kept] == list(range(50))


def test_host_memory_is_free_after_the_backward_pass(moved):
    hooks, state = offload.Offload(), new_state()
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        predictions = state.network(torch.rand(2, 3, 64, 64))
    loss = predictions.boxes.sum() + predictions.logits.sum()
    assert len(hooks.hosts) > 50
    loss.backward()
    del predictions, loss
    assert len(hooks.hosts) == 0


# --- both, in runs


@pytest.mark.slow
def test_ranks_with_checkpoints_and_offload_take_the_same_steps_with_one_reduction(tmp_path):
    found = []
    for name, checkpoint in (("plain", "off"), ("saving", "all")):
        out = tmp_path / f"{name}.pt"
        done = ranks.run(2, WORKER.name, out, json.dumps(WINDOWS), "-1", checkpoint)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(out, weights_only=True))
    plain, saving = found
    for ours, theirs in zip(saving["rows"], plain["rows"], strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]
        assert ours[2] == theirs[2] == 1
    assert_same(saving["weights"], plain["weights"])


@pytest.mark.slow
@pytest.mark.parametrize(("bn", "processes"), [("frozen", 1), pytest.param("batch", 2, marks=pytest.mark.long)])
def test_a_run_with_checkpoints_and_offload_ends_with_the_weights_of_one_without(tmp_path, bn, processes):
    def train(*words):
        done = ranks.run(processes, "detector", "train", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    data = write_dataset(tmp_path)
    common = [f"data={data}", f"model={TINY}", "imgsz=64", "nbs=8", "batch=2", "workers=0", "plots=false", "epochs=2",
              "amp=bf16", "device=cpu", f"bn={bn}", f"project={tmp_path}"]  # fmt: skip
    train(*common, "name=plain")
    assert "memory    checkpoint all, offload on" in train(*common, "name=saving", "checkpoint=all", "offload=true")
    plain, saving = weights(tmp_path / "plain"), weights(tmp_path / "saving")
    assert all(torch.equal(saving[name], plain[name]) for name in plain)


@pytest.mark.parametrize("checkpoint", ["off", "all"])
def test_off_is_a_word_in_yaml_too(tmp_path, checkpoint):
    chosen = load_settings(Settings, None, ["data=d.yaml", f"checkpoint={checkpoint}", "offload=true"])
    assert chosen.checkpoint == checkpoint
    (tmp_path / "saved.yaml").write_text(chosen.to_yaml())
    again = load_settings(Settings, tmp_path / "saved.yaml")
    assert (again.checkpoint, again.offload) == (checkpoint, True)


# --- the assigner


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.long
def test_assigning_64_crowded_images_takes_less_than_a_gib():
    """64 images at 640 pixels with 300 boxes each: one dense fp32 table (images, boxes, anchors) would be 0.6 GiB."""
    script = Path(__file__).parents[1] / "scripts" / "benchmark_memory.py"
    command = [sys.executable, script, "--only=sparse", "--crowd=64", "--boxes=300"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["weight"] > 1000
    assert 0 < found["peak"] < 1024  # MiB
