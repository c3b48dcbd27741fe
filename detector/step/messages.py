"""What stages of a pipeline send one another: maps down, their gradients up, or word that there are none.

A message is a header, which the host gets without waiting for a GPU, and then its tensors in pieces. So shapes may be
others each time, and a process that has no memory for a message takes it all the same, piece by piece, and goes on.
"""

import pickle
import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from detector.distributed import ElsewhereError

HEADER = 4096  # bytes
PIECE = 4 * 2**20  # bytes of a tensor that are sent at once
WAITING = 2  # messages under way on a link; before a third is sent, the first must have arrived


class Message(NamedTuple):
    """Tensors without gaps in their memory, see `dense`; some may be none. And plain data about them."""

    tensors: Sequence[Tensor | None]
    about: Any = None


class Kind(NamedTuple):
    """What must be known of a tensor before it comes. Strides, too: kernels, and so the bits, follow from them."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


class Link:
    """One direction between two processes, both of which make one for it; messages keep their order."""

    def __init__(self, peer: int, control: dist.ProcessGroup, group: dist.ProcessGroup, device: torch.device):
        self.peer, self.control, self.group, self.device = peer, control, group, device
        self.tag = 0  # of the last part of a message; both sides count alike
        self.sent: list[list[tuple[dist.Work, Tensor]]] = []  # parts of messages that may be under way
        self.spare = torch.empty(PIECE, dtype=torch.uint8, device=device)  # where goes what there is no memory for
        self.seconds = 0.0  # spent on waiting for messages

    def send(self, message: Message | None) -> None:
        """Send a message, or word that there is none because the work failed; it may be under way for a while."""
        while len(self.sent) >= WAITING:
            _settle(self.sent.pop(0))
        tensors = message.tensors if message else []
        kinds = [None if one is None else Kind(one.dtype, tuple(one.shape), one.stride()) for one in tensors]
        text = pickle.dumps((kinds, message.about) if message else None)
        assert len(text) <= HEADER, f"a header cannot describe {len(tensors)} tensors"
        header = torch.frombuffer(bytearray(text.ljust(HEADER, b"\0")), dtype=torch.uint8)
        parts = [(self._send(header, self.control), header)]
        for tensor in tensors:
            parts += [(self._send(piece, self.group), piece) for piece in pieces(tensor)] if tensor is not None else []
        self.sent.append(parts)

    def receive(self, wanted: bool = True) -> Message:
        """The next message; not `wanted`: it is taken off the way, and what it holds is nothing.

        Raises ElsewhereError where the work failed on the other side. An error of one's own, as that there is no memory
        for the tensors, is raised once the whole message has been taken.
        """
        start, error = time.perf_counter(), None
        header = torch.empty(HEADER, dtype=torch.uint8)
        self._receive(header, self.control).wait()
        content = pickle.loads(header.numpy().tobytes())
        if content is None:
            raise ElsewhereError
        kinds, about = content
        tensors: list[Tensor | None] = []
        try:
            tensors = [one and one.empty(self.device) for one in kinds if wanted]
        except Exception as failed:
            error = failed.with_traceback(None)
        if wanted and error is None:
            parts = [piece for tensor in tensors if tensor is not None for piece in pieces(tensor)]
            for work in [self._receive(part, self.group) for part in parts]:
                work.wait()
        else:
            self._drop(kinds)
        self.seconds += time.perf_counter() - start
        if error is not None:
            raise error
        return Message(tensors, about)

    def arrived(self) -> None:
        """Wait until all that was sent has arrived."""
        while self.sent:
            _settle(self.sent.pop(0))

    def _drop(self, kinds: Sequence[Kind | None]) -> None:
        """Take tensors, and keep nothing of them."""
        for kind in kinds:
            for start in range(0, kind.bytes, PIECE) if kind else ():
                self._receive(self.spare[: min(PIECE, kind.bytes - start)], self.group).wait()

    def _send(self, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
        return dist.isend(part, self.peer, group=group, tag=self._next())

    def _receive(self, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
        return dist.irecv(part, self.peer, group=group, tag=self._next())

    def _next(self) -> int:
        """The tag of the next part of a message: a 31-bit number, and not 0, which others use."""
        self.tag = self.tag % 2**30 + 1
        return self.tag


def _settle(parts: Sequence[tuple[dist.Work, Tensor]]) -> None:
    for work, _ in parts:
        work.wait()


def dense(tensor: Tensor) -> Tensor:
    """The tensor without its graph, or where there are gaps between its elements a copy without them."""
    tensor = tensor.detach()
    formats = (torch.contiguous_format, torch.channels_last) if tensor.dim() == 4 else (torch.contiguous_format,)
    return tensor if any(tensor.is_contiguous(memory_format=one) for one in formats) else tensor.contiguous()


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a dense tensor as they lie in memory, as views of at most PIECE of them."""
    return iter(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).split(PIECE))
