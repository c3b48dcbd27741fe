"""TensorBoard: event files in the run's folder `tensorboard`. `tensorboard --logdir runs` shows all runs."""

from pathlib import Path

from detector.data.decoding import pixels_of
from detector.reporting.journal import Event, WindowRow
from detector.reporting.loggers.scalars import flat, of_epoch, of_window
from detector.reporting.reports import EpochRow, Facts, Had

FLUSH = 10  # seconds
OURS = "events.out.tfevents.*"


class TensorBoard:
    """Event files can only be added to: a run that goes on writes its own anew, from the journal."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter

    def begin(self, facts: Facts) -> Had:
        folder = facts.folder / "tensorboard"
        for file in folder.glob(OURS):
            file.unlink()
        self._writer = self._open(str(folder), flush_secs=FLUSH)
        rows = [f"| {key} | {value} |" for key, value in sorted(flat(facts.settings).items())]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))
        self._window = 0
        return Had()

    def window(self, row: WindowRow) -> None:
        self._window = row.window
        for name, value in of_window(row).items():
            self._writer.add_scalar(name, value, row.window, row.time)

    def epoch(self, row: EpochRow, window: int) -> None:
        for name, value in of_epoch(row).items():
            self._writer.add_scalar(name, value, int(row["epoch"]))

    def event(self, event: Event) -> None:
        self._writer.add_text(f"events/{event.kind}", event.text or event.kind, self._window, event.time)

    def picture(self, path: Path) -> None:
        self._writer.add_image(path.stem, pixels_of(path.read_bytes()), self._window, dataformats="HWC")

    def end(self, state: str) -> None:
        self._writer.close()
