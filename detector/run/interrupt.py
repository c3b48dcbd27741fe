"""Ctrl-C and SIGTERM during a run: finish the window, save, and then stop."""

import signal
from types import FrameType, TracebackType

from detector.errors import Interrupted


class Interruption:
    """A context in which the first SIGINT or SIGTERM is noted, for the run to act on at a window's edge.

    A second one stops at once, by Interrupted.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise Interrupted(number)
        self.number = number
