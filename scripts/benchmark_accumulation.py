"""What accumulation costs in time and what it saves in memory, on random images.

    python scripts/benchmark_accumulation.py [--imgsz 320] [--model v11n] [--amp auto] [--device auto]

Time: steps of 4 accumulated micro-batches of 16 against steps of one micro-batch of 16, over the same 64 images, in
turn and many times, so that both meet the same machine. Memory: what a step takes beyond the network, its averages, its
optimizer and its images, with the 64 images in micro-batches of 2 and at once. Only the training step is measured:
no image is read or augmented, and the learning rate is 0, so that all steps have the same work.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from detector.data.batch import Batch
from detector.device import choose_device
from detector.errors import ConfigError, DetectorError
from detector.fitting.capacity import resident
from detector.loss.criterion import DetectionLoss
from detector.model.network import build_network
from detector.precision import choose_precision
from detector.step.ema import Ema
from detector.step.gradients import GradientSum
from detector.step.optim import Choice, build_optimizer
from detector.step.plan import Window, split
from detector.step.schedule import GROUPS, Rates
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import StepRules, train_window

CLASSES, BOXES = 80, 8  # boxes an image
AT_REST = Rates(dict.fromkeys(GROUPS, 0.0), 0.9, [(7.5, 0.5, 1.5)])


class Bench:
    """A network in training, and random images to take steps on."""

    def __init__(self, options: argparse.Namespace, images: int):
        self.device = choose_device(options.device)
        self.precision = choose_precision(options.amp, self.device)
        network = build_network(options.model, CLASSES, seed=0).to(self.device, memory_format=torch.channels_last)
        set_modes(network, freeze_norms=False)
        optimizer = build_optimizer(network, Choice("SGD", 0.0, 0.9), decay=0.0005)
        self.state = TrainState(network, Ema(network), optimizer, self.precision)
        criterion = DetectionLoss(network.head)
        self.rules = StepRules(criterion, clip_norm=10.0)
        self.samples = [random_image(number, options.imgsz) for number in range(images)]

    def window(self, numbers: Sequence[int], batch: int) -> tuple[Window, list[Batch]]:
        """A step over these images in micro-batches of `batch`, as the loader hands it over."""
        planned = Window(0, 0, split(numbers, batch, devices=1))
        return planned, [joined([self.samples[number] for number in micro]) for micro in planned.micro_batches[0]]

    def step(self, window: Window, micro_batches: Sequence[Batch]) -> None:
        moved = (batch.to(self.device) for batch in micro_batches)  # one at a time, as in a run
        report = train_window(self.state, GradientSum(self.state.network), self.rules, window, moved, AT_REST)
        assert report.applied, "a gradient was not finite"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def random_image(number: int, size: int) -> Batch:
    """A size x size image of noise with BOXES random boxes, as a batch of one."""
    rng = torch.Generator().manual_seed(number)
    side = (torch.rand(BOXES, 2, generator=rng) * 0.4 + 0.05) * size
    low = torch.rand(BOXES, 2, generator=rng) * (size - side)
    return Batch(
        images=torch.randint(0, 256, (1, size, size, 3), dtype=torch.uint8, generator=rng),
        boxes_xyxy=torch.cat((low, low + side), dim=1),
        classes=torch.randint(0, CLASSES, (BOXES,), generator=rng),
        image_index=torch.zeros(BOXES, dtype=torch.int64),
        samples=torch.tensor([number]),
        bad=torch.zeros(0, dtype=torch.int64),
    )


def joined(batches: Sequence[Batch]) -> Batch:
    owners = torch.repeat_interleave(torch.arange(len(batches)), BOXES)
    return Batch(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))._replace(image_index=owners)


def measure_time(options: argparse.Namespace) -> None:
    """Seconds for the same images in one accumulated step and in steps of one micro-batch, in turn."""
    batch, accumulate = options.batch, options.accumulate
    images = batch * accumulate
    bench = Bench(options, images)
    accumulated = [bench.window(range(images), batch)]
    single = [bench.window(range(start, start + batch), batch) for start in range(0, images, batch)]
    seconds: dict[str, list[float]] = {"accumulated": [], "single": []}
    for turn in range(options.warmup + options.turns):
        for name, steps in (("accumulated", accumulated), ("single", single)):
            start = time.perf_counter()
            for window, micro_batches in steps:
                bench.step(window, micro_batches)
            if turn >= options.warmup:
                seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    paired = sorted(a / b for a, b in zip(seconds["accumulated"], seconds["single"], strict=True))
    low, high = paired[len(paired) // 4], paired[-1 - len(paired) // 4]
    print(f"time      medians of {options.turns} turns, {images} images each, after {options.warmup} to warm up")
    print(f"          {batch} x {accumulate} accumulated: {images / middle['accumulated']:.1f} images/s")
    print(f"          {batch} x 1: {images / middle['single']:.1f} images/s")
    print(
        f"          time per image, accumulated / not: {middle['accumulated'] / middle['single']:.3f} "
        f"(middle half of the turns {low:.3f} to {high:.3f})"
    )


def measure_memory(options: argparse.Namespace) -> None:
    """Memory of a step in small micro-batches and of one at once."""
    images, small = options.batch * options.accumulate, options.small
    cut, whole = (peak_in_new_process(options, size) for size in (small, images))
    kind = "device memory allocated" if choose_device(options.device).type == "cuda" else "resident memory"
    print(f"memory    peak {kind} of a step of {images} images less that before it: activations, gradients, workspace")
    print(f"          {small} x {images // small} accumulated: {cut / 2**20:.0f} MiB")
    print(f"          {images} x 1: {whole / 2**20:.0f} MiB")
    print(f"          accumulated / at once: {cut / whole:.3f} (at once / accumulated: {whole / cut:.1f})")


def peak_in_new_process(options: argparse.Namespace, batch: int) -> int:
    """Bytes that `peak` finds in a fresh process, where nothing is left over from earlier steps."""
    named = ("imgsz", "model", "amp", "device", "batch", "accumulate")
    arguments = [f"--{name}={getattr(options, name)}" for name in named]
    command = [sys.executable, __file__, *arguments, f"--peak={batch}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"the measurement with micro-batches of {batch} failed with status {done.returncode}")
    return int(done.stdout)


def peak(options: argparse.Namespace, batch: int) -> int:
    """Bytes that a step takes at its peak beyond what was in use before it, in micro-batches of `batch`."""
    images = options.batch * options.accumulate
    bench = Bench(options, images)
    measured = bench.window(range(images), batch)
    tiny = bench.samples[0]._replace(images=torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
    for _ in range(2):  # libraries loaded, momentum and averages allocated
        bench.step(Window(0, 0, (((0,),),)), [tiny._replace(boxes_xyxy=tiny.boxes_xyxy.clamp(max=64))])
    bench.state.optimizer.zero_grad(set_to_none=True)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        bench.step(*measured)
        return torch.cuda.max_memory_allocated(bench.device) - before
    before = resident("VmRSS")
    bench.step(*measured)
    return resident("VmHWM") - before


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--model", default="v11n")
    parser.add_argument("--amp", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=16, help="images of a micro-batch, for the time")
    parser.add_argument("--accumulate", type=int, default=4, help="of them in a step")
    parser.add_argument("--small", type=int, default=2, help="images of a micro-batch, for the memory")
    parser.add_argument("--turns", type=int, default=20, help="measured turns of each kind")
    parser.add_argument("--warmup", type=int, default=3, help="turns before those that count")
    parser.add_argument("--time", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)  # what a process for one measurement is to do
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    if options.peak:
        print(peak(options, options.peak))
        return
    device = choose_device(options.device)
    precision = choose_precision(options.amp, device).name
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"{options.model} at {options.imgsz}, {precision}, {device} ({name}{threads}), torch {torch.__version__}")
    if options.memory:
        measure_memory(options)
    if options.time:
        measure_time(options)


if __name__ == "__main__":
    try:
        main(parse())
    except DetectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
