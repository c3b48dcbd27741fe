"""What a step changes, and a checkpoint must hold to take the next one."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from detector.errors import CheckpointError
from detector.precision import Precision
from detector.step.ema import Ema
from detector.step.optim import load


@dataclass
class TrainState:
    """A network in training, with all that one step hands to the next."""

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    precision: Precision
    scaler: torch.amp.GradScaler = field(init=False)  # loss scaling, in fp16
    step: int = 0  # applied optimizer steps
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0
    loss_scale: float = 64.0  # about the last window's target weight, a power of two

    def __post_init__(self) -> None:
        self.use(self.precision)

    @classmethod
    def of(cls, network: nn.Module, optimizer: torch.optim.Optimizer, amp: str = "fp32") -> "TrainState":
        """The state of a network and its optimizer before their first step."""
        kind = next(network.parameters()).device.type
        return cls(network, Ema(network), optimizer, Precision(amp, kind))

    def use(self, precision: Precision) -> None:
        """Compute in `precision` from the next step on, with a loss scaler of its own."""
        self.precision, self.scaler = precision, precision.scaler()

    def forget_unscaled(self) -> None:
        """Let the loss scaler, at the scale that it has, take a step that it had begun from its beginning."""
        scaler = self.precision.scaler()
        scaler.load_state_dict(self.scaler.state_dict())
        self.scaler = scaler

    def count(self, applied: bool, weight: float) -> None:
        """Take a finished step of this target weight into the counters."""
        self.step += applied
        self.skipped += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if math.isfinite(weight):
            self.loss_scale = 2.0 ** round(math.log2(max(weight, 1.0)))

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
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale,
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
            load(self.optimizer, saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint is of another model or optimizer: {error}") from None
        self.ema.steps = saved["ema_steps"]
        if saved["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(saved["scaler"])
        for name in ("step", "skipped", "skipped_in_a_row", "loss_scale"):
            setattr(self, name, saved[name])
