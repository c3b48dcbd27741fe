"""Work that goes on in a thread while the caller does something else: images are read ahead of the network."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

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
    waiting: deque[tuple[T | None, BaseException | None, bool]] = deque()  # item, error, whether that is all
    change = threading.Condition()
    held = 0
    left = False

    def full() -> bool:
        return len(waiting) >= most or (bool(waiting) and held >= most_size)

    def put(item: T | None, error: BaseException | None, last: bool) -> bool:
        nonlocal held
        with change:
            while full() and not left:
                if item is not None and newest(item) and waiting[0][0] is not None:
                    held -= size(waiting.popleft()[0])
                else:
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
