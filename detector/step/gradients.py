"""Gradients of several ranks: summed once a step, in gradient buckets, while the last backward pass still runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from detector import distributed


class GradientSum:
    """The gradients of a network's parameters, added up over ranks while the last backward pass of a step still runs.

    This is what DistributedDataParallel does, in gradient buckets from the last layer on and without synchronising the
    micro-batches before the last (`no_sync`), with one thing more: a rank whose backward pass fails sends what it has,
    so that no other rank waits for it, and then all can agree to throw the step away. Gradients are views of the
    buckets, and sums, not means.

    Alone, there is nothing to add up, and gradients are ordinary ones.
    """

    def __init__(self, network: nn.Module, bucket_bytes: int = 25 * 2**20):
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._sent: list[dist.Work] = []
        self._sending = False
        if not distributed.active():
            return
        for bucket in _buckets(self._parameters[::-1], bucket_bytes):
            self._buckets.append(_Bucket(bucket))
            self._bucket_of |= dict.fromkeys(bucket, self._buckets[-1])
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._added)

    @contextmanager
    def summed(self, apart: bool = True) -> Iterator[None]:
        """A context for the backward passes of a step, from no gradients to their sums over all ranks.

        Also where it is left by an error: what there is is sent, complete or not, unless ranks are not `apart` but
        wait for each other inside. Every rank must enter it.
        """
        for bucket in self._buckets:
            bucket.begin()
        if not self._buckets:
            for parameter in self._parameters:
                parameter.grad = None
        self._sent, self._sending = [], False
        try:
            yield
        except Exception:
            if apart:
                self._finish()
            raise
        self._finish()

    def _finish(self) -> None:
        for bucket in self._buckets[len(self._sent) :]:
            self._sent.append(bucket.send())
        for work in self._sent:
            work.wait()

    def send_as_they_come(self) -> None:
        """From here on, which is the last backward pass, a gradient that is added to is complete."""
        self._sending = True

    def _added(self, parameter: nn.Parameter) -> None:
        if not self._sending:
            return
        self._bucket_of[parameter].missing -= 1
        # In the order of the buckets, whatever that of the gradients: all ranks must send the same one at a time.
        while len(self._sent) < len(self._buckets) and not self._buckets[len(self._sent)].missing:
            self._sent.append(self._buckets[len(self._sent)].send())


class _Bucket:
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


def _buckets(parameters: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in their order, as lists of one dtype and device and of at most `most` bytes, or of one."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(one.nbytes for one in bucket)
        if bucket and (size + parameter.nbytes > most or _kind(parameter) != _kind(bucket[0])):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
