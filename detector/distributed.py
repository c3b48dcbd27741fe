"""Rank, world size, sums over ranks and the launcher. Without a process group all of it is the no-op of one device."""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

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


class GradientSum:
    """The gradients of a network's parameters, added up over ranks while the last backward pass of a step still runs.

    This is what DistributedDataParallel does, in chunks from the last layer on, with one thing more: a rank whose
    backward pass fails can `finish` all the same. It sends what it has, so that no other rank waits for it, and then
    all can agree to throw the step away. Gradients are views of the chunks, and sums, not means.

    Alone, there is nothing to add up, and gradients are ordinary ones.
    """

    def __init__(self, network: nn.Module, chunk_bytes: int = 25 * 2**20):
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._chunks: list[_Chunk] = []
        self._chunk_of: dict[nn.Parameter, _Chunk] = {}
        self._sent: list[dist.Work] = []
        self._sending = False
        if not active():
            return
        for chunk in _chunks(self._parameters[::-1], chunk_bytes):
            self._chunks.append(_Chunk(chunk))
            self._chunk_of |= dict.fromkeys(chunk, self._chunks[-1])
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._added)

    def begin(self) -> None:
        """Start a step: no gradients yet."""
        for chunk in self._chunks:
            chunk.begin()
        if not self._chunks:
            for parameter in self._parameters:
                parameter.grad = None
        self._sent, self._sending = [], False

    def send_as_they_come(self) -> None:
        """From here on, which is the last backward pass, a gradient that is added to is complete."""
        self._sending = True

    def finish(self) -> None:
        """Send what is not sent yet, complete or not, and wait until all are summed; every rank must call it."""
        for chunk in self._chunks[len(self._sent) :]:
            self._sent.append(chunk.send())
        for work in self._sent:
            work.wait()

    def _added(self, parameter: nn.Parameter) -> None:
        if not self._sending:
            return
        self._chunk_of[parameter].missing -= 1
        # In the order of the chunks, whatever that of the gradients: all ranks must send the same one at a time.
        while len(self._sent) < len(self._chunks) and not self._chunks[len(self._sent)].missing:
            self._sent.append(self._chunks[len(self._sent)].send())


class _Chunk:
    """Some parameters whose gradients lie in one tensor."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.flat = torch.zeros(sum(map(torch.Tensor.numel, parameters)), **_kind(parameters[0]))
        self.missing = len(parameters)  # whose gradient is not complete yet
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        # In the parameter's own memory format, so that optimizers run through both as they lie in memory.
        self.views = [one.as_strided(p.size(), p.stride()) for one, p in zip(parts, parameters, strict=True)]

    def begin(self) -> None:
        self.flat.zero_()
        self.missing = len(self.parameters)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def send(self) -> dist.Work:
        return dist.all_reduce(self.flat, async_op=True)


def _kind(parameter: nn.Parameter) -> dict[str, Any]:
    return {"dtype": parameter.dtype, "device": parameter.device}


def _chunks(parameters: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in their order, as lists of one dtype and device and of at most `most` bytes, or of one."""
    chunk: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(one.nbytes for one in chunk)
        if chunk and (size + parameter.nbytes > most or _kind(parameter) != _kind(chunk[0])):
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk


def largest_of_ranks(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, the same on each; every rank must call it."""
    if not active():
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def on_any_rank(happened: bool, device: torch.device) -> bool:
    """Whether it happened on any rank, the same answer on each; every rank must call it."""
    return bool(largest_of_ranks(int(happened), device))


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
