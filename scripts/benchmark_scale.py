"""How the loss and the sum of gradients grow: with boxes, classes and processes. Prints Markdown tables.

    OMP_NUM_THREADS=1 python scripts/benchmark_scale.py [--model v11n] [--imgsz 640] [--only boxes classes ...]

boxes: the loss and its backward pass, per image, with 1 to 300 boxes an image.
classes: its time and memory with 80 to 1,000 classes, and the slope in bytes per class and anchor.
processes: images per second of two processes with a core each, beside one process on one core.
sums: seconds and bytes of a window of two micro-batches a process, by GradientSum and by torch's
DistributedDataParallel with no_sync, on 2 and 4 processes over gloo.

Times are the fastest of --turns. Of random predictions and images: no image is read. Memory is the peak of a fresh
process. Quiet cores are needed for processes, and for sums as many as there are processes.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from benchmark_accumulation import AT_REST, Bench, joined, random_image
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from detector import distributed
from detector.boxes import anchor_points
from detector.data.batch import Batch
from detector.fitting.capacity import resident
from detector.loss.criterion import DetectionLoss
from detector.model.head import Predictions
from detector.model.network import build_network
from detector.step.gradients import GradientSum
from detector.step.plan import Window
from detector.step.statistics import set_modes
from detector.step.step import train_window

PARTS = ("boxes", "classes", "processes", "sums")
BOXES, CLASSES, IMAGES = (1, 10, 100, 300), (80, 160, 320, 640, 1000), 4
STRIDES = (8, 16, 32)


# --- the loss


def predictions_of(imgsz: int, classes: int) -> tuple[DetectionLoss, Predictions]:
    """Random raw output of a v11 for IMAGES images, and its loss."""
    head = build_network("v11n", nc=1, seed=0).head
    rng = torch.Generator().manual_seed(0)
    shapes = tuple((imgsz // stride, imgsz // stride) for stride in STRIDES)
    anchors = len(anchor_points(shapes, STRIDES, "cpu", torch.float32)[0])
    boxes = torch.randn(IMAGES, 4 * head.reg_max, anchors, generator=rng)
    logits = torch.randn(IMAGES, classes, anchors, generator=rng) - 4
    raw = Predictions(boxes.requires_grad_(), logits.requires_grad_(), shapes)
    return DetectionLoss(head), raw


def targets_of(imgsz: int, boxes: int, classes: int) -> Batch:
    rng = torch.Generator().manual_seed(1)
    side = (torch.rand(IMAGES * boxes, 2, generator=rng) * 0.3 + 0.02) * imgsz
    low = torch.rand(IMAGES * boxes, 2, generator=rng) * (imgsz - side)
    return Batch(
        images=torch.zeros(IMAGES, imgsz, imgsz, 3, dtype=torch.uint8),
        boxes_xyxy=torch.cat((low, low + side), dim=1),
        classes=torch.randint(classes, (IMAGES * boxes,), generator=rng),
        image_index=torch.arange(IMAGES).repeat_interleave(boxes),
        samples=torch.arange(IMAGES),
        bad=torch.zeros(0, dtype=torch.int64),
    )


def fastest(work: Callable[[], object], turns: int) -> float:
    """Seconds of the fastest turn, after one to warm up."""
    seconds = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def loss_work(imgsz: int, boxes: int, classes: int) -> Callable[[], None]:
    criterion, raw = predictions_of(imgsz, classes)
    targets = targets_of(imgsz, boxes, classes)

    def work() -> None:
        raw.boxes.grad = raw.logits.grad = None
        sum(branch.terms.sum() for branch in criterion(raw, targets)).backward()

    return work


def loss_child(options: argparse.Namespace, boxes: int, classes: int) -> dict[str, float]:
    """Seconds of a loss with its backward pass, and bytes at its peak beyond the predictions; for a fresh process."""
    loss_work(64, 2, 8)()
    work = loss_work(options.imgsz, boxes, classes)
    before = resident("VmRSS")
    work()
    peak = resident("VmHWM") - before
    return {"seconds": fastest(work, options.turns), "peak": peak}


def boxes_table(options: argparse.Namespace) -> None:
    rows = [(boxes, child(options, "loss", boxes, 80)["seconds"] / IMAGES * 1000) for boxes in BOXES]
    print("| boxes an image | loss, ms an image | times that of 1 box |\n|---|---|---|")
    for boxes, cost in rows:
        print(f"| {boxes} | {cost:.2f} | {cost / rows[0][1]:.2f} |")


def classes_table(options: argparse.Namespace) -> None:
    rows = [(classes, child(options, "loss", 20, classes)) for classes in CLASSES]
    print(f"| classes | loss, ms an image | peak, MiB for {IMAGES} images |\n|---|---|---|")
    for classes, found in rows:
        print(f"| {classes} | {found['seconds'] / IMAGES * 1000:.1f} | {found['peak'] / 2**20:.0f} |")
    anchors = IMAGES * sum((options.imgsz // stride) ** 2 for stride in STRIDES)
    (first, low), (last, high) = rows[0], rows[-1]
    slope = (high["peak"] - low["peak"]) / (last - first) / anchors
    print(
        f"\n{slope:.1f} bytes per class and anchor, of which 4 are the gradient; the fp32 logits beside it are 4 more."
    )


# --- processes


def windows_child(options: argparse.Namespace) -> dict[str, float]:
    """Images per second of whole steps of this rank and the others together."""
    mine = options.batch // distributed.world_size()
    bench = Bench(options, mine)
    gradients = GradientSum(bench.state.network)
    rank = distributed.rank()
    cut = tuple((tuple(range(start, start + mine)),) for start in range(0, mine * distributed.world_size(), mine))
    batch = joined(bench.samples)._replace(samples=torch.arange(rank * mine, (rank + 1) * mine))
    seconds = fastest(
        lambda: train_window(bench.state, gradients, bench.rules, Window(0, 0, cut), [batch], AT_REST), options.turns
    )
    return {"rate": mine * distributed.world_size() / seconds}


def processes_table(options: argparse.Namespace) -> None:
    one, two = (ranks(options, "windows", count)["rate"] for count in (1, 2))
    print(f"| processes | images/s, {options.model} at {options.imgsz}, {options.batch} a step |\n|---|---|")
    print(f"| 1, on one core | {one:.2f} |\n| 2, a core each | {two:.2f} |\n\n{two / one:.2f} times as many.")


# --- sums of gradients


def sums_child(options: argparse.Namespace, way: str) -> dict[str, float]:
    """Seconds of a window of two micro-batches, and bytes that this rank hands to a reduction in it."""
    network = build_network(options.model, 80, seed=0).to(memory_format=torch.channels_last)
    set_modes(network, freeze_norms=True)
    criterion = DetectionLoss(network.head)
    batches = [joined([random_image(10 * distributed.rank() + n, options.imgsz)]) for n in range(2)]

    def backward(model: torch.nn.Module, batch: Batch) -> None:
        sum(branch.terms.sum() for branch in criterion(model(batch.network_input()), batch)).backward()

    sent = []
    if way == "ours":
        gradients = GradientSum(network)
        reduce = torch.distributed.all_reduce

        def counted(tensor: Tensor, *arguments: Any, **words: Any) -> Any:
            sent.append(tensor.nbytes)
            return reduce(tensor, *arguments, **words)

        torch.distributed.all_reduce = counted

        def window() -> None:
            with gradients.summed():
                backward(network, batches[0])
                gradients.send_as_they_come()
                backward(network, batches[1])
    else:
        parallel = DistributedDataParallel(network)

        def hook(group: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
            sent.append(bucket.buffer().nbytes)
            return allreduce_hook(group, bucket)

        parallel.register_comm_hook(None, hook)

        def window() -> None:
            parallel.zero_grad()
            for last, batch in enumerate(batches):
                with nullcontext() if last else parallel.no_sync():
                    backward(parallel, batch)

    seconds = fastest(window, options.turns)
    return {"seconds": seconds, "bytes": sum(sent) / (options.turns + 1)}


def sums_table(options: argparse.Namespace) -> None:
    print("| processes | sum | seconds a window | MB a window |\n|---|---|---|---|")
    for count in (2, 4):
        for way, title in (("ours", "GradientSum"), ("theirs", "DistributedDataParallel")):
            found = ranks(options, "sums", count, way)
            print(f"| {count} | {title} | {found['seconds']:.3f} | {found['bytes'] / 1e6:.2f} |")


# --- all of it


def words_of(options: argparse.Namespace, what: str, *more: object) -> list[str]:
    named = ("model", "imgsz", "batch", "turns")
    return [*(f"--{name}={getattr(options, name)}" for name in named), "--child", what, *map(str, more)]


def child(options: argparse.Namespace, what: str, *more: object) -> dict[str, float]:
    """What a fresh process of this script measures."""
    return ranks(options, what, 1, *more)


def ranks(options: argparse.Namespace, what: str, count: int, *more: object) -> dict[str, float]:
    """What the first of so many fresh processes measures, each on a core of its own as far as there are any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    processes = []
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        command = [sys.executable, __file__, *words_of(options, what, *more)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        if cores:
            os.sched_setaffinity(processes[-1].pid, {cores[rank % len(cores)]})
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"the measurement {what} failed")
    return json.loads(said[0].splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    what, *more = options.child
    if what == "loss":
        return loss_child(options, *map(int, more))
    with distributed.process_group(torch.device("cpu")):
        return windows_child(options) if what == "windows" else sums_child(options, *more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v11n")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch", type=int, default=8, help="images of a step, over all processes (8)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.set_defaults(amp="fp32", device="cpu")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    tables = {"boxes": boxes_table, "classes": classes_table, "processes": processes_table, "sums": sums_table}
    for part in options.only:
        tables[part](options)
        print(flush=True)


if __name__ == "__main__":
    main()
