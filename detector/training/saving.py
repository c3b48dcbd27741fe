"""When a run is saved, where, and what happens when it cannot be."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detector import distributed
from detector.errors import TrainingError
from detector.training import checkpoint
from detector.training.setup import Parts, Say
from detector.training.state import TrainState

# What best.pt holds: weights and what rebuilds the network, no state to go on from.
LEAN = ("description", "names", "imgsz", "settings", "metrics", "model", "ema", "epoch")


@dataclass
class Saver:
    """Writes a run's checkpoints into its folder; on other ranks than the main one it does nothing."""

    folder: Path
    parts: Parts
    say: Say
    last_save: float = field(default_factory=time.monotonic)

    @property
    def last(self) -> Path:
        return self.folder / "weights" / "last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "weights" / "best.pt"

    def due(self) -> bool:
        """Whether `save_minutes` have passed since the last save."""
        minutes = self.parts.settings.save_minutes
        return minutes > 0 and time.monotonic() - self.last_save >= 60 * minutes

    def save(self, state: TrainState) -> None:
        """Write last.pt as of now; the one before stays as last.prev.pt."""
        self._write(self.last, self._contents(state), keep_previous=True)
        self.last_save = time.monotonic()

    def save_epoch(self, state: TrainState) -> None:
        """Write all that a finished epoch leaves: last.pt and, where they are due, best.pt and epochN.pt."""
        contents = self._contents(state)
        if state.best.epoch == state.epoch:
            self._write(self.best, {key: contents[key] for key in LEAN})
        period = self.parts.settings.save_period
        if period > 0 and state.epoch % period == 0:
            self._write(self.folder / "weights" / f"epoch{state.epoch}.pt", contents)
        self._write(self.last, contents, keep_previous=True)
        self.last_save = time.monotonic()

    def _contents(self, state: TrainState) -> dict[str, Any]:
        settings = self.parts.settings
        return {
            "description": state.network.description,
            "names": list(self.parts.names),
            "imgsz": settings.imgsz,
            "images": len(self.parts.training),
            "settings": settings.model_dump(mode="json"),
            "metrics": state.history[-1] if state.history else {},
            **state.state_dict(),
        }

    def _write(self, path: Path, contents: dict[str, Any], keep_previous: bool = False) -> None:
        if not distributed.is_main():
            return
        try:
            checkpoint.write(path, contents, keep_previous)
        except OSError as error:
            problem = f"{path}: cannot be written: {error.strerror}; the file that was there is kept"
            if self.parts.settings.on_save_error == "stop":
                raise TrainingError(f"{problem}. Make room and go on with resume={self.folder}") from None
            self.say(f"warning: {problem}, and the run goes on (on_save_error: warn)")
