"""Processes that make batches, and a wait for them that always ends.

PyTorch's DataLoader hands batches over in /dev/shm, where a container's 64 MB lose one without a word, waits for it
without a limit, and raises from a signal handler, wherever the run happens to be, when a worker dies. Here images lie
in shared memory of our own, made once and used again and again; all else goes through one pipe a worker. Whoever waits
for a batch is asked a few times a second whether to go on, learns at once of a worker that died, and after a limit of
one that does nothing.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import cv2
import numpy as np
import torch

from detector.data.packing import Packed, pack, unpack
from detector.data.shared import SharedMemory
from detector.errors import ConfigError, DataError, TrainingError

Plan = Sequence[Any]  # the items of a data set that make a batch
# A batch of a data set's items, with bytes that it may lie in, and what is called before each item.
Make = Callable[[Any, Plan, np.ndarray, Callable[[], None]], Any]
PREFETCH = 2  # batches that each worker is ahead
POLL = 0.2  # seconds between two looks at whoever waits
SILENCE = 300.0  # seconds in which a worker that is waited for must finish an item
SPARE = 2**20  # bytes of a slot for boxes and the like; pages that are not written take no memory


def go_on() -> None:
    """What is asked of whoever waits and has nothing to say; others may raise."""


def start_method(setting: str) -> str:
    """How workers are started: as the setting says or, for `auto`, by what is safe now, in this process.

    A fork copies one thread and the locks of all: what other threads hold is held for ever in the child. So it is taken
    only on Linux, in a process of one Python thread (a notebook has several) that has no GPU open. Elsewhere on Linux
    workers are forked from a fresh process, a forkserver; macOS, whose system libraries do not bear a fork, and Windows
    start new ones. ConfigError where the system has no such method.
    """
    known = multiprocessing.get_all_start_methods()
    if setting != "auto":
        if setting not in known:
            raise ConfigError(f"multiprocessing_start={setting}: this system has only {', '.join(known)}, or auto")
        return setting
    if sys.platform == "darwin" or "forkserver" not in known:
        return "spawn"
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    return "fork" if sys.platform == "linux" and alone else "forkserver"


class _Failure(NamedTuple):
    """An error that is not the data's, as its traceback reads."""

    text: str


@dataclass(frozen=True)
class _Desk:
    """The memory between the workers and who reads: a count of items each, and the slots of batches."""

    PAGE: ClassVar[int] = 4096  # bytes; counts, too, lie so far apart that writing one disturbs no other

    memory: SharedMemory
    workers: int
    slot_bytes: int

    @classmethod
    def of(cls, workers: int, slot_bytes: int) -> "_Desk":
        size = -(-(slot_bytes + SPARE) // cls.PAGE) * cls.PAGE
        return cls(SharedMemory(workers * (cls.PAGE + PREFETCH * size)), workers, size)

    def begun(self, worker: int) -> np.ndarray:
        """(1,) int64, the worker's count."""
        return self.memory.array(np.int64, self.PAGE * worker, 1)

    def slot(self, number: int) -> memoryview:
        start = self.PAGE * self.workers + number * self.slot_bytes
        return memoryview(self.memory.array(start=start, count=self.slot_bytes))


class _Task(NamedTuple):
    """A batch that was asked of a worker, and where it puts it."""

    worker: int
    slot: int


class Workers:
    """Worker processes, started at once; they live until `close` or as long as this object."""

    def __init__(
        self,
        dataset: Any,
        make: Make,
        count: int,
        batch_bytes: int,
        method: str,
        waiting: Callable[[], None] = go_on,
    ) -> None:
        """Batches are `make(dataset, plan, ...)`; `batch_bytes`: of the largest one's images.

        Raises TrainingError where the system gives no memory or no processes.
        """
        self.count, self.batch_bytes = count, batch_bytes
        self._tasks: dict[int, _Task] = {}  # by the batch's number: asked for, and not handed on yet
        self._arrived: dict[int, Any] = {}  # what came of them
        self._next = 0  # number of the next batch to ask for
        self._free = list(range(count * PREFETCH))  # slots
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # Workers have nothing to save. A stopped one, too, ends by SIGKILL, which no other signal is sure to do.
        self._end = Finalize(self, _end, (self._processes, self._connections), exitpriority=10)
        try:
            self._desk = _Desk.of(count, batch_bytes)
            if method == "fork":
                self._start_all(method, dataset, make)
            else:  # a forkserver answers once it has imported torch
                _in_thread(partial(self._start_all, method, dataset, make), waiting)
        except (OSError, EOFError) as error:
            self.close()
            waiting()  # a signal to all that was started from a terminal ends a forkserver, too
            raise TrainingError(
                f"cannot start {count} loader processes by {method}: {error}; use workers=0, which needs none, "
                "or another multiprocessing_start"
            ) from None
        except BaseException:
            self.close()
            raise

    def _start_all(self, method: str, dataset: Any, make: Make) -> None:
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([__name__, "detector.data.dataset"])  # imported once, for all
        with _main_module_hidden():
            for number in range(self.count):
                self._start(context, number, dataset, make)

    def _start(self, context: Any, number: int, dataset: Any, make: Make) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:  # ours alone would stay open, but for the worker's: when that ends, we read an end of file
            arguments = (dataset, make, theirs, self._desk, number)
            process = context.Process(target=_work, args=arguments, name=f"loader-{number}", daemon=True)
            self._connections.append(ours)
            process.start()
            self._processes.append(process)

    @property
    def closed(self) -> bool:
        return not self._end.still_active()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the processes; again is no error."""
        self._end()

    def batches(
        self, plans: Sequence[Plan], own: Callable[[Any], Any], waiting: Callable[[], None] = go_on
    ) -> Iterator[Any]:
        """The batches of the plans, in this order; what `own` makes of a batch must not share its memory.

        `waiting` is called before each wait and every `POLL` seconds in it; what it raises ends the workers. An earlier
        pass that was given up half way is forgotten. Raises DataError as the data set raised it, and TrainingError
        where a worker has died or has been silent for `SILENCE` seconds.
        """
        try:
            yield from self._batches(plans, own, waiting)
        except (GeneratorExit, DataError):
            raise  # the workers are as good as before
        except BaseException:
            self.close()
            raise

    def _batches(self, plans: Sequence[Plan], own: Callable[[Any], Any], waiting: Callable[[], None]) -> Iterator[Any]:
        for number in list(self._arrived):
            self._forget(number)
        todo = list(reversed(plans))
        first = self._next
        for number in range(first, first + len(plans)):
            self._ask(todo)
            silent, before = 0.0, None  # in time waited: while this process, too, is stopped, none passes
            while number not in self._arrived:
                waiting()
                heard = self._listen(first, waiting)
                self._ask(todo)  # an earlier pass may have held all slots
                worker = self._tasks[min(self._tasks.keys() - self._arrived.keys(), default=number)].worker
                now = worker, int(self._desk.begun(worker)[0])
                silent = 0.0 if heard or now != before else silent + POLL
                before = now
                if silent >= SILENCE:
                    raise TrainingError(self._silent(worker))
            result, slot = self._arrived[number], self._tasks[number].slot
            if isinstance(result, Packed):
                result = own(unpack(result, self._desk.slot(slot)))
            self._forget(number)
            if isinstance(result, DataError):
                raise result
            if isinstance(result, _Failure):
                raise RuntimeError(f"in a loader process:\n{result.text}")
            self._ask(todo)
            yield result

    def _ask(self, todo: list[Plan]) -> None:
        """Hand out the next of `todo`, from its end on, as far as there are free slots."""
        while todo and self._free:
            busy = [task.worker for number, task in self._tasks.items() if number not in self._arrived]
            worker = min(range(len(self._processes)), key=busy.count)
            task = _Task(worker, self._free.pop())
            self._tasks[self._next] = task
            with suppress(OSError):  # where it has died, whoever waits for its batch is told
                self._connections[worker].send((self._next, task.slot, todo.pop()))
            self._next += 1

    def _listen(self, first: int, waiting: Callable[[], None]) -> bool:
        """Take what workers have sent, or wait for `POLL` seconds; whether there was anything."""
        ready = wait(self._connections, POLL)
        for connection in ready:
            try:
                number, result = connection.recv()
            except (EOFError, OSError):
                waiting()  # who was asked to stop hears of that, and not of a worker that the same signal ended
                raise TrainingError(self._dead(self._connections.index(connection))) from None
            self._arrived[number] = result
            if number < first:
                self._forget(number)
        return bool(ready)

    def _forget(self, number: int) -> None:
        del self._arrived[number]
        self._free.append(self._tasks.pop(number).slot)

    def _dead(self, worker: int) -> str:
        process = self._processes[worker]
        process.join(1)
        status = process.exitcode
        how = f"ended with status {status}; what it said is above"
        if status is None or status == 255:  # a forkserver that is gone tells no status
            how = "has ended"
        elif status < 0:
            name = signal.Signals(-status).name
            how = f"was ended by {name}" + (", as the system does where memory runs out" if name == "SIGKILL" else "")
        return (
            f"a loader process (pid {process.pid}) {how}. If it happens again, workers=1 and cache=off take less "
            "memory, and workers=0 loads without such processes"
        )

    def _silent(self, worker: int) -> str:
        return (
            f"a loader process (pid {self._processes[worker].pid}) has not finished one image in {SILENCE:g} seconds: "
            "it is stopped, or the disk of the images does not answer; see that they can be read"
        )


def _end(processes: list[BaseProcess], connections: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for connection in connections:
        connection.close()


def _in_thread(action: Callable[[], None], waiting: Callable[[], None]) -> None:
    """Do it in a thread, and ask meanwhile whether to go on. Raises what either raises."""

    def act() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    errors: list[Exception] = []
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    while thread.is_alive():
        waiting()
        thread.join(POLL)
    if errors:
        raise errors[0]


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep new processes from running the main script again.

    spawn and forkserver do that for what is pickled from it. Nothing of ours is, and a script or a notebook may then
    call `train` without a guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(dataset: Any, make: Make, connection: Connection, desk: _Desk, number: int) -> None:
    """What a worker does until its parent is gone, or ends it."""
    _settle()
    parent = multiprocessing.parent_process().sentinel
    begun = desk.begun(number)

    def count() -> None:
        begun[0] += 1

    with suppress(EOFError, OSError):  # nobody listens any more
        while parent not in wait([connection, parent]):
            batch, slot, plan = connection.recv()
            try:
                memory = desk.slot(slot)
                made = make(dataset, plan, np.frombuffer(memory, np.uint8), count)
                result: Any = pack(made, memory)
            except DataError as error:
                result = error
            except Exception:
                result = _Failure(traceback.format_exc())
            connection.send((batch, result))


def _settle() -> None:
    # The workers are the parallelism; threads of OpenCV and OpenMP do not survive a fork either.
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    # Ctrl-C and a SIGTERM to the run's process group are for the parent, which still wants the batches of its step. A
    # SIGTERM to the worker itself ends it, whatever the parent does at one.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
