"""MuSGD against its formulas in float64, parameter by parameter; batches, ranks and failures change nothing."""

import copy
import math
import os
import shutil

import pytest
import ranks
import torch
from scenes import MINUTE, random_batch, write_dataset
from shortage_worker import Shortage, run_of
from shortage_worker import take as take_step
from test_shortage import everything
from test_step import new_state, step_of
from test_training import run, same, train
from torch import nn

from detector import checkpoint_file
from detector.model.network import build_network
from detector.run import recover
from detector.run.build import class_parameters
from detector.step import muon, optim
from detector.step.muon import batched, iterated, orthogonalized, plan
from detector.step.musgd import MuSGD, as_matrix, as_weight
from detector.step.optim import Choice, build_optimizer, parameter_groups
from detector.step.state import TrainState

SHAPES = [
    (64, 32, 3, 3), (48, 32, 3, 3), (32, 64, 1, 1), (80, 64, 1, 1), (64, 1, 3, 3), (16, 3, 6, 6), (1, 40, 1, 1),
    (16, 8, 5, 1), (16, 8, 1, 5), (96, 8), (8, 96), (24, 24), (70,), (3, 4, 5),
]  # fmt: skip
MU, LR = 0.9, 0.01


def rounded(x):
    return x.to(torch.bfloat16).double()


def exact(x):
    return x


def newton_schulz(u, rounding):
    """The matrix with its singular values brought near 1, from the formula, in float64."""
    x = rounding(u / (u.norm() + 1e-7))
    if x.shape[0] > x.shape[1]:
        return newton_schulz(u.T, rounding).T
    for _ in range(5):
        a = rounding(x @ x.T)
        b = rounding(-4.7750 * a + 2.0315 * a @ a)
        x = rounding(3.4445 * x + b @ x)
    return x


def reference_step(w, g, m, v, *, lr, decay, rounding):
    """A step of one parameter, in float64; returns the weight and changes the momenta."""
    if w.ndim in (2, 4):
        m.copy_(MU * m + (1 - MU) * g)
        u = MU * m + (1 - MU) * g
        x = newton_schulz(u.reshape(len(u), -1), rounding).reshape(u.shape)
        w = w - lr * 0.2 * math.sqrt(max(1.0, g.shape[-2] / g.shape[-1])) * x
    g = g + decay * w
    v.copy_(MU * v + g)
    return w - lr * (g + MU * v)


def parameters_of(scale, layout=torch.channels_last):
    rng = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=rng) * scale for shape in SHAPES]
    return [nn.Parameter(one.to(memory_format=layout) if one.ndim == 4 else one) for one in made]


def musgd_of(parameters, decay=0.0, lr=LR, momentum=MU, **options):
    groups = [
        {"params": [p for p in parameters if p.ndim in (2, 4)], "muon": True, "name": "muon"},
        {"params": [p for p in parameters if p.ndim not in (2, 4)], "name": "biases"},
    ]
    optimizer = MuSGD(groups, lr=lr, momentum=momentum, **options)
    for group in optimizer.param_groups:
        group["weight_decay"] = decay
    return optimizer


def gradients_of(parameters, step, scale):
    rng = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=rng)
        parameter.grad = torch.empty_like(parameter).copy_(noise * scale)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(
    ("gradient", "decay", "start", "rounding", "tolerance"),
    [
        # The Muon move is nearly all of these. In exact arithmetic it is 1% away, with every intermediate rounded 2-3%.
        (1e-6, 0.0, 0.1, exact, 0.02),
        (1e-6, 0.0, 0.1, rounded, 5e-3),
        (1e-6, 3.0, 1e-4, rounded, 5e-3),  # decay of the weights as they were moved
        (1.0, 0.0005, 0.1, rounded, 1e-4),  # SGD is nearly all of it
    ],
)
def test_steps_are_those_of_the_formulas_in_float64(gradient, decay, start, rounding, tolerance, layout):
    ours = parameters_of(start, layout)
    optimizer = musgd_of(ours, decay)
    first = [one.detach().double() for one in ours]
    theirs, m, v = list(first), [torch.zeros_like(one) for one in first], [torch.zeros_like(one) for one in first]
    for step in range(5):
        gradients_of(ours, step, gradient)
        optimizer.step()
        for i, one in enumerate(ours):
            options = {"lr": LR, "decay": decay, "rounding": rounding}
            theirs[i] = reference_step(theirs[i], one.grad.double(), m[i], v[i], **options)
    for one, other, before in zip(ours, theirs, first, strict=True):
        away = float((one.detach() - other).norm() / (other - before).norm())
        # An fp32 weight of 0.1 is known to 4e-9, and a parameter without Muon's move moves by as little as 1e-7.
        assert away < (tolerance if one.ndim in (2, 4) or gradient == 1 else 0.1), one.shape


def test_sgds_part_is_torchs_sgd_to_the_bit():
    ours, theirs = parameters_of(0.1), parameters_of(0.1)
    optimizer = musgd_of(ours, 0.01)
    plain = torch.optim.SGD(theirs, lr=LR, momentum=MU, nesterov=True, weight_decay=0.01)
    for step in range(3):
        gradients_of(ours, step, 1.0)
        gradients_of(theirs, step, 1.0)
        optimizer.step()
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) == (one.ndim not in (2, 4))


def test_singular_values_come_near_one():
    rng = torch.Generator().manual_seed(1)
    for shape in [(64, 300), (300, 64), (9, 500)]:
        (x,) = orthogonalized([torch.randn(shape, generator=rng) * 1e-4])
        assert x.shape == shape
        values = torch.linalg.svdvals(x)
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.2


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-25, 1e-10, 1e10])
def test_any_size_of_a_gradient_gives_numbers(scale):
    (x,) = orthogonalized([torch.ones(4, 9) * scale])
    assert bool(torch.isfinite(x).all())
    assert float(x.abs().max()) < 1.2
    assert bool(x.any()) == (scale > 0)


def test_a_padded_batch_gives_what_its_matrices_give_one_by_one():
    rng = torch.Generator().manual_seed(2)
    matrices = [torch.randn(shape, generator=rng) for shape in [(40, 96), (33, 96), (96, 31), (1, 96)]]
    for one, alone in zip(iterated(matrices), matrices, strict=True):
        assert one.shape == alone.shape
        (expected,) = iterated([alone])
        assert float((one - expected).norm() / expected.norm()) < 2e-3  # sums in another order, then rounded


def test_batches_hold_each_matrix_once_and_little_padding(monkeypatch):
    network = build_network("v11n", 80)
    shapes = tuple((len(p), p[0].numel()) for p in parameter_groups(network, muon=True)["muon"])
    batches = batched(shapes)
    assert sorted(i for batch in batches for i in batch) == list(range(len(shapes)))
    assert len(batches) < len(set(shapes))
    for batch in batches:
        assert len({max(shapes[i]) for i in batch}) == 1
    work = sum(min(s) ** 2 * (2 * max(s) + min(s)) for s in shapes)
    assert sum(muon.cost(batch, shapes) for batch in batches) < 1.1 * work
    for count in (1, 2, 3, 8, 200):
        shares = plan(shapes, count).shares
        assert sorted(map(tuple, batches)) == sorted(tuple(batch) for share in shares for batch in share)
        loads = [sum(muon.cost(batch, shapes) for batch in share) for share in shares]
        largest = max(muon.cost(batch, shapes) for batch in batches)
        assert max(loads) <= sum(loads) / count + largest
    monkeypatch.setattr(muon, "MOST", 1)
    assert all(len(batch) == 1 for batch in batched(shapes))


def test_a_parameter_without_a_gradient_stays():
    parameters = parameters_of(0.1)
    optimizer = musgd_of(parameters, 0.1)
    gradients_of(parameters, 0, 1.0)
    parameters[0].grad = None
    before = [one.detach().clone() for one in parameters]
    optimizer.step()
    changed = [not torch.equal(one, other) for one, other in zip(parameters, before, strict=True)]
    assert changed == [False] + [True] * (len(SHAPES) - 1)
    for one in parameters:
        one.grad = None
    optimizer.step()


# --- groups


def counts(groups):
    return {name: len(group) for name, group in groups.items() if group}


def test_groups_of_a_v26n_with_two_heads():
    network = build_network("v26n", 3)
    assert counts(parameter_groups(network)) == {"weights": 126, "norms": 114, "biases": 126}
    assert counts(parameter_groups(network, muon=True, fast=class_parameters(network))) == {
        "muon": 96, "norms": 90, "biases": 96, "fast muon": 30, "fast norms": 24, "fast biases": 30,
    }  # fmt: skip


def test_groups_of_a_v11n():
    """Each trainable parameter once: 87 weights, 81 norm weights and as many biases, 6 of them of output layers."""
    network = build_network("v11n", 80)
    names = {parameter: name for name, parameter in network.named_parameters()}

    assert counts(parameter_groups(network)) == {"weights": 87, "norms": 81, "biases": 87}
    fast = class_parameters(network)
    groups = parameter_groups(network, muon=True, fast=fast)
    assert counts(groups) == {
        "muon": 72, "norms": 69, "biases": 72, "fast muon": 15, "fast norms": 12, "fast biases": 15,
    }  # fmt: skip
    for name, group in groups.items():
        for parameter in group:
            full = names[parameter]
            assert (".cv3." in full and full.startswith("model.23.")) == name.startswith("fast")
            assert full.endswith("bias") == name.endswith("biases")
            assert (parameter.ndim == 4) == name.endswith("muon")


def test_only_musgd_has_faster_groups_and_only_weights_decay():
    network = build_network("v11n", 3)
    fast = class_parameters(network)
    for name, kinds in {"SGD": 3, "AdamW": 3, "MuSGD": 6}.items():
        groups = build_optimizer(network, Choice(name, 0.01, 0.9), 0.0005, fast).param_groups
        assert len(groups) == kinds
        decayed = {group["name"]: group["weight_decay"] for group in groups if group["weight_decay"]}
        assert decayed == ({"muon": 0.0005, "fast muon": 0.0005} if name == "MuSGD" else {"weights": 0.0005})


def test_a_shared_parameter_is_in_one_group():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    groups = parameter_groups(network)
    assert [len(groups[name]) for name in ("weights", "biases")] == [1, 2]


# --- saving, and kernels that take a whole step


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)


def small(layout):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Small().to(memory_format=layout)


def step_on(state, seed):
    gradients_of(list(state.network.parameters()), seed, 0.1)
    state.optimizer.step()


@pytest.mark.parametrize("fused_now", [False, True])
@pytest.mark.parametrize("fused_then", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "MuSGD"])
def test_a_state_goes_on_on_another_device_whatever_its_kernels_and_layout(monkeypatch, name, fused_then, fused_now):
    """Fused kernels run through memory as it lies, so a momentum laid out in another way would be a wrong one."""

    def state_of(layout, fused):
        monkeypatch.setattr(optim, "FUSED", ("cpu",) if fused else ())
        network = small(layout)
        return TrainState.of(network, build_optimizer(network, Choice(name, 0.01, 0.9), 0.001))

    whole = state_of(torch.contiguous_format, False)
    first = state_of(torch.contiguous_format, fused_then)
    for state in (whole, first):
        step_on(state, 0)
    second = state_of(torch.channels_last, fused_now)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for state in (whole, second):
        step_on(state, 1)
        step_on(state, 2)
    assert second.optimizer.param_groups[0]["fused"] == (True if fused_now else None)
    for one, other in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 if name == "MuSGD" else 1e-7)


def test_a_fused_step_that_a_loss_scaler_leaves_out_moves_nothing():
    """torch calls a fused optimizer with the verdict, and Muon's move is before that."""
    parameters = parameters_of(0.1)
    optimizer = musgd_of(parameters, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    gradients_of(parameters, 0, 1.0)
    scaler.scale(torch.ones(()))
    parameters[-1].grad.view(-1)[0] = float("inf")
    before = [one.detach().clone() for one in parameters]
    scaler.step(optimizer)
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "MuSGD"])
def test_a_fused_step_under_a_loss_scaler_is_the_plain_one(monkeypatch, name):
    """Also where the gradient overflows and the step is left out."""
    batch, states = random_batch([2, 0, 3, 1]), []
    for fused in ((), ("cpu",)):
        monkeypatch.setattr(optim, "FUSED", fused)
        state = new_state(optimizer=name)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for poison in (1.0, float("inf"), 1.0):
            hook = state.network.model[0].conv.weight.register_hook(lambda gradient, by=poison: gradient * by)
            _, report = step_of(batch, [2, 2], torch.float32, state=state, scaler=scaler)
            hook.remove()
            assert report.applied == (poison == 1)
        states.append(state)
    assert [one.optimizer.param_groups[0]["fused"] for one in states] == [None, True]
    for one, other in zip(*(state.network.parameters() for state in states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_moves_lie_in_memory_as_weights_do():
    """As torch's kernels for many tensors want it; else they take them one by one."""
    network = build_network("v11n", 3).to(memory_format=torch.channels_last)
    for parameter in parameter_groups(network, muon=True)["muon"]:
        matrix = as_matrix(parameter.detach())
        assert matrix.data_ptr() == parameter.data_ptr()
        back = as_weight(matrix.clone(), parameter)
        assert torch.equal(back, parameter)
        assert back.stride() == parameter.stride()


# --- failures, ranks and resuming


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stage", ["optimizer", "average"])
def test_a_step_that_fails_changes_neither_momentum(monkeypatch, stage, first):
    state = new_state(optimizer="MuSGD")
    steps = run_of(state)
    if not first:
        take_step(steps, seed=0)
    before = everything(state)
    assert any("muon_buffer" in key for key in before) == (not first)
    monkeypatch.setattr(recover, "cut_finer", lambda run, window: pytest.fail("cut"))
    Shortage(state, stage, 1)
    with pytest.raises(pytest.fail.Exception):
        take_step(steps, seed=1)
    after = everything(state)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def of_ranks(processes, out, *arguments):
    done = ranks.run(processes, "musgd_worker.py", out, *arguments)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(processes)]


def assert_equal(found, expected):
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    for number, one in expected["optimizer"].items():
        for name, value in one.items():
            assert torch.equal(found["optimizer"][number][name], value), (number, name)


@pytest.mark.slow
def test_ranks_share_the_matrices_and_all_get_the_bits_of_one_process(tmp_path):
    (alone,) = of_ranks(1, tmp_path / "alone", "steps")
    assert alone["matrices"] == 3 * len(parameter_groups(new_state().network, muon=True)["muon"])
    for processes in (2, 3):
        together = of_ranks(processes, tmp_path / "together", "steps")
        assert sum(one["matrices"] for one in together) == alone["matrices"]
        assert all(one["matrices"] for one in together)
        for one in together:
            assert_equal(one, alone)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_runs_out_in_one_ranks_share_is_met_by_all(tmp_path, rank):
    (never,) = of_ranks(1, tmp_path / "never", "shortage", -1)
    failing = of_ranks(2, tmp_path / "failing", "shortage", rank)
    assert never["sizes"] == [4, 4, 4]
    for one in failing:
        assert one["sizes"] == [4, 2, 2]
        for name, value in never["model"].items():
            torch.testing.assert_close(one["model"][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_another_failure_in_one_ranks_share_ends_all_with_its_message(tmp_path, rank):
    done = ranks.run(2, "musgd_worker.py", tmp_path / "out", "error", rank)
    assert done.returncode in (1, 2)  # none was ended for waiting
    assert "not good" in done.stderr
    assert "distributed.ElsewhereError" not in done.stderr  # it is nobody's error


@pytest.mark.slow
@pytest.mark.parametrize(("word", "start"), [("Muon", 0.1), ("auto", 0.0)])
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(tmp_path, monkeypatch, capsys, word, start):
    """What auto chose is saved and stays: when it is resumed no run is long."""
    monkeypatch.setattr(optim, "LONG", 0)
    data = write_dataset(tmp_path / "data")
    common = [f"data={data}", f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "workers=0"]
    common += ["plots=false", "val=false", f"optimizer={word}"]
    whole = train(tmp_path, common, "whole", "epochs=3", "save_period=1")
    assert "optimizer MuSGD, lr0 0.01 (class branches 3 x), " in capsys.readouterr().out
    saved = checkpoint_file.read(whole / "weights" / "last.pt")
    assert (saved["settings"]["optimizer"], saved["settings"]["warmup_bias_lr"]) == ("MuSGD", start)
    assert set(saved["optimizer"]["state"][0]) == {"momentum_buffer", "muon_buffer"}
    halves = shutil.copytree(whole, tmp_path / "halves")
    os.replace(halves / "weights" / "epoch1.pt", halves / "weights" / "last.pt")
    monkeypatch.setattr(optim, "LONG", 10_000)
    assert run("train", f"resume={halves}") == 0
    assert same(halves, whole)
    states = [checkpoint_file.read(one / "weights" / "last.pt")["optimizer"]["state"] for one in (halves, whole)]
    for number, one in states[1].items():
        assert all(torch.equal(states[0][number][name], value) for name, value in one.items())
