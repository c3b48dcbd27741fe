"""How long an optimizer's step takes, by itself, on a model's parameters and random gradients.

    python scripts/optimizer_step.py [v11n v26x ...] [--device auto] [--turns 10]

The three take their steps in turn, so that all meet the same machine; medians of the turns. For MuSGD also how much of
the work on matrices falls to the busiest of several ranks, which share it: counted, not measured.
"""

import argparse
import statistics
import sys
import time

import torch

from detector.device import choose_device
from detector.errors import DetectorError
from detector.model.network import Network, build_network
from detector.run.build import class_parameters
from detector.step.muon import cost, plan
from detector.step.optim import Choice, build_optimizer, parameter_groups

CLASSES, RANKS = 80, (2, 4, 8)


def measure(network: Network, device: torch.device, turns: int) -> dict[str, float]:
    """Median seconds of a step, by optimizer."""
    rng = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=rng) / 100
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
    fast = class_parameters(network)
    steps = {
        name: build_optimizer(network, Choice(name, 1e-5, 0.9), 0.0005, fast).step for name in ("SGD", "AdamW", "MuSGD")
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):  # two to warm up
        for name, step in steps.items():
            wait(device)
            start = time.perf_counter()
            step()
            wait(device)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busiest(network: Network) -> dict[int, float]:
    """The busiest rank's share of the multiplications, by the number of ranks."""
    groups = parameter_groups(network, muon=True)
    shapes = tuple((len(one), one[0].numel()) for one in groups["muon"])
    shares = {}
    for ranks in RANKS:
        loads = [sum(cost(batch, shapes) for batch in share) for share in plan(shapes, ranks).shares]
        shares[ranks] = max(loads) / sum(loads)
    return shares


def main(options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{device} ({name}), torch {torch.__version__}, medians of {options.turns} steps")
    for model in options.models:
        network = build_network(model, CLASSES).to(device, memory_format=torch.channels_last)
        times = ", ".join(
            f"{name} {seconds * 1e3:.2f} ms" for name, seconds in measure(network, device, options.turns).items()
        )
        shares = ", ".join(f"{share:.0%} of {ranks}" for ranks, share in busiest(network).items())
        print(f"{model}: {times}; busiest rank's share: {shares}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["v11n"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except DetectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
