"""`detector train`, and `train` for Python."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from detector import distributed
from detector.config import Settings, load_settings, validated
from detector.errors import ConfigError
from detector.training import checkpoint
from detector.training import run as training_run
from detector.training.precision import choose_devices
from detector.training.run import TrainResult, say_now

CHANGEABLE = {
    "batch", "cache", "checkpoint", "data", "device", "max_bad_steps", "offload", "on_save_error", "patience", "plots",
    "save_minutes", "save_period", "val", "workers",
}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """The command: an optional config file, then overrides. Several devices are several processes of it."""
    words = list(options.arguments)
    file = Path(words[0]) if words and "=" not in words[0] else None
    overrides = words[1:] if file else words
    if not words:
        raise ConfigError("name a config file, or at least data=...: detector train configs/quickstart.yaml")
    settings, path, saved = read(file, overrides)
    processes = len(choose_devices(settings.device))
    if processes > 1 and not distributed.launched():
        return distributed.launch(processes, ["train", *words, *(["--debug"] if options.debug else [])])
    training_run.train(settings, path, saved)
    return 0


def train(config: str | Path | None = None, **settings: Any) -> TrainResult:
    """Train a detector by a config file, by settings, or by both (the settings win).

    Returns the run's folder, its checkpoints and the best checkpoint's metrics. Raises ConfigError, DataError or
    CheckpointError, all ValueErrors, for what the caller can mend.
    """
    overrides = [f"{key}={yaml.safe_dump(_plain(value), default_flow_style=True)}" for key, value in settings.items()]
    chosen, path, saved = read(Path(config) if config is not None else None, overrides)
    if len(choose_devices(chosen.device)) > 1 and not distributed.launched():
        raise ConfigError(f"device={chosen.device}: from Python, start one process a device with torchrun")
    return training_run.train(chosen, path, saved)


def read(file: Path | None, overrides: Sequence[str]) -> tuple[Settings, Path | None, dict[str, Any] | None]:
    """The settings of a run and, where it goes on from one, its checkpoint's path and contents."""
    settings = load_settings(Settings, file, overrides)
    if settings.resume is None:
        return settings, None, None
    path = checkpoint.locate(settings.resume)
    saved = checkpoint.read_latest(path, say_now)
    if "optimizer" not in saved:
        last = path.parent / "last.pt"
        raise ConfigError(
            f"resume={path}: holds weights only; resume from {last}, or start a new run with weights={path}"
        )
    return resumed(settings, saved, path), path, saved


def resumed(settings: Settings, saved: dict[str, Any], path: Path) -> Settings:
    """The saved run's settings with the changes that a resume allows, which are said; ConfigError names another.

    Windows keep their images at another batch or number of devices; only their cut changes.
    """
    written, before = settings.model_dump(mode="json"), saved["settings"]
    changes = {key: written[key] for key in settings.model_fields_set - {"resume"} if written[key] != before.get(key)}
    refused = sorted(changes.keys() - CHANGEABLE)
    if refused:
        raise ConfigError(
            f"resume={settings.resume}: '{refused[0]}' cannot change in the middle of a run (it is "
            f"{before.get(refused[0])}); these can: {', '.join(sorted(CHANGEABLE))}"
        )
    for key, value in sorted(changes.items()):
        say_now(f"changed   {key} {before.get(key)} -> {value}")
    return validated(Settings, {**before, **changes}, {}, str(path))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
