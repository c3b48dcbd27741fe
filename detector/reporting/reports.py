"""Everything that a run reports, to whoever listens: its journal, and the loggers that were asked for.

A logger follows the journal: where it has less than that, as after a kill, it is first told what it lacks, and what it
has it is not told again. So whoever stops and resumes a run leaves in a logger what a run in one go does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from detector.reporting.journal import Event, Journal, WindowRow, event_now

Say = Callable[[str], None]
EpochRow = Mapping[str, float]  # a line of metrics.csv


class Facts(NamedTuple):
    """A run, for a logger."""

    identity: str  # a random word that it keeps as long as it lives
    folder: Path
    settings: Mapping[str, Any]  # plain values
    left: bool = False  # whether it takes back windows that it trained, and goes on by other settings


class Had(NamedTuple):
    """What a logger has of a run: the numbers of the last window and of the last epoch, from 1."""

    window: int = 0
    epoch: int = 0


class Logger(Protocol):
    """A place that a run is reported to. Any method may fail: then it is called no more, and the run goes on."""

    def begin(self, facts: Facts) -> Had: ...

    def window(self, row: WindowRow) -> None: ...

    def epoch(self, row: EpochRow, window: int) -> None:
        """A finished epoch, whose last window it was."""

    def event(self, event: Event) -> None: ...

    def picture(self, path: Path) -> None:
        """A file of the run's folder that was drawn, or drawn anew."""

    def end(self, state: str) -> None:
        """The last call: how the run ended, one of the journal's ENDINGS."""


@dataclass
class Reports:
    """What a run reports to; without a journal nothing is heard, as on other ranks than the main one.

    Nothing here raises: a listener that fails is named once.
    """

    journal: Journal | None = None
    loggers: dict[str, Logger] = field(default_factory=dict)  # by name
    say: Say = print
    windows: int = 0  # so far
    _warned: set[str] = field(default_factory=set)
    _pictures: set[Path] = field(default_factory=set)

    def begin(self, facts: Facts, epoch: int, done: int, history: Sequence[EpochRow], known: int) -> None:
        """Stand where the run does: after so many images of an epoch (from 1), with the epochs of its history.

        known: the windows that it has trained, where the journal is gone.
        """
        rows: list[WindowRow] = []
        taken_back = 0
        if self.journal is not None:
            rows, taken_back = self._heard("steps.jsonl", partial(self.journal.rewind, epoch, done)) or ([], 0)
        self.windows = rows[-1].window if rows else known
        facts = facts._replace(left=facts.left and taken_back > 0)
        for name, logger in list(self.loggers.items()):
            self._told(name, partial(_catch_up, logger, facts, rows, history))

    def window(self, row: WindowRow) -> None:
        self.windows = row.window
        if self.journal is not None:
            self._heard("steps.jsonl", partial(self.journal.window, row))
        self._all(lambda logger: logger.window(row))

    def epoch(self, row: EpochRow) -> None:
        self._all(lambda logger: logger.epoch(row, self.windows))

    def sync(self) -> None:
        """Have the disk hold what the journal has been told."""
        if self.journal is not None:
            self._heard("steps.jsonl", self.journal.sync)

    def picture(self, path: Path) -> None:
        self._pictures.add(path)
        self._all(lambda logger: logger.picture(path))

    def event(self, kind: str, text: str, epoch: int, step: int) -> None:
        event = event_now(kind, text, epoch, step)
        if self.journal is not None:
            self._heard("events.jsonl", partial(self.journal.event, event))
        self._all(lambda logger: logger.event(event))

    def end(self, state: str, pictures: Iterable[Path] = ()) -> None:
        """The run is over; of its pictures those follow that have not been told."""
        for path in sorted(set(pictures) - self._pictures):
            self.picture(path)
        self._all(lambda logger: logger.end(state))
        self.loggers.clear()

    def _all(self, tell: Callable[[Logger], None]) -> None:
        for name, logger in list(self.loggers.items()):
            self._told(name, partial(tell, logger))

    def _told(self, name: str, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # of a library, a network or a disk: none of them is the run's affair
            del self.loggers[name]
            self.say(f"warning: log: {name}: {_shown(error)}; nothing more is logged there, and the run goes on")

    def _heard(self, name: str, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except OSError as error:
            if name not in self._warned:
                self._warned.add(name)
                self.say(f"warning: {name}: cannot be written: {error.strerror or error}; the run goes on")
        return None


def _catch_up(logger: Logger, facts: Facts, rows: Sequence[WindowRow], history: Sequence[EpochRow]) -> None:
    """Begin, and tell what the logger lacks, in the order in which it happened."""
    had = logger.begin(facts)
    last = {row.epoch: row.window for row in rows}  # window by epoch
    epochs = [one for one in history if one["epoch"] > had.epoch]
    for row in rows:
        while epochs and epochs[0]["epoch"] < row.epoch:
            one = epochs.pop(0)
            logger.epoch(one, last.get(int(one["epoch"]), 0))
        if row.window > had.window:
            logger.window(row)
    for one in epochs:
        logger.epoch(one, last.get(int(one["epoch"]), 0))


def _shown(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
