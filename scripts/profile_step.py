"""Where the time of a training step goes: a window by the shipped step, on random images, under torch's profiler.

    OMP_NUM_THREADS=1 python scripts/profile_step.py [--model v11n] [--imgsz 320] [--batch 16] [--amp fp32 bf16]
        [--compile default]

For each precision a table by kind of work: its share of a window, by the profiler, and so much of the CPU time that a
window takes without it, which other programs on the machine change little. Time is an operation's own, without what it
calls; what the backward pass does for the loss is the loss's. The last row is what the convolutions alone would allow.
bf16 is left out where the CPU would emulate it. On a CPU only: a GPU works while its host goes on.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from benchmark_accumulation import CLASSES, Bench
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent

from detector.errors import DetectorError
from detector.loss import criterion
from detector.precision import native_precision
from detector.run.build import class_parameters
from detector.step import compiling, step
from detector.step.ema import Ema
from detector.step.optim import Choice, build_optimizer
from detector.step.undo import Undo

# Parts of the step that are marked, by what is wrapped; whatever runs inside is of that kind.
MARK = "part: "
PARTS = ("assigner", "loss", "optimizer", "EMA", "clipping", "undo", "images to floats")
# What runs inside the network, by the names of operations; the first that matches.
OPERATIONS = (
    ("convolutions, backward", ("convolution_backward", "mkldnn_convolution_backward")),
    ("convolutions, forward", ("conv", "mkldnn_linear")),
    ("norms", ("batch_norm", "layer_norm", "group_norm")),
    ("activations", ("silu", "relu", "gelu", "hardswish", "sigmoid", "mish")),
    ("copies and joins", ("copy_", "contiguous", "clone", "cat", "empty", "resize", "zero_", "fill_")),
    ("compiled kernels", ("compiled", "inductor", "cpp_fused", "graph_")),
)  # fmt: skip
REST = "rest"
CONVOLUTIONS = ("convolutions, forward", "convolutions, backward")


class Profiled(Bench):
    """The bench with the optimizer that the options name, and compiled where they say so."""

    def __init__(self, options: argparse.Namespace, amp: str):
        options = argparse.Namespace(**{**vars(options), "amp": amp, "device": "cpu"})
        super().__init__(options, options.batch * options.accumulate)
        network = self.state.network
        choice = Choice(options.optimizer, 0.0, 0.9)
        self.state.optimizer = build_optimizer(network, choice, 0.0005, class_parameters(network))
        self.state.ema = Ema(network)
        self.measured = self.window(range(options.batch * options.accumulate), options.batch)
        if options.compile != "off":
            self.rules = replace(self.rules, forward=compiling.Compiled(options.compile, False, print))
            seconds = compiling.prepare(self.state, self.rules, options.batch, options.imgsz)
            print(f"compile {options.compile}: {seconds or 0:.0f} s")

    def take(self) -> None:
        self.step(*self.measured)


def marked(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with record_function(MARK + part):
            return function(*arguments, **named)

    return wrapped


def profiled(bench: Profiled, turns: int) -> dict[str, float]:
    """Seconds of a window by kind, means of `turns` windows."""
    state, plain = bench.state, bench.rules
    forward = plain.forward
    bench.rules = replace(plain, criterion=marked("loss", plain.criterion), forward=marked("network", forward))
    with ExitStack() as stack:
        for owner, name, part in (
            (criterion, "assign", "assigner"), (criterion, "cells_inside", "assigner"),
            (step, "finish_gradient", "clipping"), (state.ema, "update", "EMA"), (state.optimizer, "step", "optimizer"),
            (Undo, "__init__", "undo"), (Undo, "remember_weights", "undo"),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, marked(part, getattr(owner, name))))
        profile = stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
        for _ in range(turns):
            with record_function(MARK + "window"):
                bench.take()
    bench.rules = plain
    return {kind: seconds / turns for kind, seconds in by_kind(profile.events()).items()}


def by_kind(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Seconds of the events' own time, by kind; what is outside of all windows is left out."""
    events = list(events)
    # A node of the backward pass has the number of the operation that it is of.
    made_in = {event.sequence_nr: part_of(event) for event in events if event.sequence_nr >= 0 and part_of(event)}
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if any(one.name == MARK + "window" for one in line_of(event)):
            seconds[kind_of(event, made_in)] += event.self_cpu_time_total / 1e6
    return seconds


def line_of(event: FunctionEvent) -> Iterable[FunctionEvent]:
    """An event and those around it, from the inside."""
    while event is not None:
        yield event
        event = event.cpu_parent


def part_of(event: FunctionEvent) -> str:
    """The innermost marked part that an event is in; empty for none but the window."""
    names = (one.name.removeprefix(MARK) for one in line_of(event) if one.name.startswith(MARK))
    found = next(names, "")
    return "" if found == "window" else found


def kind_of(event: FunctionEvent, made_in: dict[int, str]) -> str:
    part = part_of(event)
    if not part:
        nodes = (one for one in line_of(event) if "evaluate_function" in one.name)
        node = next(nodes, None)
        part = made_in.get(node.sequence_nr, "") if node else ""
    if part in PARTS:
        return part
    for kind, names in OPERATIONS:
        if any(name in event.name.lower() for name in names):
            return kind
    return REST


def timed(bench: Profiled, turns: int) -> float:
    """Median CPU seconds of a window, of all threads, without the profiler."""
    seconds = []
    for _ in range(turns):
        start = time.process_time()
        bench.take()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def table(found: dict[str, float], images: int, seconds: float) -> str:
    whole = sum(found.values())
    shares = {kind: value / whole for kind, value in sorted(found.items(), key=lambda one: one[1], reverse=True)}
    alone = sum(shares.get(kind, 0.0) for kind in CONVOLUTIONS)
    shares |= {"**all**": 1.0, "convolutions alone": alone}
    lines = ["| | ms | share | images/s |", "|---|---|---|---|"]
    for kind, share in shares.items():
        rate = f"{images / seconds / share:.2f}" if kind in ("**all**", "convolutions alone") else ""
        lines.append(f"| {kind} | {share * seconds * 1e3:.0f} | {share:.1%} | {rate} |")
    return "\n".join(lines)


def main(options: argparse.Namespace) -> None:
    images = options.batch * options.accumulate
    print(
        f"{options.model}, {CLASSES} classes, imgsz {options.imgsz}, {options.accumulate} x {options.batch} images, "
        f"{options.optimizer}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for amp in options.amp:
        if amp == "bf16" and native_precision(torch.device("cpu")) != "bf16":
            print("\nbf16: left out, because this CPU emulates it")
            continue
        bench = Profiled(options, amp)
        timed(bench, 1)  # to warm up
        seconds = timed(bench, options.turns)
        print(
            f"\n{amp}, {options.turns} windows\n\n{table(profiled(bench, options.turns), images, seconds)}", flush=True
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v11n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16, help="images of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a window")
    parser.add_argument("--amp", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--compile", default="off", choices=("off", "default", "max"))
    parser.add_argument("--optimizer", default="AdamW", choices=("SGD", "MuSGD", "AdamW"))
    parser.add_argument("--turns", type=int, default=3, help="windows that are measured, and windows that are profiled")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except DetectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
