"""What fits a device: trials of a run's ways to take a step, and `batch: auto`."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from detector import distributed
from detector.config.settings import Settings
from detector.data.index import Index
from detector.data.loader import worker_count
from detector.errors import ConfigError
from detector.fitting import trial
from detector.fitting.crowd import heaviest
from detector.fitting.rehearsal import LEAST, MICRO_BATCHES, Job
from detector.fitting.search import (
    MODES,
    PIPELINED,
    SPARE,
    Trial,
    check_whole,
    cuts,
    in_stages,
    mode_of,
    modes_on,
    recommend,
    rounds,
    search,
    size,
)
from detector.reporting.progress import Bar
from detector.reporting.table import clock
from detector.run.build import indices, training_set
from detector.run.nominal import with_nominal_batch
from detector.run.run import Say
from detector.step.plan import Cut

CUDA_CONTEXT = 512 * 2**20  # bytes of a GPU that CUDA takes for itself, before the allocator has any
LEAST_NORM_BATCH = 8  # images that BatchNorm should see, where they fit

Measure = Callable[[str, Cut], Trial]


@dataclass(frozen=True)
class Bench:
    """A run of which trials are made, and the devices that they are made on: the first, or in stages all."""

    settings: Settings
    devices: Sequence[torch.device]  # one a process of the run
    memory: int  # bytes that one device's process may take
    job: Job  # of the run as it is; a trial's has another cut

    def modes(self) -> list[str]:
        return modes_on(self.devices[0].type, len(self.devices), self.settings)

    def planned(self) -> list[Cut]:
        return cuts(self.settings, len(self.devices), len(self.job.training))

    def measure(self, mode: str, cut: Cut) -> Trial:
        """A trial on the device, with the spare share of the memory left alone."""
        checkpoint, offload = MODES.get(mode, (self.settings.checkpoint, self.settings.offload))
        update = {"batch": cut.batch, "checkpoint": checkpoint, "offload": offload}
        devices = self.devices[:1]
        if mode in PIPELINED:
            update, cut, devices = {**update, "pipeline": "auto"}, in_stages(cut), self.devices
        job = self.job.with_cut(self.settings.model_copy(update=update), cut.accumulate)
        limit = int(self.memory * (1 - SPARE))
        peak, rate = trial.measure(job, devices, limit)
        return Trial(mode, cut, peak, rate, fits=peak is not None and peak <= limit)


def bench(settings: Settings, chosen: Sequence[torch.device], memory: int | None, say: Say) -> Bench:
    """The bench of a run on the chosen devices; `memory`: bytes that one may give, None: all that is free.

    The data set's index is read, and its most crowded images; nothing is kept or written.
    """
    training, validation = indices(settings, say)
    settings = with_nominal_batch(settings, len(training), len(chosen), say)
    job = Job(settings, 1, training, validation, heaviest(training, settings), kept_images(training, settings))
    here = distributed.local_world_size() if distributed.launched() else len(chosen)
    return Bench(settings, chosen, budget(chosen[0], here, memory), job)


def kept_images(training: Index, settings: Settings) -> int:
    """Bytes of decoded images in the run's own process: with loader processes it is they who have them."""
    if worker_count(settings.workers):
        return 0
    mode = "off" if settings.cache == "disk" else settings.cache  # a trial writes no file
    return training_set(training, settings.model_copy(update={"cache": mode})).cache.memory_bytes


def budget(device: torch.device, devices: int, memory: int | None) -> int:
    """Bytes that the process of one device may take: of a GPU what its context leaves, of the host a share.

    `devices` are those of this machine.
    """
    if device.type != "cuda":
        return (trial.free_on(device) if memory is None else memory) // devices
    free = trial.free_on(device)
    return free if memory is None else min(free, memory - CUDA_CONTEXT)


def tried(
    measure: Measure, settings: Settings, modes: Sequence[str], planned: Sequence[Cut], least: int, say: Say
) -> list[Trial]:
    """The trials, told as they come, on a terminal with what is being tried below; by modes and micro-batches.

    The first are those that give BatchNorm `least` images; smaller ones are tried only where none of these fits in any
    mode. A mode is tried with the micro-batches that fit no plainer one: where both fit, it is never the faster.
    """
    found: list[Trial] = []
    enough, small = rounds(planned, settings.norm, least)
    with Bar(bar_format="{desc} ({n_fmt} done in {elapsed})", disable=None, leave=False) as bar:

        def told(mode: str, cut: Cut) -> Trial:
            bar.set_description_str(f"trying    batch {cut.batch}, {mode}")
            start = time.perf_counter()
            found.append(measure(mode, cut))
            seconds = time.perf_counter() - start
            bar.update()
            with bar.external_write_mode():
                say(line(found[-1]))
                if len(found) == 1 and (more := to_come(found[0], enough, small, len(modes), seconds)):
                    say(f"time      up to {clock(more)} for the trials that are left")
            return found[-1]

        for planned_now, over in ((enough, None), (small, enough[0])):
            if any(one.fits for one in found):
                break
            for mode in modes:
                fitted = max((one.cut for one in found if one.fits), key=lambda cut: cut.batch, default=None)
                left = [cut for cut in planned_now if fitted is None or cut.batch > fitted.batch]
                search(settings, left, lambda cut, mode=mode: told(mode, cut), fitted, over)
    return sorted(found, key=lambda one: (modes.index(one.mode), one.batch))


def line(one: Trial) -> str:
    """A trial in words."""
    peak = "takes too much" if one.peak is None else f"takes {size(one.peak)}"
    rate = "" if one.rate is None else f", {one.rate:.1f} images/s"
    return f"tried     batch {one.batch}, {one.mode}: {peak}{rate}{'' if one.fits else '; does not fit'}"


def to_come(first: Trial, enough: Sequence[Cut], small: Sequence[Cut], modes: int, seconds: float) -> float:
    """Seconds of the trials after the first, which took `seconds`.

    Where it fits: each of the larger micro-batches once, and the largest in each mode. Where it does not: itself in the
    other modes, and the smaller ones once. A guess, as nobody knows what will fit.
    """

    def of(cut: Cut) -> float:
        images = (1 + LEAST) * MICRO_BATCHES * max(cut.batch - first.batch, 0)
        return seconds + (images / first.rate if first.rate else 0.0)

    if first.fits:
        return sum(map(of, enough[1:])) + (modes - 1 if len(enough) > 1 else 0) * of(enough[-1])
    return (modes - 1) * seconds + sum(map(of, small))


def choose_batch(settings: Settings, device: torch.device, devices: int, say: Say) -> Settings:
    """The settings with a number for `batch: auto`: the fastest that fits, with all else as it is.

    Raises ConfigError where nothing fits.
    """
    check_whole(settings, "batch=auto")
    here = bench(settings, [device] * devices, None, say)
    mode = mode_of(settings)
    found = tried(here.measure, settings, [mode], here.planned(), LEAST_NORM_BATCH, say)
    chosen = recommend(found, settings.norm, LEAST_NORM_BATCH)
    if chosen is None:
        raise ConfigError(
            f"batch=auto: not even one image fits the {size(here.memory)} that are free on {device}; "
            "`detector tune` tries checkpoint and offload, too; or take a smaller imgsz or model"
        )
    say(
        f"batch     auto: {chosen.batch}, {size(chosen.peak or 0)} of the {size(here.memory)} that are free, "
        f"{chosen.rate or 0:.1f} images/s; the fastest of {', '.join(str(one.batch) for one in found)}"
    )
    return here.settings.model_copy(update={"batch": chosen.batch})


def allocator(device: torch.device) -> str:
    """How the GPU's allocator is set up, as far as it changes what fits; empty on other devices."""
    if device.type != "cuda":
        return ""
    setup = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "as torch has it"
    hint = "" if "expandable_segments:True" in setup else "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True fits more"
    return f"{setup}{hint}"
