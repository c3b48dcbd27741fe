"""How far the gradient of an accumulated step is from that of one large batch, on the training images of a data set.

    python scripts/gradient_difference.py --weights best.pt --data data.yaml [--imgsz 320] [--window 32] [--no-mosaic]

For trained weights (the averaged ones) with BatchNorm's running statistics, in fp32, a window of images is run whole
and cut into micro-batches of 1, 2, 4, 8 and 16. Two rules make a step's gradient of a cut: `window` divides the sum
over all micro-batches by all target weights, `micro` each micro-batch by its own. Printed is a table of means over the
windows: the relative difference |g_cut - g_whole| / |g_whole| and the angle between the two.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detector import checkpoint_file
from detector.config.groups import LossKeys
from detector.data.augment import Augmentation
from detector.data.batch import Sample, collate
from detector.data.dataset import TrainingSet
from detector.data.description import load_description
from detector.data.reading import build_index
from detector.device import choose_device
from detector.errors import ConfigError, DetectorError
from detector.loss.criterion import DetectionLoss
from detector.model.checkpoint import network_of
from detector.model.network import Network
from detector.step.plan import Cut, epoch_windows, split
from detector.step.statistics import set_modes
from detector.step.weighting import BY_WINDOW, Weighting

SIZES = (1, 2, 4, 8, 16)


class ByMicroBatch:
    """The usual approximation: each micro-batch by its own target weight, times its images."""

    def before(self, weight: Tensor, images: int, scale: float) -> Tensor | float:
        return images / weight.clamp(min=1.0)

    def after(self, weights: Tensor, images: Tensor, scale: float) -> Tensor:
        return torch.ones_like(weights)


RULES: dict[str, Weighting] = {"window": BY_WINDOW, "micro": ByMicroBatch()}


class Difference(NamedTuple):
    """How a gradient differs from that of the whole window."""

    relative: float  # |g_cut - g_whole| / |g_whole|
    degrees: float  # the angle between them


def window_gradients(network: Network, samples: Sequence[Sample], batch: int) -> dict[str, Tensor]:
    """The window's gradient by each rule, cut into micro-batches of `batch`: one backward pass a micro-batch."""
    device = next(network.parameters()).device
    criterion = DetectionLoss(network.head)
    gains = torch.tensor([getattr(LossKeys(), gain) for gain in network.head.gains], device=device)
    branches = network.branches()
    sums: dict[str, list[Tensor | float]] = {name: [0.0] * len(branches) for name in RULES}
    weights = torch.zeros(len(branches), device=device)
    for micro in split(range(len(samples)), batch, devices=1)[0]:
        images = collate([samples[number] for number in micro]).to(device)
        losses = criterion(network(images.network_input()), images)
        for number, (loss, parameters) in enumerate(zip(losses, branches, strict=True)):
            total, more = (loss.terms * gains).sum(), number < len(branches) - 1
            options = {"allow_unused": True, "materialize_grads": True, "retain_graph": more}
            parts = torch.autograd.grad(total, parameters, **options)
            gradient = torch.cat([part.flatten() for part in parts])  # of the sum: either rule is a factor on it
            for name, rule in RULES.items():
                sums[name][number] += gradient * rule.before(loss.weight, len(micro), 1.0)
            weights[number] += loss.weight
    after = {name: rule.after(weights, torch.tensor(len(samples), device=device), 1.0) for name, rule in RULES.items()}
    return {name: torch.cat([one * by for one, by in zip(sums[name], after[name], strict=True)]) for name in RULES}


def difference(cut: Tensor, whole: Tensor) -> Difference:
    cut, whole = cut.double(), whole.double()
    a, b = cut / cut.norm(), whole / whole.norm()
    angle = 2 * math.atan2(float((a - b).norm()), float((a + b).norm()))  # unlike arccos exact for small angles
    return Difference(float((cut - whole).norm() / whole.norm()), math.degrees(angle))


def training_windows(images: TrainingSet, window: int, seed: int) -> Iterator[list[Sample]]:
    """The images of one step after another, as a run with this seed and no warmup sees them."""
    for epoch in count():
        for planned in epoch_windows(len(images), Cut(window, 1), seed, epoch):
            yield [images[epoch, sample] for sample in planned.micro_batches[0][0]]


def load_network(path: Path, device: torch.device) -> tuple[Network, int]:
    """A checkpoint's averaged network, set to train with norms at rest, and its number of classes."""
    saved = checkpoint_file.read(path)
    network = network_of(saved, path).to(device)
    set_modes(network, freeze_norms=True)
    return network, len(saved["names"])


def table(rows: dict[int, dict[str, list[Difference]]]) -> str:
    """A markdown table, one line a micro-batch size, of means over the windows."""
    lines = ["| micro-batch | window: difference | window: angle | micro: difference | micro: angle |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for size, found in rows.items():
        cells = []
        for name in ("window", "micro"):
            relative, degrees = np.mean(found[name], axis=0)
            cells += [f"{relative:.2g}", f"{degrees:.2g}°"]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(options: argparse.Namespace) -> None:
    torch.backends.cudnn.allow_tf32 = False  # fp32 is to mean fp32
    device = choose_device(options.device)
    network, classes = load_network(options.weights, device)
    index = build_index(load_description(options.data), "train")
    if len(index.names) != classes:
        raise ConfigError(f"data={options.data}: has {len(index.names)} classes, {options.weights} knows {classes}")
    strengths = Augmentation(mosaic=float(options.mosaic))
    images = TrainingSet(index, options.imgsz, strengths, options.seed, epochs=sys.maxsize, close_mosaic=0)

    rows: dict[int, dict[str, list[Difference]]] = {}
    sizes, boxes = [], []
    for samples in islice(training_windows(images, options.window, options.seed), options.windows):
        sizes.append(len(samples))
        boxes += [len(sample.classes) for sample in samples]
        whole = window_gradients(network, samples, len(samples))["window"]
        for size in (size for size in SIZES if size < len(samples)):
            found = rows.setdefault(size, {name: [] for name in RULES})
            for name, gradient in window_gradients(network, samples, size).items():
                found[name].append(difference(gradient, whole))
    print(
        f"{options.weights} on {options.data}: {options.windows} windows of {min(sizes)} to {max(sizes)} images at "
        f"{options.imgsz}, mosaic {'on' if options.mosaic else 'off'}, {np.mean(boxes):.1f} boxes an image "
        f"(standard deviation {np.std(boxes):.1f}), seed {options.seed}, {device}, fp32, BatchNorm frozen\n"
    )
    print(table(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="a checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="the data set's YAML; its training images are used")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--window", type=int, default=32, help="images of a step")
    parser.add_argument("--windows", type=int, default=8, help="steps to average over")
    parser.add_argument("--mosaic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except DetectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
