"""Work in a thread while the caller does something else: reading ahead of the network, and writing behind it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

LEAVING = 2.0  # seconds that a thread is waited for that is not needed any more; it may be waiting for a camera


def read_ahead(
    items: Iterator[T],
    most: int,
    newest: Callable[[T], bool] = lambda item: False,
    size: Callable[[T], int] = lambda item: 0,
    most_size: int = 1,
) -> Iterator[T]:
    """The items, in order, made by a thread that is at most `most` of them ahead, or `most_size` of what `size` tells.

    Of items that are `newest` one at most waits: it gives way to the next one. An error of the items is raised here,
    after those before it. Closing this closes the items, in the thread that they ran in.
    """
    waiting: deque[tuple[T | None, BaseException | None, bool]] = deque()  # item, error, whether that is all
    change = threading.Condition()
    held = 0
    left = False

    def full() -> bool:
        return len(waiting) >= most or (bool(waiting) and held >= most_size)

    def put(item: T | None, error: BaseException | None, last: bool) -> bool:
        nonlocal held
        with change:
            if item is not None and newest(item) and waiting and newest(waiting[-1][0]):
                held -= size(waiting.pop()[0])
            while full() and not left:
                change.wait()
            if not left:
                waiting.append((item, error, last))
                held += 0 if item is None else size(item)
                change.notify_all()
            return not left

    def work() -> None:
        try:
            for item in items:
                if not put(item, None, False):
                    break
                del item  # it would be held while the next one is made
            put(None, None, True)
        except BaseException as error:  # also what a generator of the user's raises to end the program
            put(None, error, True)
        finally:
            if hasattr(items, "close"):
                items.close()

    thread = threading.Thread(target=work, name="reading ahead", daemon=True)
    thread.start()
    try:
        while True:
            with change:
                while not waiting:
                    change.wait()
                item, error, last = waiting.popleft()
                held -= 0 if item is None else size(item)
                change.notify_all()
            if error is not None:
                raise error
            if last:
                return
            yield item
            del item
    finally:
        with change:
            left = True
            waiting.clear()
            change.notify_all()
        thread.join(LEAVING)


class Behind(Generic[T]):
    """A thread that does work on items in order, at most `most` of them behind; a context manager.

    An error of the work ends it, and is raised by the next `put` or when the context is left, by when all that was put
    before is done. Nothing that is put is lost where the caller fails: that too is worked on before the context ends.
    """

    def __init__(self, work: Callable[[T], None], most: int) -> None:
        self._work, self._most = work, most
        self._waiting: deque[T] = deque()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="writing behind", daemon=True)

    def __enter__(self) -> Behind[T]:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def put(self, item: T) -> None:
        """Have the work done on an item; waits while there is no room for it."""
        with self._change:
            while len(self._waiting) >= self._most and self._error is None:
                self._change.wait()
            if self._error is not None:
                raise self._error
            self._waiting.append(item)
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._ended:
                    self._change.wait()
                if not self._waiting:
                    return
                item = self._waiting.popleft()
                self._change.notify_all()
            try:
                self._work(item)
            except BaseException as error:
                with self._change:
                    self._error = error
                    self._waiting.clear()
                    self._change.notify_all()
                return
            del item
