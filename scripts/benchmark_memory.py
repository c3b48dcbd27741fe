"""What `checkpoint` and `offload` save in memory and cost in time, and the assigner beside a dense one.

    OMP_NUM_THREADS=1 python scripts/benchmark_memory.py [--models v11n v11s v11m] [--sizes 320 640] [--batch 4]

A step of one micro-batch of random images in each way. Kept: bytes that the network's forward pass leaves for the
backward pass on the device, without the weights; each piece of memory counts once. Peak: memory of a fresh process at
the peak of a step less that before it, which adds gradients, the loss and workspace. On a CPU that is resident memory,
and what is offloaded is in it too. Time: the fastest of several steps, the ways in turn.

The assigner: crowded images at 640 pixels, once by the project and once with tables over (images, boxes, anchors).
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from benchmark_accumulation import Bench
from torch import Tensor

from detector.boxes import anchor_points, ciou, ltrb_to_xyxy
from detector.data.batch import Batch
from detector.device import choose_device
from detector.errors import ConfigError, DetectorError
from detector.fitting.capacity import resident
from detector.fitting.estimate import Counted
from detector.fitting.search import MODES
from detector.loss.assign import ALPHA, BETA, EPS, assign, cells_inside, least_side
from detector.precision import choose_precision
from detector.step.offload import offloaded
from detector.step.plan import Window

SHAPES, STRIDES, SIDE, CLASSES = ((80, 80), (40, 40), (20, 20)), (8, 16, 32), 640, 80


# --- a step


def set_way(bench: Bench, way: str) -> None:
    checkpoint, offload = MODES[way]
    bench.state.network.set_checkpoint(checkpoint)
    bench.rules = replace(bench.rules, keeping=offloaded if offload else nullcontext)


def memory_of(options: argparse.Namespace, way: str) -> dict[str, float]:
    """MiB of a step in one way; for a fresh process, where nothing is left over from earlier steps."""
    bench = Bench(options, options.batch)
    set_way(bench, way)
    measured = bench.window(range(options.batch), options.batch)
    warm_up(bench)
    bench.state.optimizer.zero_grad(set_to_none=True)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        bench.step(*measured)
        peak = torch.cuda.max_memory_allocated(bench.device) - before
    else:
        before = resident("VmRSS")
        bench.step(*measured)
        peak = resident("VmHWM") - before
    counted = Counted(MODES[way][1])
    bench.rules = replace(bench.rules, keeping=counted.context)
    bench.step(*measured)
    kept, host = (sum(sizes.values()) for sizes in (counted.kept, counted.host))
    return {"kept": kept / 2**20, "host": host / 2**20, "peak": peak / 2**20}


def warm_up(bench: Bench) -> None:
    """Two steps on a tiny image: libraries loaded, momentum and averages allocated."""
    sample = bench.samples[0]  # a part of it: on a black image the gradient of an untrained network overflows
    tiny: Batch = sample._replace(images=sample.images[:, :64, :64], boxes_xyxy=sample.boxes_xyxy.clamp(max=64))
    for _ in range(2):
        bench.step(Window(0, 0, (((0,),),)), [tiny])


def times_of(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step, way by way."""
    bench = Bench(options, options.batch)
    measured = bench.window(range(options.batch), options.batch)
    seconds: dict[str, list[float]] = {way: [] for way in MODES}
    for turn in range(options.turns + 1):
        for way, found in seconds.items():
            set_way(bench, way)
            start = time.perf_counter()
            bench.step(*measured)
            if turn:
                found.append(time.perf_counter() - start)
    return {way: min(found) for way, found in seconds.items()}


# --- the assigner


class Scene(NamedTuple):
    """The arguments of `assign`; every image has equally many boxes."""

    logits: Tensor
    boxes_xyxy: Tensor
    gt_xyxy: Tensor
    gt_classes: Tensor
    gt_image: Tensor


def crowded(images: int, boxes: int) -> Scene:
    """Random predictions, and boxes with sides of 8 to 200 pixels."""
    rng = torch.Generator().manual_seed(0)
    points, strides = anchor_points(SHAPES, STRIDES, "cpu", torch.float32)
    ltrb = torch.rand(images, len(points), 4, generator=rng) * 5
    side = torch.rand(images * boxes, 2, generator=rng) * 192 + 8
    low = torch.rand(images * boxes, 2, generator=rng) * (SIDE - side)
    return Scene(
        logits=torch.randn(images, CLASSES, len(points), generator=rng),
        boxes_xyxy=ltrb_to_xyxy(ltrb, points) * strides[:, None],
        gt_xyxy=torch.cat((low, low + side), dim=1),
        gt_classes=torch.randint(CLASSES, (images * boxes,), generator=rng),
        gt_image=torch.arange(images).repeat_interleave(boxes),
    )


def sparse(scene: Scene) -> Tensor:
    """(B, A) targets of the anchors by the project's assigner, 0 where an anchor has no box."""
    cells = cells_inside(scene.gt_xyxy, SHAPES, STRIDES)
    given = assign(scene.logits, scene.boxes_xyxy, cells, scene.gt_xyxy, scene.gt_classes, scene.gt_image)
    targets = scene.boxes_xyxy.new_zeros(scene.boxes_xyxy.shape[:2])
    targets.index_put_((given.image, given.anchor), given.score, accumulate=True)
    return targets


@torch.no_grad()
def dense(scene: Scene, at_once: int = 8, topk: int = 10) -> Tensor:
    """The same by tables over (images, boxes, anchors), `at_once` images at a time."""
    images, boxes = len(scene.logits), len(scene.gt_image) // len(scene.logits)
    points, strides = anchor_points(SHAPES, STRIDES, "cpu", torch.float32)
    pixels = points * strides[:, None]  # (A, 2)
    all_gt, all_classes = scene.gt_xyxy.view(images, boxes, 4), scene.gt_classes.view(images, boxes)
    targets = []
    for start in range(0, images, at_once):
        part = slice(start, start + at_once)
        gt, classes, logits = all_gt[part], all_classes[part], scene.logits[part]
        centre, size = (gt[..., :2] + gt[..., 2:]) / 2, gt[..., 2:] - gt[..., :2]
        half = size.clamp(min=least_side(STRIDES)) / 2
        inside = ((pixels - centre[:, :, None]).abs() < half[:, :, None]).all(dim=-1)  # (b, N, A)
        overlap = ciou(gt[:, :, None], scene.boxes_xyxy[part, None]).clamp(min=0) * inside
        score = logits.gather(1, classes[:, :, None].expand(-1, -1, logits.shape[2])).sigmoid()
        align = score.pow(ALPHA) * overlap.pow(BETA)
        chosen = torch.zeros_like(inside).scatter_(2, align.topk(topk).indices, True) & inside
        best = torch.zeros_like(inside).scatter_(1, overlap.argmax(dim=1, keepdim=True), True)
        chosen = torch.where(chosen.sum(dim=1, keepdim=True) > 1, best, chosen)
        align, overlap = align * chosen, overlap * chosen
        worth = overlap.amax(dim=2, keepdim=True) / (align.amax(dim=2, keepdim=True) + EPS)
        targets.append((align * worth).amax(dim=1))
    return torch.cat(targets)


ASSIGNERS = {"sparse": sparse, "dense": dense}


def assigner_of(options: argparse.Namespace, kind: str) -> dict[str, float]:
    """MiB at the peak of an assignment, seconds of the next, and the sum of its targets; for a fresh process."""
    run = ASSIGNERS[kind]
    run(crowded(1, 20))
    scene = crowded(options.crowd, options.boxes)
    before = resident("VmRSS")
    run(scene)
    peak = resident("VmHWM") - before
    start = time.perf_counter()
    targets = run(scene)
    return {"peak": peak / 2**20, "seconds": time.perf_counter() - start, "weight": float(targets.sum())}


# --- all of it


def child(options: argparse.Namespace, what: str, **changes: object) -> dict[str, float]:
    """What a fresh process of this script measures."""
    chosen = {**vars(options), **changes}
    names = ("amp", "device", "batch", "turns", "crowd", "boxes", "imgsz", "model")
    arguments = [f"--{name}={chosen[name]}" for name in names]
    done = subprocess.run([sys.executable, __file__, *arguments, f"--only={what}"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"the measurement of {what} failed with status {done.returncode}")
    return json.loads(done.stdout)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["v11n", "v11s", "v11m"])
    parser.add_argument("--sizes", nargs="*", type=int, default=[320, 640])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--amp", default="bf16", choices=("auto", "fp32", "bf16", "fp16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=3, help="measured steps of each way")
    parser.add_argument("--crowd", type=int, default=64, help="images for the assigner; 0: leave it out")
    parser.add_argument("--boxes", type=int, default=300, help="boxes of each of them")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # what a process for one measurement is to do
    parser.add_argument("--model", default="v11n", help=argparse.SUPPRESS)
    parser.add_argument("--imgsz", type=int, default=320, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    if options.only in MODES:
        print(json.dumps(memory_of(options, options.only)))
        return
    if options.only == "times":
        print(json.dumps(times_of(options)))
        return
    if options.only in ASSIGNERS:
        print(json.dumps(assigner_of(options, options.only)))
        return
    device = choose_device(options.device)
    precision = choose_precision(options.amp, device).name
    print(f"batch {options.batch}, {precision}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if options.models:
        print(
            "| model | imgsz | way | kept, MiB | host, MiB | peak, MiB | time / plain |\n|---|---|---|---|---|---|---|"
        )
    for model in options.models:
        for size in options.sizes:
            seconds = child(options, "times", model=model, imgsz=size)
            for way in MODES:
                found = child(options, way, model=model, imgsz=size)
                peak = "" if MODES[way][1] and device.type == "cpu" else f"{found['peak']:.0f}"
                ratio = seconds[way] / seconds["plain"]
                row = f"{found['kept']:.1f} | {found['host']:.1f} | {peak} | {ratio:.2f}"
                print(f"| {model} | {size} | {way} | {row} |", flush=True)
    if options.crowd:
        print(f"assigner: {options.crowd} images of {options.boxes} boxes")
        ours, theirs = (child(options, kind) for kind in ASSIGNERS)
        for kind, found in zip(ASSIGNERS, (ours, theirs), strict=True):
            print(f"  {kind}: {found['peak']:.0f} MiB, {found['seconds']:.2f} s, target weight {found['weight']:.2f}")
        print(f"  time, dense / sparse: {theirs['seconds'] / ours['seconds']:.1f}")


if __name__ == "__main__":
    try:
        main(parse())
    except DetectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
