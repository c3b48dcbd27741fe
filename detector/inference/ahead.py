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

    Of items that are `newest` none is waited for: where there is no room the oldest that waits gives way. An error of
    the items is raised here, after those before it. Closing this closes the items, in the thread that they ran in.
    """
    queue = _Queue(most, newest, size, most_size)
    thread = threading.Thread(target=queue.fill, args=(items,), name="reading ahead", daemon=True)
    thread.start()
    try:
        yield from queue.emptied()
    finally:
        queue.leave()
        thread.join(LEAVING)


class _Queue(Generic[T]):
    """Items that a thread has made and the caller has not taken; see `read_ahead`."""

    def __init__(self, most: int, newest: Callable[[T], bool], size: Callable[[T], int], most_size: int) -> None:
        self._most, self._newest, self._size, self._most_size = most, newest, size, most_size
        self._waiting: deque[tuple[T | None, BaseException | None, bool]] = deque()  # item, error, whether that is all
        self._change = threading.Condition()
        self._held = 0  # the sizes of those that wait
        self._left = False  # nobody takes any more

    def fill(self, items: Iterator[T]) -> None:
        """Put all items in, and an error of theirs; in a thread."""
        try:
            for item in items:
                if not self._put(item, None, False):
                    break
                del item  # it would be held while the next one is made
            self._put(None, None, True)
        except BaseException as error:  # also what a generator of the user's raises to end the program
            self._put(None, error, True)
        finally:
            if hasattr(items, "close"):
                items.close()

    def emptied(self) -> Iterator[T]:
        """The items, as they come. Raises their error."""
        while True:
            with self._change:
                while not self._waiting:
                    self._change.wait()
                item, error, last = self._waiting.popleft()
                self._held -= 0 if item is None else self._size(item)
                self._change.notify_all()
            if error is not None:
                raise error
            if last:
                return
            yield item
            del item

    def leave(self) -> None:
        """Take no more."""
        with self._change:
            self._left = True
            self._waiting.clear()
            self._change.notify_all()

    def _put(self, item: T | None, error: BaseException | None, last: bool) -> bool:
        """Whether there is anybody to take it; waits while there is no room for it."""
        with self._change:
            while self._full() and not self._left:
                if item is not None and self._newest(item) and self._waiting[0][0] is not None:
                    self._held -= self._size(self._waiting.popleft()[0])
                else:
                    self._change.wait()
            if not self._left:
                self._waiting.append((item, error, last))
                self._held += 0 if item is None else self._size(item)
                self._change.notify_all()
            return not self._left

    def _full(self) -> bool:
        return len(self._waiting) >= self._most or (bool(self._waiting) and self._held >= self._most_size)


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
