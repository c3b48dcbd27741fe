"""Rank, world size, sums over ranks and the launcher. Without a process group all of it is the no-op of one device."""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from detector.errors import Interrupted

Value = TypeVar("Value")


def launched() -> bool:
    """Whether torchrun (or `launch`) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


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
    """The processes that torchrun started, joined for the time of the context; nothing where there is only one."""
    if not launched() or active():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives of objects go through the current device
    # Torchrun keeps its store when it starts the processes again, and with it the addresses of those that are gone; who
    # meets under them waits for ever. So each start has a part of the store for itself.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start-{restarts()}", store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parallel(network: nn.Module, device: torch.device) -> nn.Module:
    """The network, wrapped so that a backward pass adds gradients over ranks where there are several.

    Buffers are not broadcast: `average_over_ranks` keeps the norm layers' statistics equal instead.
    """
    if not active():
        return network
    devices = [device] if device.type == "cuda" else None
    with warnings.catch_warnings():  # newer releases would rename broadcast_buffers, older ones know no other name
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            network, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
        )


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """A context in which a backward pass averages gradients over ranks (enabled) or keeps them local."""
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` added up over all ranks, in place, the same on each; every rank must call it."""
    if active():
        dist.all_reduce(values)
    return values


def max_over_ranks(value: Tensor) -> Tensor:
    """The largest of all ranks' values, in place, the same on each; every rank must call it."""
    if active():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


@torch.no_grad()
def average_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace each floating tensor by its mean over all ranks, in one reduction; every rank must call it."""
    if active() and tensors:
        flat = sum_over_ranks(_flatten_dense_tensors(tensors)) / world_size()
        torch._foreach_copy_(list(tensors), list(_unflatten_dense_tensors(flat, tensors)))


def from_main(value: Value) -> Value:
    """The main process's `value`, on every rank."""
    if not active():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Value) -> list[Value]:
    """Every rank's `value`, by rank, on every rank."""
    if not active():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def fail_together(error: Exception | None) -> None:
    """Stop every rank when any has an error, so that none waits for one that is gone; the main one raises it."""
    errors = [one for one in gather(error) if one is not None]
    if errors and is_main():
        raise error or errors[0]
    if errors:
        raise SystemExit(2)


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `detector ARGUMENTS` as that many processes on this machine under torchrun's launcher; returns the status.

    A signal is passed on to the processes, which save and stop, and then raised as Interrupted.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables say no more than we do
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    options = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={tempfile.gettempdir()}"]
    try:
        run(get_args_parser().parse_args([*options, "-m", "detector", *arguments]))
    except SignalException as stop:
        raise Interrupted(int(stop.sigval)) from None
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status  # a negative one is the signal that ended it
    return 0
