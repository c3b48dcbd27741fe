"""What is sought: columns of metrics.csv and the time that an image takes, each as high or as low as it goes."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from detector.config.settings import Settings
from detector.data.dataset import ValidationSet
from detector.data.index import Index
from detector.device import choose_device
from detector.errors import ConfigError, did_you_mean
from detector.inference.infer import Limits
from detector.inference.load import load
from detector.reporting.run_files import LOSSES
from detector.run.build import prepared_network

JUDGED = ("mAP50-95", "mAP50", "mAP75", "precision", "recall", "F1")  # by validation, the higher the better
LATENCY = "latency"  # milliseconds an image, the lower the better
WARM, TIMED = 5, 30  # images
USUAL = Limits(conf=0.25, iou=0.7, max_det=300)  # what `detector predict` looks for


@dataclass(frozen=True)
class Objective:
    """A number of a trial."""

    name: str

    @property
    def direction(self) -> str:
        return "maximize" if self.name in JUDGED else "minimize"

    def text(self, value: float) -> str:
        return f"{value:.2f} ms" if self.name == LATENCY else f"{value:.4f}"


def objectives_of(names: Sequence[str] | None, settings: Settings) -> tuple[Objective, ...]:
    """The objectives of these names, else the settings' `metric`. ConfigError where trials would not have them."""
    names = [settings.metric] if names is None else names
    if not names:
        raise ConfigError("objectives=[]: name at least one, or leave it out for the config's metric")
    for number, name in enumerate(names):
        known = (*JUDGED, *LOSSES, LATENCY)
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"objectives={name}: is no column of metrics.csv that is sought, {', '.join(known)}.{hint}"
            )
        if name in names[:number]:
            raise ConfigError(f"objectives={','.join(names)}: {name} stands there twice; keep one")
        if name in JUDGED and not settings.val:
            raise ConfigError(
                f"val=false: without validation metrics.csv has no {name}; set val=true, or objectives=box"
            )
        if name in LOSSES:
            _check_loss(name, settings)
    return tuple(map(Objective, names))


def _check_loss(name: str, settings: Settings) -> None:
    """Raise ConfigError where the model has no such loss."""
    terms = prepared_network(settings, ["any"], torch.device("cpu"), None).head.terms
    if name not in terms:
        raise ConfigError(f"objectives={name}: the losses of this model are {', '.join(terms)}")


def latency(checkpoint: Path, settings: Settings, images: Index) -> float:
    """The median of the milliseconds that one image takes on the settings' device: network and suppression.

    The images are of the data set, a square of imgsz each, one at a time, and decoded already. As whatever else the
    machine does counts, it is the same only about.
    """
    device = choose_device(settings.device)
    runtime = load(checkpoint, device, settings.amp, settings.nms).runtime
    squares = ValidationSet(images, settings.imgsz, runtime.stride, rect=False)
    shown = [one[0] for one in map(squares.__getitem__, range(min(8, len(squares)))) if one is not None]
    if not shown:
        raise ConfigError("objectives=latency: none of the first validation images can be read")
    seconds = []
    for number in range(WARM + TIMED):
        image = torch.from_numpy(shown[number % len(shown)])[None]
        start = time.perf_counter()
        runtime.find(image, USUAL)  # gives results on the host: a GPU has finished
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[WARM:])
