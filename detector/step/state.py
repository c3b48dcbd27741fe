"""Everything that must survive a crash, and nothing else.

What is derived from the settings (schedules, plans, the data index) is made again. What only this run knows is a field
here and is saved and restored by name: a field without an entry in the checkpoint is an error, never a fresh start.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from detector.errors import CheckpointError
from detector.loss.criterion import TERMS
from detector.precision import Precision
from detector.step.ema import Ema
from detector.step.plan import Cut
from detector.step.schedule import Leg, Legs


@dataclass
class Best:
    """The best validation so far."""

    fitness: float = -1.0
    epoch: int = -1


@dataclass
class TrainState:
    """The living state of a run. Position: `done` images of epoch `epoch` are trained."""

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    precision: Precision
    scaler: torch.amp.GradScaler = field(init=False)
    epoch: int = 0
    done: int = 0
    step: int = 0  # applied optimizer steps
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0
    loss_scale: float = 64.0  # about the last window's target weight, a power of two
    cut: Cut = field(
        default_factory=lambda: Cut(1, 1)
    )  # plans the windows; they stay when a run goes on at another batch
    batch: int = 1  # images of a micro-batch, no more than the settings' `batch`: less where memory ran out
    legs: Legs = ()  # how the learning rate goes; a new one each time the run is extended
    loss_sums: list[float] = field(default_factory=lambda: [0.0] * len(TERMS))  # losses * images of this epoch so far
    loss_images: int = 0  # images of this epoch so far that counted
    bad_images: dict[str, list[int]] = field(default_factory=lambda: {"train": [], "val": []})  # found damaged so far
    best: Best = field(default_factory=Best)
    history: list[dict[str, float]] = field(default_factory=list)  # one row of metrics an epoch

    def __post_init__(self) -> None:
        self.use(self.precision)

    def use(self, precision: Precision) -> None:
        """Compute in `precision` from the next step on, with a loss scaler of its own."""
        self.precision, self.scaler = precision, precision.scaler()

    def forget_unscaled(self) -> None:
        """Let the loss scaler, at the scale that it has, take a step that it had begun from its beginning."""
        scaler = self.precision.scaler()
        scaler.load_state_dict(self.scaler.state_dict())
        self.scaler = scaler

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and plain data, one entry a field; `network` is saved as `model`."""
        return {
            "model": self.network.state_dict(),
            "ema": self.ema.network.state_dict(),
            "ema_steps": self.ema.steps,
            "optimizer": self.optimizer.state_dict(),
            "precision": [self.precision.name, self.precision.device_type],
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "done": self.done,
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale,
            "cut": [self.cut.batch, self.cut.accumulate, self.cut.devices],
            "batch": self.batch,
            "legs": [[leg.start, leg.end, leg.curve] for leg in self.legs],
            "loss_sums": self.loss_sums,
            "loss_images": self.loss_images,
            "bad_images": self.bad_images,
            "best": {"fitness": self.best.fitness, "epoch": self.best.epoch},
            "history": self.history,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore strictly. Raises CheckpointError where an entry is missing or does not fit.

        The precision stays the one that was chosen: the run may go on with another, or on another device.
        """
        missing = sorted(self.state_dict().keys() - saved.keys())
        if missing:
            raise CheckpointError(f"the checkpoint holds no {', '.join(missing)}: only a last.pt can be resumed")
        try:
            self.network.load_state_dict(saved["model"])
            self.ema.network.load_state_dict(saved["ema"])
            self.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint is of another model or optimizer: {error}") from None
        self.ema.steps = saved["ema_steps"]
        if saved["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(saved["scaler"])
        plain = "epoch", "done", "step", "skipped", "skipped_in_a_row", "loss_scale", "batch", "loss_sums", "history"
        for name in (*plain, "loss_images", "bad_images"):
            setattr(self, name, saved[name])
        self.best = Best(**saved["best"])
        self.cut = Cut(*saved["cut"])
        self.legs = tuple(Leg(*leg) for leg in saved["legs"])
