"""What fits a device: trials of a run's ways to take a step, and `batch: auto`."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from detector.config import Settings
from detector.data.dataset import ValidationSet
from detector.errors import ConfigError
from detector.fitting import trial
from detector.fitting.capacity import free_memory
from detector.fitting.crowd import heaviest
from detector.fitting.search import MODES, SPARE, Trial, cuts, mode_of, modes_on, recommend, search, size
from detector.fitting.trial import Job
from detector.run.build import indices
from detector.run.run import Say
from detector.step.plan import Cut

CUDA_CONTEXT = 512 * 2**20  # bytes of a GPU that CUDA takes for itself, before the allocator has any
LEAST_NORM_BATCH = 8  # images that BatchNorm should see, where they fit

Measure = Callable[[str, Cut], Trial]


@dataclass(frozen=True)
class Bench:
    """A run of which trials are made, and the device that they are made on."""

    settings: Settings
    device: torch.device
    memory: int  # bytes that one device's process may take
    devices: int  # processes of the run
    job: Job  # of the run as it is; a trial's has another cut

    def modes(self) -> list[str]:
        return modes_on(self.device.type)

    def planned(self) -> list[Cut]:
        return cuts(self.settings, self.devices, self.job.images)

    def measure(self, mode: str, cut: Cut) -> Trial:
        """A trial on the device, with the spare share of the memory left alone."""
        checkpoint, offload = MODES.get(mode, (self.settings.checkpoint, self.settings.offload))
        device = "cpu" if self.device.type == "cpu" else self.settings.device
        update = {"batch": cut.batch, "checkpoint": checkpoint, "offload": offload, "device": device}
        job = self.job.with_cut(self.settings.model_copy(update=update), cut.accumulate)
        limit = int(self.memory * (1 - SPARE))
        peak, rate = trial.measure(job, self.device, limit)
        return Trial(mode, cut, peak, rate, fits=peak is not None and peak <= limit)


def bench(settings: Settings, device: torch.device, devices: int, memory: int | None, say: Say) -> Bench:
    """The bench of a run; `memory`: bytes that a whole device may give, None: all that is free.

    The data set's index is read, and its most crowded images; nothing is kept or written.
    """
    training, validation = indices(settings, say)
    images = ValidationSet(validation, settings.imgsz)
    shapes = [images.shape(i) for i in range(len(images))]
    job = Job(
        settings=settings,
        accumulate=1,
        classes=len(training.names),
        images=len(training),
        sample=heaviest(training, settings),
        shape=max(shapes, key=lambda shape: shape[0] * shape[1], default=(settings.imgsz, settings.imgsz)),
    )
    return Bench(settings, device, budget(device, devices, memory), devices, job)


def budget(device: torch.device, devices: int, memory: int | None) -> int:
    """Bytes that the process of one device may take: of a GPU what its context leaves, of the host a share."""
    if device.type != "cuda":
        return (free_memory(device) if memory is None else memory) // devices
    free = free_memory(device)  # which also makes the context
    return free if memory is None else min(free, memory - CUDA_CONTEXT)


def tried(measure: Measure, settings: Settings, modes: Iterable[str], planned: list[Cut], say: Say) -> list[Trial]:
    """The trials of each mode, told as they come."""
    found: list[Trial] = []

    def told(mode: str, cut: Cut) -> Trial:
        one = measure(mode, cut)
        peak = "takes too much" if one.peak is None else f"takes {size(one.peak)}"
        rate = "" if one.rate is None else f", {one.rate:.1f} images/s"
        say(f"tried     batch {cut.batch}, {mode}: {peak}{rate}{'' if one.fits else '; does not fit'}")
        return one

    for mode in modes:
        found += search(settings, planned, lambda cut, mode=mode: told(mode, cut))
    return found


def choose_batch(settings: Settings, device: torch.device, devices: int, say: Say) -> Settings:
    """The settings with a number for `batch: auto`: the fastest that fits, with all else as it is.

    Raises ConfigError where nothing fits.
    """
    here = bench(settings, device, devices, None, say)
    mode = mode_of(settings)
    found = tried(here.measure, settings, [mode], here.planned(), say)
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
    return settings.model_copy(update={"batch": chosen.batch})


def allocator(device: torch.device) -> str:
    """How the GPU's allocator is set up, as far as it changes what fits; empty on other devices."""
    if device.type != "cuda":
        return ""
    setup = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "as torch has it"
    hint = "" if "expandable_segments:True" in setup else "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True fits more"
    return f"{setup}{hint}"
