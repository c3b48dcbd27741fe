"""The largest difference between the gradients of one batch of 8 images and of four micro-batches of 2.

    python scripts/exactness.py

Random images and boxes, v11n with fresh weights, the training step of the project. BatchNorm uses its running
statistics: what it computes from the images that pass together is all that depends on the cut (docs/accumulation.md).
"""

import numpy as np
import torch
from gradient_difference import RULES

from detector.data.batch import Sample, collate
from detector.loss.criterion import DetectionLoss
from detector.model.network import build_network
from detector.step.gradients import GradientSum
from detector.step.optim import Choice, build_optimizer
from detector.step.plan import Window, split
from detector.step.schedule import Rates
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import StepRules, train_window

IMAGES, SIDE, CLASSES = 8, 96, 80
RATES = Rates(dict.fromkeys(("weights", "norms", "biases"), 0.0), 0.0, [(7.5, 0.5, 1.5)])
BOXES = [1, 9, 0, 3, 14, 0, 0, 5]  # of each image: unevenly, as in real data


def random_sample(number: int) -> Sample:
    """A SIDE x SIDE image of noise with BOXES[number] random boxes."""
    random = np.random.default_rng(number)
    low, high = random.uniform(0, SIDE / 2, (BOXES[number], 2)), random.uniform(SIDE / 2, SIDE, (BOXES[number], 2))
    boxes_xyxy = np.concatenate((low, high), axis=1).astype(np.float32)
    image = random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Sample(image, boxes_xyxy, random.integers(CLASSES, size=BOXES[number]), number)


def gradient(batch: int, rule: str, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of one step over the images, cut into micro-batches of `batch`, normalised by `rule`."""
    network = build_network("v11n", CLASSES, seed=0).to(dtype)
    set_modes(network, freeze_norms=True)
    state = TrainState.of(network, build_optimizer(network, Choice("SGD", 0.0, 0.0), decay=0.0))
    rules = StepRules(DetectionLoss(network.head), weighting=RULES[rule])
    window = Window(epoch=0, done=0, micro_batches=split(range(IMAGES), batch, devices=1))
    micro_batches = [collate([random_sample(number) for number in micro]) for micro in window.micro_batches[0]]
    network.register_forward_pre_hook(lambda module, images: images[0].to(dtype))
    train_window(state, GradientSum(network), rules, window, micro_batches, RATES)
    return torch.cat([parameter.grad.flatten() for parameter in network.branches()[0]])


for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
    whole = gradient(8, "window", dtype)
    for rule in ("window", "micro"):
        difference = (gradient(2, rule, dtype) - whole).abs().max() / whole.abs().max()
        print(f"{name}, normalised by {rule:6}  4 x 2 against 1 x 8: {difference:.1e} of the largest gradient")
