"""Work that a thread does beside a run."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from types import TracebackType
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """One piece of work at a time, each in a thread that ends with it: between two there is none, and a process can be
    forked. A context, which is left when the work is done.

    What a piece returns, or raises, whoever asks for it next is handed; left with the context, it is dropped.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._outcome: Future[Result] = Future()

    def start(self, work: Callable[[], Result]) -> None:
        """Begin a piece of work. The one before must have been asked for."""
        assert self._thread is None
        self._outcome = Future()
        self._thread = Thread(target=_do, args=(work, self._outcome), name="beside the run")
        self._thread.start()

    def done(self) -> Result | None:
        """What the work came to, if it is done and was not asked for; otherwise None."""
        return self.wait() if self._outcome.done() else None

    def wait(self) -> Result | None:
        """What the work comes to, once it is done; None where there is none."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return self._outcome.result()

    def __enter__(self) -> "Background[Result]":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.join()


def _do(work: Callable[[], Result], outcome: Future[Result]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # whatever it is, it is raised where it is asked for
        outcome.set_exception(error)
