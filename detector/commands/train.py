"""`detector train`, and `train` for Python."""

import argparse
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import yaml

from detector import distributed
from detector.config import Settings, file_and_overrides, load_settings
from detector.device import choose_device, choose_devices
from detector.errors import ConfigError, DetectorError
from detector.fitting.fit import choose_batch
from detector.run import loop
from detector.run.loop import TrainResult, say_now
from detector.run.resume import Resume, take_up


def run(options: argparse.Namespace) -> int:
    """The command: an optional config file, then overrides. Several devices are several processes of it."""
    words = options.arguments
    if not words:
        raise ConfigError("name a config file, or at least data=...: detector train configs/quickstart.yaml")
    settings, resume = take_up(load_settings(Settings, *file_and_overrides(words)))
    processes = len(choose_devices(settings.device))
    if processes > 1 and not distributed.launched():
        return distributed.launch(processes, ["train", *words, *(["--debug"] if options.debug else [])])
    start(settings, resume)
    return 0


def train(config: str | Path | None = None, **settings: Any) -> TrainResult:
    """Train a detector by a config file, by settings, or by both (the settings win).

    Returns the run's folder, its checkpoints and the best checkpoint's metrics. Raises ConfigError, DataError or
    CheckpointError, all ValueErrors, for what the caller can mend.
    """
    overrides = [f"{key}={yaml.safe_dump(_plain(value), default_flow_style=True)}" for key, value in settings.items()]
    chosen, resume = take_up(load_settings(Settings, Path(config) if config is not None else None, overrides))
    if len(choose_devices(chosen.device)) > 1 and not distributed.launched():
        raise ConfigError(f"device={chosen.device}: from Python, start one process a device with torchrun")
    return start(chosen, resume)


def start(settings: Settings, resume: Resume | None) -> TrainResult:
    """Train, once `batch: auto` is a number: the main process measures, and all take what it found.

    It does so before the processes are joined: a trial is none of theirs, and until then no GPU has been touched.
    """
    device = choose_device(settings.device)
    outcome: Future[Settings] = Future()
    if settings.batch == "auto" and distributed.launch_rank() == 0:
        measure(outcome, settings, device)
    else:
        outcome.set_result(settings)
    with distributed.process_group(device):
        with distributed.together(device):
            settings = outcome.result()
        settings = distributed.from_main(settings)
        return loop.train(settings, resume)


def measure(outcome: "Future[Settings]", settings: Settings, device: torch.device) -> None:
    """Set the outcome: the settings with a batch that fits, or why there are none."""
    try:
        outcome.set_result(choose_batch(settings, device, distributed.launch_size(), say_now))
    except DetectorError as error:
        outcome.set_exception(error)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
