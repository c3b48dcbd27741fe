"""`detector train`, and `train` for Python."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from detector import distributed, words
from detector.config import Settings, load_settings
from detector.device import choose_device, choose_devices
from detector.errors import ConfigError
from detector.fitting.fit import choose_batch
from detector.folders import last_run
from detector.run import loop
from detector.run.loop import TrainResult, say_now
from detector.run.resume import Resume, take_up


def run(options: argparse.Namespace) -> int:
    """The command: an optional config file, then overrides. Several devices are several processes of it."""
    given = options.arguments
    if not given:
        raise ConfigError("name a config file, or at least data=...: detector train configs/quickstart.yaml")
    said = words.of_run(given)
    settings, resume = chosen(load_settings(Settings, said.file, said.overrides, said.values))
    processes = len(choose_devices(settings.device))
    if processes > 1 and not distributed.launched():
        return distributed.launch(processes, ["train", *given, *(["--debug"] if options.debug else [])])
    start(settings, resume, said.notes)
    return 0


def train(config: str | Path | Mapping[str, Any] | None = None, **settings: Any) -> TrainResult:
    """Train a detector by a config (a file, or a dict of settings), by settings, or by both (the settings win).

    A data set's YAML file may stand in the config's place. Values may be numpy's and torch's. Returns the run's folder,
    its checkpoints and the best checkpoint's metrics. Raises ConfigError, DataError or CheckpointError, all
    ValueErrors, for what the caller can mend.
    """
    first = config if isinstance(config, Mapping) else {}
    said = words.of_run([config] if isinstance(config, str | Path) else [], settings.keys())
    values = {**first, **said.values, **settings}
    settled, resume = chosen(load_settings(Settings, said.file, (), values))
    if len(choose_devices(settled.device)) > 1 and not distributed.launched():
        raise ConfigError(f"device={settled.device}: from Python, start one process a device with torchrun")
    return start(settled, resume, said.notes)


def chosen(settings: Settings) -> tuple[Settings, Resume | None]:
    """The settings to train by, and the checkpoint to go on from if there is one."""
    if settings.resume is True:
        settings = settings.model_copy(update={"resume": last_run(settings.project)})
    return take_up(settings)


def start(settings: Settings, resume: Resume | None, notes: Sequence[str] = ()) -> TrainResult:
    """Train, once `batch: auto` is a number: the main process measures, and all take what it found."""
    device = choose_device(settings.device)
    with distributed.process_group(device):
        for note in notes if distributed.is_main() else ():
            say_now(note)
        if settings.batch == "auto":
            with distributed.together(device):
                settings = measured(settings, device)
            settings = distributed.from_main(settings)
        return loop.train(settings, resume)


def measured(settings: Settings, device: torch.device) -> Settings:
    """The settings with a batch that fits; on other ranks than the main one as they are."""
    if not distributed.is_main():
        return settings
    return choose_batch(settings, device, distributed.world_size(), say_now)
