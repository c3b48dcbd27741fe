"""Work that a thread does beside a run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """One thread and one piece of work at a time. A context, which is left when the work is done.

    What a piece returns, or raises, whoever asks for it next is handed; left with the context, it is dropped.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "beside the run")
        self._work: Future[Result] | None = None

    def start(self, work: Callable[[], Result]) -> None:
        """Have the thread begin a piece of work. The one before must have been asked for."""
        assert self._work is None
        self._work = self._thread.submit(work)

    def done(self) -> Result | None:
        """What the work came to, if it is done and was not asked for; otherwise None."""
        return self.wait() if self._work and self._work.done() else None

    def wait(self) -> Result | None:
        """What the work comes to, once it is done; None where there is none."""
        work, self._work = self._work, None
        return work.result() if work else None

    def __enter__(self) -> "Background[Result]":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()
