"""A trial: steps of the real run with one micro-batch and one way of keeping activations, and the memory they take.

On a CPU each trial is a process of its own, `python -m detector.fitting.trial JOB`, so that nothing is left over from
earlier ones and one that wants too much can be ended. On a GPU the allocator does both.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from detector.config import Settings
from detector.data.batch import Batch, Sample, collate
from detector.data.image import Letterbox
from detector.device import choose_device
from detector.distributed import GradientSum
from detector.errors import ConfigError
from detector.evaluation.evaluate import detect
from detector.fitting.capacity import resident
from detector.memory import OutOfMemoryError, attempt
from detector.precision import choose_precision
from detector.run.build import chosen_optimizer, gains_of, prepared_network, step_rules
from detector.step.ema import Ema
from detector.step.optim import build_optimizer
from detector.step.plan import Window
from detector.step.schedule import Rates
from detector.step.state import TrainState
from detector.step.statistics import set_modes
from detector.step.step import train_window

AT_REST = {"weights": 0.0, "norms": 0.0, "biases": 0.0}  # all the work, and weights that stay
MICRO_BATCHES = 4  # of a trial's window: gradients are there while all but the first run
SECONDS, LEAST, MOST = 1.0, 2, 5  # steps are timed for a second, but two at least and five at most
TRIES = 20  # fp16 finds its loss scale, and only then there are averages and momentum
OVER = 1.5  # times the memory: a trial that takes more is ended
PAUSE = 0.05  # seconds between two looks at a trial


@dataclass(frozen=True)
class Job:
    """What a trial needs to know, and no data set."""

    settings: Settings  # with the batch, checkpoint and offload to try
    accumulate: int
    classes: int
    images: int  # of the data set
    sample: Sample  # the image of which all micro-batches consist
    shape: tuple[int, int]  # (height, width) of the largest validation image

    def batch(self) -> Batch:
        """A micro-batch; all its images are equally crowded."""
        return collate([self.sample] * self.settings.batch)

    def with_cut(self, settings: Settings, accumulate: int) -> "Job":
        return replace(self, settings=settings, accumulate=accumulate)

    def save(self, path: Path) -> None:
        sample = {
            "image": torch.from_numpy(self.sample.image),
            "boxes_xyxy": torch.from_numpy(self.sample.boxes_xyxy),
            "classes": torch.from_numpy(self.sample.classes),
            "index": self.sample.index,
        }
        plain = {"settings": self.settings.model_dump(mode="json"), "sample": sample}
        named = {name: getattr(self, name) for name in ("accumulate", "classes", "images", "shape")}
        torch.save(plain | named, path)

    @classmethod
    def load(cls, path: Path) -> "Job":
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        image, boxes, classes, index = saved.pop("sample").values()
        sample = Sample(image.numpy(), boxes.numpy(), classes.numpy(), index)
        return cls(settings=Settings(**saved.pop("settings")), sample=sample, **saved)


class Measured(NamedTuple):
    """What a trial took; peak None: it was ended, or the device refused."""

    peak: int | None  # bytes
    rate: float | None  # images a second


def measure(job: Job, device: torch.device, limit: int) -> Measured:
    """Run a trial on the device, where it may take `limit` bytes."""
    return on_gpu(job, device, limit) if device.type == "cuda" else in_child(job, limit)


def run(job: Job, device: torch.device) -> float:
    """Take steps of the run, then validate one batch; images a second of the steps."""
    settings = job.settings
    network = prepared_network(settings, job.classes, device, None)
    set_modes(network, settings.norm == "frozen")
    steps = -(-job.images // (settings.batch * job.accumulate)) * settings.epochs
    optimizer = build_optimizer(network, chosen_optimizer(settings, steps, job.classes), settings.weight_decay)
    state = TrainState(network, Ema(network), optimizer, choose_precision(settings.amp, device))
    rules, rates = step_rules(settings, network), Rates(AT_REST, 0.9, gains_of(settings, network))
    gradients = GradientSum(network)
    batch, count = job.batch(), min(max(job.accumulate, 2), MICRO_BATCHES)
    window = Window(0, 0, ((tuple(range(settings.batch)),) * count,))

    def step() -> bool:
        on_device = (batch.to(device) for _ in range(count))  # one at a time, as in a run
        return train_window(state, gradients, rules, window, on_device, rates).applied

    for _ in range(TRIES):
        if step():
            break
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < SECONDS):
        start = time.perf_counter()
        step()  # its report is on the host: the device is done
        seconds.append(time.perf_counter() - start)
    validate(job, state, device)
    return window.images / min(seconds)  # the fastest is the one that the machine disturbed least


def validate(job: Job, state: TrainState, device: torch.device) -> None:
    """Detect on one batch of the largest validation shape, as the end of an epoch does."""
    height, width = job.shape
    one = torch.from_numpy(job.sample.image)[:height, :width]
    batch = job.settings.val_batch or job.settings.batch
    letterboxes = [Letterbox(height, width, 1.0, 1.0, 0, 0)] * batch
    images = one.expand(batch, *one.shape).contiguous()
    for _ in detect(
        state.ema.network,
        [(images, letterboxes, list(range(batch)))],
        device=device,
        autocast=state.precision.autocast,
    ):
        pass


def on_gpu(job: Job, device: torch.device, limit: int) -> Measured:
    """A trial in this process, whose allocator refuses more than `limit` and is empty again afterwards."""
    total = torch.cuda.mem_get_info(device)[1]
    before = beside(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
    found = Measured(None, None)
    try:
        if rate := rate_of(job, device):
            kernels = max(beside(device) - before, 0)  # loaded when first used
            found = Measured(torch.cuda.max_memory_reserved(device) + kernels, rate)
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.reset_peak_memory_stats(device)  # what the run shows is its own
    return found


def rate_of(job: Job, device: torch.device) -> float | None:
    """Images a second of a trial; None where the device refused memory."""
    try:
        return attempt(lambda: run(job, device))
    except OutOfMemoryError:  # in a step, which is undone; what there was is free again
        return None


def beside(device: torch.device) -> int:
    """Bytes in use on the GPU outside this process's allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def in_child(job: Job, limit: int) -> Measured:
    """A trial in a new process, which is ended when it takes OVER times the limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.pt")
        job.save(path)
        text = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
        with Path(folder, "out").open(**text) as out, Path(folder, "err").open(**text) as err:
            status = watched(path, out, err, OVER * limit)
            if status == 0:
                out.seek(0)
                return Measured(**json.loads(out.read().splitlines()[-1]))
            if status < 0:  # ended by us, or by a system without memory
                return Measured(None, None)
            err.seek(0)
            why = ["no word", *err.read().strip().splitlines()][-1]
            raise ConfigError(f"a trial with batch={job.settings.batch} failed, and not for want of memory: {why}")


def watched(job: Path, out: IO[str], err: IO[str], most: float) -> int:
    """The exit status of a trial's process; it is killed when it has taken `most` bytes, or when we are stopped."""
    # It measures one device for all: nothing of what torchrun says of this process is said of it.
    alone = {key: value for key, value in os.environ.items() if "RANK" not in key and "WORLD_SIZE" not in key}
    command = [sys.executable, "-m", "detector.fitting.trial", str(job)]
    process = subprocess.Popen(command, stdout=out, stderr=err, env=alone)
    try:
        while process.poll() is None:
            if resident("VmHWM", process.pid) > most:
                process.kill()
            time.sleep(PAUSE)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return process.returncode


def main(path: str) -> None:
    """What the process of a trial does: measure, and print it."""
    job = Job.load(Path(path))
    rate = rate_of(job, choose_device(job.settings.device))
    print(json.dumps({"peak": resident("VmHWM") if rate else None, "rate": rate}))


if __name__ == "__main__":
    main(sys.argv[1])
