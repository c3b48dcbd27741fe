"""A checkpoint of the smallest network, for tests of exports: it finds some boxes in any image."""

from pathlib import Path

import numpy as np
import torch
from scenes import MINUTE

from detector import checkpoint_file
from detector.model.network import Network, load_description, network_from_description

NAMES = ("square", "disc")


def finding(description: dict, seed: int = 1) -> Network:
    """A network whose scores depend on the image and spread over 0..1, in inference mode."""
    network = network_from_description({**description, "nc": 2}, seed)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(noise(96, 96, 4).permute(0, 3, 1, 2) / 255)  # the statistics are those of noise
        for layer in network.head.class_outputs:
            layer.weight *= 4
            layer.bias.fill_(-1.0)
    return network.eval()


def write_checkpoint(path: Path, end2end: bool = False, seed: int = 1, **more) -> Path:
    network = finding({**load_description(MINUTE), "end2end": end2end}, seed)
    contents = {
        "ema": network.state_dict(), "description": network.description, "names": list(NAMES), "imgsz": 96,
        "settings": {}, "metrics": {}, "epoch": None,
    }  # fmt: skip
    checkpoint_file.write(path, {**contents, **more})
    return path


def noise(height: int, width: int, count: int = 1, seed: int = 0) -> torch.Tensor:
    """(count, height, width, 3) uint8."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, (count, height, width, 3), dtype=np.uint8))
