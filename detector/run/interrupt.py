"""Ctrl-C and SIGTERM during a run: finish the window, save, and then stop."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from detector.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopWaiting(Exception):  # noqa: N818 - says what to do
    """Ends a wait for batches, because a signal was noted; what the run does then it does on all ranks."""


class Interruption:
    """A context in which the first SIGINT or SIGTERM is noted, for the run to act on between windows or at a wait.

    A second one stops at once, by Interrupted. Outside the main thread Python lets nobody handle signals: then none is
    noted, which `say` is told.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.number: int | None = None
        self._say = say
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        try:
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread, or not the main interpreter
            self._say("warning: in a thread a run cannot be stopped by Ctrl-C or SIGTERM; it goes on to its end")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not set from Python, which nobody can put back from there
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def end_wait(self) -> None:
        """What is asked of whoever waits: StopWaiting where a signal was noted."""
        if self.number is not None:
            raise StopWaiting

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise Interrupted(number)
        self.number = number
