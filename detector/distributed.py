"""Rank, world size, sums over ranks and the launcher. Without a process group all of it is the no-op of one device."""

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from detector.errors import DetectorError, Interrupted, TrainingError
from detector.memory import OutOfMemoryError, is_out_of_memory

Value = TypeVar("Value")

FAILED = "failed"  # a key of the launch's store: why the first process that gave up did
POLL = 0.5  # seconds between two looks at it
LOST = 20.0  # seconds without an answer after which the store is gone
GRACE = 5.0  # seconds that a process has to end by itself once another gave up


class ElsewhereError(Exception):
    """Another rank failed in a part of a work that all share; its own error is told at the end of `together`."""


def launched() -> bool:
    """Whether torchrun (or `launch`) started this process as one of several."""
    return launch_size() > 1


def launch_size() -> int:
    """Processes that torchrun started, joined or not; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch_rank() -> int:
    """This process's number among them, joined or not."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """How often torchrun has started this process again (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if active() else 0


def world_size() -> int:
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    """True on the one process that prints and writes files."""
    return rank() == 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The processes that torchrun started, joined for the time of the context; nothing where there is only one.

    An error that leaves it ends all of them, wherever they wait, and none waits for one that is gone.
    """
    if not launched() or active():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives of objects go through the current device
    # Torchrun keeps its store when it starts the processes again, and with it the addresses of those that are gone; who
    # meets under them waits for ever. So each start has a part of the store for itself.
    store, rank, size = next(dist.rendezvous("env://"))
    start = f"start-{restarts()}"
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.PrefixStore(start, store), rank=rank, world_size=size
    )
    try:
        with watching(f"{start}/{FAILED}"):
            yield
    except BaseException:
        leave_group()
        raise
    dist.destroy_process_group()


def leave_group(patience: float = 2 * GRACE) -> None:
    """Leave a group whose processes may not come to what this one still has under way with them; they have been told.

    To leave is to wait for that, which ends, badly or well, when the others do; so for `patience` seconds at most. But
    not to wait at all aborts the process: torch's threads, at work while Python ends, let go of tensors.
    """

    def leave() -> None:
        with suppress(RuntimeError):
            dist.destroy_process_group()

    leaving = threading.Thread(target=leave, name="leave", daemon=True)
    leaving.start()
    leaving.join(patience)


@contextmanager
def watching(key: str) -> Iterator[None]:
    """A context whose error is told to the other processes, and which ends this one where another gave up.

    A thread looks for the key in the launch's store: the program may hang in a collective, where nothing else reaches
    it. A store that cannot be reached for a moment harms nobody; after `LOST` seconds the process that held it is gone.
    """
    done, store = threading.Event(), launch_store()

    def watch() -> None:
        look, seen = store, time.monotonic()
        while not done.wait(POLL) and time.monotonic() - seen < LOST:
            try:
                if look.check([key]):
                    break
                seen = time.monotonic()
            except RuntimeError:
                with suppress(RuntimeError):
                    look = launch_store()
        if not done.wait(GRACE):
            print(f"process {rank()}: ends because another process did", file=sys.stderr, flush=True)
            os._exit(2)

    watcher = threading.Thread(target=watch, name="watch", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            store.set(key, "yes")
        raise
    finally:
        done.set()
        watcher.join(LOST)  # one that is still inside the store when Python ends aborts the process: not our status


def launch_store() -> dist.Store:
    """The store of torchrun's launch, through a connection of its own; it outlives restarts of the processes."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def remember(key: str, value: str) -> None:
    """Keep a word for this launch's processes when torchrun starts them again; without torchrun there is no such."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launch_store().set(f"detector/{key}", value)


def recall(key: str) -> str | None:
    """What an earlier start of this launch remembered; None: nothing, or this is its first."""
    if not restarts():
        return None
    store = launch_store()
    return store.get(f"detector/{key}").decode() if store.check([f"detector/{key}"]) else None


def largest_of_ranks(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, the same on each; every rank must call it."""
    if not active():
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


@contextmanager
def together(device: torch.device, apart: bool = True) -> Iterator[None]:
    """A context for what each rank does alone: where it fails on any, it fails on all, at the same place.

    Where memory ran out, and nothing worse happened, all raise OutOfMemoryError; by then what the failed work held is
    free. Every rank must enter it. With `apart` false ranks wait for each other inside, and an error is raised at once.
    """
    error, bad = None, 0
    try:
        yield
    except Exception as failed:
        if not apart:
            raise
        passing = is_out_of_memory(failed) or isinstance(failed, ElsewhereError)
        error, bad = (failed.with_traceback(None), 1) if passing else (failed, 2)
    worst = largest_of_ranks(bad, device)
    if worst == 1:
        raise OutOfMemoryError
    if worst:
        fail_together(None if isinstance(error, ElsewhereError) else error)


def gather_made(make: Callable[[], Tensor], length: int, device: torch.device) -> Tensor:
    """(ranks, length) what each rank makes, a tensor of `length` elements, by rank; the same bits on each.

    Every rank must call it. Where `make` fails on any, no rank waits: that one raises its error and the others
    ElsewhereError, which `together`, around all this, makes one of.
    """
    if not active():
        return make()[None]
    error: Exception | None = None
    try:
        mine = make()
        everything = mine.new_empty(world_size(), length)
    except Exception as failed:
        error = failed
    if largest_of_ranks(int(error is not None), device):
        if error is None:
            raise ElsewhereError
        raise error
    dist.all_gather_into_tensor(everything.view(torch.uint8).flatten(), mine.view(torch.uint8))  # any dtype is bytes
    return everything


@torch.no_grad()
def share(tensors: Iterable[Tensor]) -> None:
    """Make every rank's tensors the main one's."""
    if active():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` added up over all ranks, in place, the same on each; every rank must call it."""
    if active():
        dist.all_reduce(values)
    return values


@torch.no_grad()
def average_over_ranks(tensors: Sequence[Tensor], parts: int | None = None) -> None:
    """Replace each tensor, all of one dtype, by its mean over all ranks, in one reduction; every rank must call it.

    parts: on so many of the ranks a tensor is something, and 0 on the others. Where it is 1, integers will do.
    """
    if active() and tensors:
        flat = sum_over_ranks(_flatten_dense_tensors(tensors))
        parts = world_size() if parts is None else parts
        flat = flat / parts if parts > 1 else flat
        torch._foreach_copy_(list(tensors), list(_unflatten_dense_tensors(flat, tensors)))


def from_main(value: Value) -> Value:
    """The main process's `value`, on every rank."""
    if not active():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def made_by_main(make: Callable[[], Value]) -> Value:
    """What `make` makes on the main process, on every rank; every rank must call it, inside `together`.

    Where it fails, the main one raises its error and the others ElsewhereError, which `together` makes one of.
    """
    if not active():
        return make()
    error: Exception | None = None
    made: list[Any] = [None]
    if is_main():
        try:
            made = [(make(),)]
        except Exception as failed:
            error = failed
    dist.broadcast_object_list(made, src=0)
    if error is not None:
        raise error
    if made[0] is None:
        raise ElsewhereError
    return made[0][0]


def gather(value: Value) -> list[Value]:
    """Every rank's `value`, by rank, on every rank."""
    if not active():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def fail_together(error: Exception | None) -> None:
    """Stop every rank when any has an error, so that none waits for one that is gone; every rank must call it.

    The main one raises the error itself or, where it is not the user's to mend, says whose it is; its own rank raises
    it, too.
    """
    if not active():
        if error is not None:
            raise error
        return
    told = error if error is None or isinstance(error, DetectorError) else _foreign(error)
    errors = [one for one in gather(told) if one is not None]
    if not errors:
        return
    if error is not None and (is_main() or not isinstance(error, DetectorError)):
        raise error
    if is_main():
        raise errors[0] from None
    raise SystemExit(2)


def _foreign(error: Exception) -> TrainingError:
    """An error that may not be one that can be sent, as one that can."""
    return TrainingError(f"process {rank()} failed: {type(error).__name__}: {error}")


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `detector ARGUMENTS` as that many processes on this machine under torchrun's launcher; returns the status.

    A signal is passed on to the processes, which save and stop, and then raised as Interrupted.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables say no more than we do
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    try:
        with tempfile.TemporaryDirectory(prefix="detector-") as logs:  # torchrun makes a folder even for no logs
            options = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={logs}"]
            run(get_args_parser().parse_args([*options, "-m", "detector", *arguments]))
    except SignalException as stop:
        raise Interrupted(int(stop.sigval)) from None
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status  # a negative one is the signal that ended it
    return 0
