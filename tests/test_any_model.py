"""The step serves other models: what docs/accumulation.md shows, run and held against autograd."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FrozenBatchNorm2d

from detector.step.gradients import GradientSum
from detector.step.plan import Window, split
from detector.step.state import TrainState
from detector.step.step import StepRules, Sums, train_window

DOCUMENT = Path(__file__).parents[1] / "docs" / "accumulation.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.S)
IMAGES = 4


def retinanet():
    """One with a backbone of a layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(3, 8, 8, 8), FrozenBatchNorm2d(8), nn.ReLU())
        backbone.out_channels = 8
        anchors = AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),))
        return RetinaNet(backbone, num_classes=3, anchor_generator=anchors, min_size=64, max_size=64).double()


def scene(number):
    """An image of noise with as many boxes as its number says."""
    rng = torch.Generator().manual_seed(number)
    low = torch.rand(number, 2, generator=rng, dtype=torch.float64) * 30
    side = torch.rand(number, 2, generator=rng, dtype=torch.float64) * 25 + 8
    boxes, labels = torch.cat((low, low + side), dim=1), torch.randint(1, 3, (number,), generator=rng)
    return torch.rand(3, 64, 64, generator=rng, dtype=torch.float64), {"boxes": boxes, "labels": labels}


def collate(scenes):
    images, targets = zip(*scenes, strict=True)
    return list(images), list(targets)


def test_the_documented_example_takes_the_steps_of_one_large_batch():
    """A torchvision detector on images with 0 to 3 boxes: its weights after SGD on whole batches, from autograd."""
    dataset = [scene(number) for number in range(IMAGES)]
    network = retinanet()
    fresh = copy.deepcopy(network)
    options = {"lr": 1e-4, "momentum": 0.9}
    optimizer = torch.optim.SGD(network.parameters(), **options)
    names = {"network": network, "optimizer": optimizer, "epochs": 2, "dataset": dataset, "collate": collate}
    exec(EXAMPLE.replace("Cut(batch=4, accumulate=16)", "Cut(batch=1, accumulate=4)"), names)
    assert names["state"].step == 2

    plain = torch.optim.SGD(fresh.parameters(), **options)
    for _ in range(2):
        plain.zero_grad()
        (sum(fresh(*collate(dataset)).values()) * IMAGES).backward()
        nn.utils.clip_grad_norm_(fresh.parameters(), 10.0)
        plain.step()
    assert not torch.equal(next(retinanet().parameters()), next(fresh.parameters()))
    for ours, theirs in zip(network.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [12, 5, 1])
def test_a_classifier_with_weighted_samples(batch):
    """Cross-entropy over sample weights, which a mean over micro-batches would get wrong."""
    rng = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(12, 7, generator=rng), torch.randint(4, (12,), generator=rng)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    rows, weights, fresh = rows.double(), torch.arange(1.0, 13.0, dtype=torch.float64), copy.deepcopy(network)

    def criterion(logits, batch):
        losses = F.cross_entropy(logits, batch[1], reduction="none") * batch[2]
        return [Sums(losses.sum()[None], batch[2].sum())]

    rules = StepRules(criterion, lambda network, batch: network(batch[0]), images=lambda batch: len(batch[0]))
    state = TrainState.of(network, torch.optim.SGD(network.parameters(), lr=0.01))
    window = Window(0, 0, split(range(12), batch, devices=1))
    picked = [torch.tensor(micro) for micro in window.micro_batches[0]]
    report = train_window(
        state, GradientSum(network), rules, window, [(rows[i], labels[i], weights[i]) for i in picked]
    )
    losses = F.cross_entropy(fresh(rows), labels, reduction="none") * weights
    (12 * losses.sum() / weights.sum()).backward()
    assert report.losses[0] == pytest.approx((losses.sum() / weights.sum()).item(), rel=1e-10)
    for ours, theirs in zip(network.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
