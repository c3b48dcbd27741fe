"""Running out of memory: what counts as it, and how to go on from it."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

# What the allocators say that have no error class of their own: PyTorch's on the CPU, oneDNN, and CUDA's libraries.
SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "could not create a memory",
    "could not create a primitive",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)


class OutOfMemoryError(Exception):
    """Memory ran out, on this rank or on another, in work that all do; what they did of it is undone."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(one in str(error) for one in SAID)


def attempt(action: Callable[[], Result]) -> Result | None:
    """The action's result; None where memory ran out. By then the action's frames are gone, and what they held is free.

    The action must not return None itself.
    """
    early = torch.zeros((), requires_grad=True) * 1
    try:
        return action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # What a failed backward pass on a CPU had still to do, with all activations, waits in this thread's queue for
    # another pass. One over a graph older than all of it throws it away first: the queue runs what is newest first.
    if early.requires_grad:  # else gradients are off, and there was no backward pass
        early.backward()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
