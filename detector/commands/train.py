"""`detector train`, and `train` for Python."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from detector import distributed
from detector.commands.seeds import train_seeds
from detector.config import words
from detector.config.settings import Settings, TrainSettings, load_settings
from detector.device import choose_device, choose_devices
from detector.errors import ConfigError, DetectorError
from detector.fitting.fit import choose_batch
from detector.folders import last_run
from detector.run import loop
from detector.run.loop import TrainResult, say_now
from detector.run.resume import Resume, take_up
from detector.run.run import NOBODY, Watch


def run(options: argparse.Namespace) -> int:
    """The command: an optional config file, then overrides. Several devices are several processes of it."""
    given = options.arguments
    if not given:
        raise ConfigError("name a config file, or at least data=...: detector train configs/quickstart.yaml")
    said = words.of_run(given)
    loaded = load_settings(TrainSettings, said.file, said.overrides, said.values)
    check_seeds(loaded)
    settings, resume = chosen(loaded.of_run())
    processes = len(choose_devices(settings.device))

    def run_once(settings: Settings, *others: str) -> int:
        if processes > 1 and not distributed.launched():
            flags = ["--debug"] if options.debug else []
            return distributed.launch(processes, ["train", *given, *others, *flags])
        start(settings, resume, said.notes)
        return 0

    if loaded.seeds is None:
        return run_once(settings)
    return train_seeds(settings, loaded.seeds, lambda one, name: run_once(one, f"seed={one.seed}", f"name={name}"))


def check_seeds(settings: TrainSettings) -> None:
    """Raise ConfigError where several seeds are named, and their runs cannot be made one after the other."""
    if settings.seeds is None:
        return
    if settings.resume is not None:
        raise ConfigError(f"seed={settings.seed}: a run that goes on has its seed; leave out resume, or seed")
    if distributed.launched():
        raise ConfigError(f"seed={settings.seed}: torchrun starts one run; name one seed, or start it by device=0,1")
    if not settings.seed:
        raise ConfigError("seed=[]: names none; name at least one, as in seed=[0,1,2]")


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_window: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a detector by a config (a file, or a dict of settings), by settings, or by both (the settings win).

    A data set's YAML file may stand in the config's place. Values may be numpy's and torch's. Returns the run's folder,
    its checkpoints and the best checkpoint's metrics. Raises ConfigError, DataError or CheckpointError, all
    ValueErrors, for what the caller can mend.

    on_epoch, on_window: called after every epoch and every optimizer step, with a line of metrics.csv and one of
    steps.jsonl. Either may raise StopTraining: the run is saved, its best weights are measured, and this returns. Of
    several processes that of rank 0 calls them, and all are to be given them alike.
    """
    first = config if isinstance(config, Mapping) else {}
    said = words.of_run([config] if isinstance(config, str | Path) else [], settings.keys())
    values = {**first, **said.values, **settings}
    settled, resume = chosen(load_settings(Settings, said.file, (), values))
    if len(choose_devices(settled.device)) > 1 and not distributed.launched():
        raise ConfigError(f"device={settled.device}: from Python, start one process a device with torchrun")
    return start(settled, resume, said.notes, Watch(on_window, on_epoch))


def chosen(settings: Settings) -> tuple[Settings, Resume | None]:
    """The settings to train by, and the checkpoint to go on from if there is one."""
    if settings.resume is True:
        settings = settings.model_copy(update={"resume": last_run(settings.project)})
    return take_up(settings)


def start(settings: Settings, resume: Resume | None, notes: Sequence[str] = (), watch: Watch = NOBODY) -> TrainResult:
    """Train, once `batch: auto` is a number: the main process measures, and all take what it found.

    It does so before the processes are joined: a trial is none of theirs, and until then no GPU has been touched.
    """
    main = distributed.launch_rank() == 0
    for note in notes if main else ():
        say_now(note)
    device = choose_device(settings.device)
    outcome: Future[Settings] = Future()
    if settings.batch == "auto" and main:
        measure(outcome, settings, device)
    else:
        outcome.set_result(settings)
    with distributed.process_group(device):
        with distributed.together(device):
            settings = outcome.result()
        settings = distributed.from_main(settings)
        return loop.train(settings, resume, watch=watch)


def measure(outcome: "Future[Settings]", settings: Settings, device: torch.device) -> None:
    """Set the outcome: the settings with a batch that fits, or why there are none."""
    try:
        outcome.set_result(choose_batch(settings, device, distributed.launch_size(), say_now))
    except DetectorError as error:
        outcome.set_exception(error)
