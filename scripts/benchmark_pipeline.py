"""Stages and replicas on random images: memory of each process, images a second, and how long stages wait.

    python scripts/benchmark_pipeline.py [--model v11n] [--sizes 640 2048] [--batch 1] [--accumulate 8] [--devices 2]

Steps of batch x accumulate images, the same in all ways: in one process, on replicas, in stages that are cut by their
arithmetic, and in stages with one micro-batch under way at a time. Processes are on the CPU, each with a core of its
own where there are enough, and talk over gloo. Memory: resident at the peak of the first large step less that before
it, which adds gradients and what is sent. Time: the fastest of several steps. Waiting: the share of a step in which a
stage waits for another, its mean over the stages, beside (stages - 1) / (micro-batches + stages - 1), which it is where
all stages take equally long and sending takes no time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from benchmark_accumulation import Bench

from detector import distributed
from detector.fitting.capacity import resident
from detector.mesh import Mesh
from detector.model.cost import layer_costs
from detector.model.staging import first_layers, told
from detector.step.pipeline import Pipeline
from detector.step.plan import Window, split


def main() -> int:
    options = parsed()
    if options.way is not None:
        work(options)
        return 0
    stages = options.devices
    ways = [("one process", 1, 1, 1), (f"{stages} replicas", stages, 1, 1)]
    ways += [(f"{stages} stages", stages, stages, stages), (f"{stages} stages, one at a time", stages, stages, 1)]
    for imgsz in options.sizes:
        print(f"\n{options.model} at {imgsz}, {options.accumulate} micro-batches of {options.batch}, {options.amp}")
        print("| way | MiB of each process | images/s | beside one process | waiting | of even stages |")
        print("|---|---|---|---|---|---|")
        alone = None
        for name, processes, count, depth in ways:
            ranks = measured(options, imgsz, processes, count, depth)
            rate = options.batch * options.accumulate / max(one["seconds"] for one in ranks)
            alone = alone or rate
            memory = ", ".join(f"{one['peak'] / 2**20:.0f}" for one in ranks)
            waiting = sum(one["waited"] / one["seconds"] for one in ranks) / processes
            even = (count - 1) / (options.accumulate + count - 1) if depth > 1 else (count - 1) / count
            idle = f"{waiting:.0%} | {even:.0%}" if count > 1 else "|"
            print(f"| {name} | {memory} | {rate:.2f} | {rate / alone:.2f} | {idle} |", flush=True)
        print(f"stages: {ranks[0]['told']}")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="v11n")
    parser.add_argument("--sizes", type=int, nargs="+", default=[640, 2048])
    parser.add_argument("--batch", type=int, default=1, help="images of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches of a step, over all replicas")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--amp", default="fp32")
    parser.add_argument("--way", type=json.loads, help=argparse.SUPPRESS)  # of a process that measures
    return parser.parse_args()


def measured(options: argparse.Namespace, imgsz: int, processes: int, stages: int, depth: int) -> list[dict[str, Any]]:
    """What each of the processes of a way found."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    named = [f"--{name}={getattr(options, name)}" for name in ("model", "batch", "accumulate", "turns", "amp")]
    way = json.dumps({"imgsz": imgsz, "stages": stages, "depth": depth})
    command = [sys.executable, *launcher, __file__, *named, f"--way={way}"]
    # What is freed goes back at once, so that a peak is what was held.
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **settings})
    return json.loads(done.stdout.splitlines()[-1])


def work(options: argparse.Namespace) -> None:
    """Measure in one of the processes of a way; the first prints what all found."""
    options.device, options.imgsz = "cpu", options.way["imgsz"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[distributed.local_rank() % len(cores)]})
    with distributed.process_group(torch.device("cpu")):
        mesh = Mesh.of(options.way["stages"])
        bench, told_of = Bench(options, options.batch * options.accumulate), ""
        pipeline = None
        if mesh.stages > 1:
            costs = layer_costs(bench.state.network, options.imgsz)
            starts = first_layers(mesh.stages, mesh.stages, costs)
            pipeline, told_of = Pipeline(mesh, bench.state.network, starts, 3, bench.device), told(starts, costs)
            pipeline.depth = options.way["depth"]
            pipeline.connect()
            bench.rules = replace(bench.rules, pipeline=pipeline)
        window = Window(0, 0, split(range(len(bench.samples)), options.batch, mesh.replicas))
        micro_batches = bench.window(range(len(bench.samples)), options.batch)[1]
        mine = micro_batches[mesh.replica * window.accumulate : (mesh.replica + 1) * window.accumulate]
        mine = mine if mesh.first else [one.without_images() for one in mine]
        tiny = [one._replace(images=one.images[:, :64, :64], boxes_xyxy=one.boxes_xyxy.clamp(max=64)) for one in mine]
        bench.step(window, tiny)  # libraries loaded, momentum and averages allocated
        before, found = resident("VmRSS"), []
        for _ in range(options.turns):
            start, waited = time.perf_counter(), pipeline.waited if pipeline else 0.0
            bench.step(window, mine)
            found.append((time.perf_counter() - start, (pipeline.waited if pipeline else 0.0) - waited))
        seconds, waited = min(found)
        peak = resident("VmHWM") - before
        ranks = distributed.gather({"seconds": seconds, "waited": waited, "peak": peak, "told": told_of})
        if distributed.is_main():
            print(json.dumps(ranks))


if __name__ == "__main__":
    sys.exit(main())
