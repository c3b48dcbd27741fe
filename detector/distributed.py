"""Rank, world size and sums over ranks. Without a process group every function is the no-op of a run on one device."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if active() else 0


def world_size() -> int:
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    """True on the one process that prints and writes files."""
    return rank() == 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` added up over all ranks, in place, the same on each; every rank must call it."""
    if active():
        dist.all_reduce(values)
    return values


def gradient_sync(network: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """A context in which a backward pass adds gradients over ranks (enabled) or keeps them local."""
    if enabled or not isinstance(network, DistributedDataParallel):
        return nullcontext()
    return network.no_sync()
