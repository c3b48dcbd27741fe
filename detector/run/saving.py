"""When a run is saved, where, and what happens when it cannot be."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detector import checkpoint_file, distributed
from detector.errors import TrainingError
from detector.reporting.plots import plot_history
from detector.reporting.table import write_csv
from detector.run.build import Parts, Say
from detector.step.state import TrainState

# What best.pt holds: the averaged weights and what rebuilds their network, no state to go on from.
LEAN = ("description", "names", "imgsz", "settings", "metrics", "ema", "epoch")


@dataclass
class Saver:
    """Writes a run's checkpoints into its folder; on other ranks than the main one it does nothing."""

    folder: Path
    parts: Parts
    say: Say
    last_save: float = field(default_factory=time.monotonic)
    put_off: bool = False  # whether the last epoch's last.pt is still to be written

    @property
    def last(self) -> Path:
        return self.folder / "weights" / "last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "weights" / "best.pt"

    def due(self, state: TrainState) -> bool:
        """Whether to save now, inside an epoch: `save_minutes` have passed, or an epoch's end was put off.

        Not after a step that was not finite: what follows may show that the weights of the step before were to blame,
        and then the file from before it is the last good one.
        """
        minutes = self.parts.settings.save_minutes
        passed = minutes > 0 and time.monotonic() - self.last_save >= 60 * minutes
        return (passed or self.put_off) and not state.skipped_in_a_row

    def save(self, state: TrainState) -> None:
        """Write last.pt as of now; the one before stays as last.prev.pt."""
        self._write_last(self._contents(state))

    def save_epoch(self, state: TrainState) -> None:
        """Write all that a finished epoch leaves: last.pt and, where they are due, best.pt and epochN.pt.

        After a step that was not finite last.pt is put off until one that is, but for the end of the run.
        """
        contents = self._contents(state)
        if state.best.epoch == state.epoch:
            self._write(self.best, {key: contents[key] for key in LEAN})
        period = self.parts.settings.save_period
        if period > 0 and state.epoch % period == 0:
            self._write(self.folder / "weights" / f"epoch{state.epoch}.pt", contents)
        if state.skipped_in_a_row and state.epoch < self.parts.settings.epochs:
            self.put_off = True
        else:
            self._write_last(contents)

    def _write_last(self, contents: dict[str, Any]) -> None:
        self._write(self.last, contents, keep_previous=True)
        self.last_save, self.put_off = time.monotonic(), False

    def save_table(self, state: TrainState) -> None:
        """Write metrics.csv and the curves: what the state says of the finished epochs."""
        if not distributed.is_main() or not state.history:
            return
        with self.writing(self.folder / "metrics.csv"):
            write_csv(self.folder / "metrics.csv", state.history)
            if self.parts.settings.plots:
                plot_history(state.history, self.folder / "curves.png")

    def _contents(self, state: TrainState) -> dict[str, Any]:
        settings = self.parts.settings
        contents = {
            "description": state.network.description,
            "names": list(self.parts.names),
            "imgsz": settings.imgsz,
            "images": len(self.parts.training),
            "image_names": self.parts.training.index.digest,
            "settings": settings.model_dump(mode="json"),
            "metrics": state.history[-1] if state.history else {},
            **state.state_dict(),
        }
        if name := checkpoint_file.not_finite(contents):
            raise TrainingError(
                f"{name} holds values that are not finite, and a run cannot recover from that; nothing was saved. "
                f"Go on from the last good checkpoint with a lower lr0: detector train resume={self.folder} lr0=..."
            )
        return contents

    def _write(self, path: Path, contents: dict[str, Any], keep_previous: bool = False) -> None:
        if not distributed.is_main():
            return
        with self.writing(path):
            checkpoint_file.write(path, contents, keep_previous)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """A context that writes into the run's folder; what becomes of a full disk is the run's `on_save_error`."""
        try:
            yield
        except OSError as error:
            problem = f"{path}: cannot be written: {error.strerror}; the file that was there is kept"
            if self.parts.settings.on_save_error == "stop":
                raise TrainingError(f"{problem}. Make room and go on with resume={self.folder}") from None
            self.say(f"warning: {problem}, and the run goes on (on_save_error: warn)")
