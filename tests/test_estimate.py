"""`detector tune --estimate`: what is counted without a device, against real tensors, real states and a formula."""

import numpy as np
import pytest
import torch
from scenes import TINY, TINY26, write_dataset
from test_training import run
from test_trial import LINUX, silent, tiny
from torch import nn

from detector.data.batch import Sample
from detector.fitting.estimate import (
    Alive,
    Counted,
    branches_of,
    count_loss,
    count_network,
    estimate_bench,
    standing,
)
from detector.fitting.fit import bench
from detector.fitting.search import cut_of
from detector.run.build import prepared_network
from detector.step.ema import Ema
from detector.step.optim import Choice, build_optimizer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"))


class Small(nn.Module):
    """A convolution, a norm and SiLU, whose kept activations can be written down."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        return nn.functional.silu(self.norm(self.conv(x)))


def test_kept_bytes_equal_those_written_down():
    x = torch.randn(2, 3, 64, 64)
    counted = Counted(offload=False)
    with counted.context():
        y = Small()(x)
    maps = 2 * 16 * 64 * 64 * 4  # the convolution's output for the norm, the norm's for SiLU
    largest = sorted(counted.kept.values(), reverse=True)[:3]
    assert largest == [maps, maps, x.numel() * 4]
    assert sum(counted.kept.values()) - sum(largest) < 4096  # statistics of 16 channels
    assert y.shape == (2, 16, 64, 64)


@pytest.mark.parametrize("model", [TINY, TINY26])
def test_fake_tensors_keep_what_real_ones_keep(data, model):
    """The network's kept bytes, counted without computing, are those of a real forward pass by autograd's hooks."""
    for overrides in (("amp=fp32",), ("amp=bf16",), ("amp=bf16", "checkpoint=stages"), ("amp=fp32", "checkpoint=all")):
        chosen = tiny(data, "batch=4", *overrides, f"model={model}")
        counts, outputs, _ = count_network(chosen, 2, 4, chosen.amp)
        network = prepared_network(chosen, ("a", "b"), torch.device("cpu"), None).train()
        counted = Counted(offload=False)
        enabled = chosen.amp == "bf16"
        with counted.context(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            network(torch.rand(4, 64, 64, 3).permute(0, 3, 1, 2))
        kept = sum(counted.kept.values())
        ends = [end for one in branches_of(outputs) for end in (one.boxes, one.logits)]
        results = sum(one.numel() * one.element_size() for one in ends)
        copies = sum(p.numel() * 2 for p in network.parameters() if p.dim() > 1) if enabled else 0
        assert kept <= counts.kept <= (kept + results + copies) * 1.05, overrides


def test_the_loss_of_two_branches_takes_what_each_keeps_and_one_at_work(data):
    """The first branch's graph is there while the second is assigned; its assigner's work is not."""
    _, outputs, network = count_network(tiny(data, "batch=4", f"model={TINY26}"), 2, 4, "fp32")
    image, classes = np.zeros((64, 64, 3), np.uint8), np.zeros(200, np.int64)
    low = np.random.default_rng(0).random((200, 2), np.float32) * 30
    sample = Sample(image, np.concatenate((low, low + 30), axis=1), classes, 0)
    one, both = count_loss(network, outputs._replace(one2one=None), sample), count_loss(network, outputs, sample)
    assert one < both < 2 * one


def test_less_is_kept_with_checkpoints_and_offload(data):
    kept = [
        count_network(tiny(data, *overrides), 2, 32, "fp32")[0].kept
        for overrides in ((), ("checkpoint=stages",), ("checkpoint=all",), ("checkpoint=all", "offload=true"))
    ]
    assert kept[0] > 1.5 * kept[1] > 1.5 * kept[2]
    assert kept[2] > kept[3]


def test_alive_counts_a_storage_once_and_only_while_it_lives():
    with Alive() as alive:
        a = torch.zeros(1000)
        b = a.view(10, 100)
        c = a + 1
        assert alive.now == 8000
        del a, c
        assert alive.now == 4000
        del b
        assert alive.now == 0
    assert alive.peak == 8000


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "MuSGD"])
def test_standing_bytes_are_those_of_a_real_state(data, optimizer):
    """Gradients, momentum and averages of a step that was really taken."""
    network = prepared_network(tiny(data, "freeze=2"), ("a", "b"), torch.device("cpu"), None)
    steps = build_optimizer(network, Choice(optimizer, 0.01, 0.9), 0.0)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    steps.step()

    def total(tensors):
        return sum(one.numel() * one.element_size() for one in tensors)

    counted = standing(network, optimizer)
    assert counted.weights == total(network.state_dict().values())
    assert counted.average == total(Ema(network).network.state_dict().values())
    assert counted.gradients == total(p.grad for p in network.parameters() if p.grad is not None)
    held = total(value for one in steps.state.values() for value in one.values() if torch.is_tensor(value))
    assert counted.optimizer == pytest.approx(held, rel=0.01)  # AdamW also counts its steps


def test_an_estimate_needs_no_device_but_its_memory(data, capsys):
    common = [f"data={data}", f"model={TINY}", "imgsz=64", "nbs=4", "--estimate"]
    assert run("tune", *common, "device=cuda") == 2
    assert "memory=4GiB" in capsys.readouterr().err
    assert run("tune", *common, "device=cuda", "memory=2GiB") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ESTIMATE")
    assert "batch: 4" in printed
    tried = {line.split()[0] for line in printed.splitlines() if line.startswith(("plain ", "stages ", "all "))}
    assert tried == {"plain"}  # all of it fits, so no other mode can be better
    assert run("tune", *common, "device=tpu", "memory=2GiB") == 2


@LINUX
@pytest.mark.slow
@pytest.mark.long
def test_an_estimate_for_the_cpu_is_near_its_measurement(data, monkeypatch):
    """Without what the program takes: what a larger micro-batch takes more, by trial and by count."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # what is freed, to the system at once: fragments cannot be counted
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    chosen = tiny(data, "val_batch=16", "plots=false")  # a trial validates, too, which an estimate does not count
    here, there = bench(chosen, [torch.device("cpu")], 2**34, silent), estimate_bench(chosen, 2**34, silent)
    measured, counted = (
        one.measure("plain", cut_of(chosen, 256, 1)).peak - one.measure("plain", cut_of(chosen, 64, 1)).peak
        for one in (here, there)
    )
    assert counted == pytest.approx(measured, rel=0.25)
