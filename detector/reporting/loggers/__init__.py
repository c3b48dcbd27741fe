"""Loggers: what a run reports, in the tools that people watch runs with. Each needs its package, an extra."""

import importlib
from collections.abc import Sequence

from detector.errors import ConfigError
from detector.reporting.reports import Logger

CLASSES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WeightsAndBiases"}


def loggers_of(names: Sequence[str]) -> dict[str, Logger]:
    """The loggers of these names, before they begin. ConfigError where the package of one is not here."""
    return {name: _made(name) for name in names}


def _made(name: str) -> Logger:
    module = importlib.import_module(f"detector.reporting.loggers.{name}_logger")
    try:
        return getattr(module, CLASSES[name])()
    except ImportError as error:
        raise ConfigError(
            f"log: {name}: its package cannot be imported ({error}); `pip install 'detector[{name}]'`"
        ) from None
