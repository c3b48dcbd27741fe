"""Offload: what the forward pass keeps for the backward pass waits in host memory.

Bytes are moved, not values: the step is the same to the bit. On a CPU host memory is where the activations are anyway;
there they are copied, so that the same lines can be tested without a GPU.
"""

import weakref
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST = 2**20  # bytes: statistics and small maps are no memory, and each copy costs a launch and a wait


class Host:
    """The bytes of a tensor's storage in host memory, page-locked where they come from a CUDA device.

    Copies run on the current stream, behind what computes the tensor and before what reuses its memory; the program
    does not wait for them.
    """

    def __init__(self, storage: torch.UntypedStorage):
        self.source = StorageWeakRef(storage)  # while it lives, no other storage gets this one's address
        self.device = storage.device
        self.bytes = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.bytes.copy_(_view(storage, torch.uint8, 0, (storage.nbytes(),), (1,)), non_blocking=True)

    def back(self) -> torch.UntypedStorage:
        """The bytes on the device they came from."""
        return self.bytes.to(self.device, non_blocking=True).untyped_storage()


class Placed(NamedTuple):
    """A tensor whose storage is in host memory."""

    host: Host
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Offload:
    """The hooks of one forward pass. A storage is copied once, however many tensors on it are kept."""

    def __init__(self) -> None:
        # Weak, so that a copy goes as soon as the backward pass has used it.
        self.hosts: weakref.WeakValueDictionary[tuple[int, int], Host] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Tensor | Placed:
        """Where a tensor that autograd keeps will wait: as it is, if it is small or a weight, or else in the host."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST or is_weight(tensor):
            return tensor
        key = storage._cdata, tensor._version  # a tensor written to since is another
        host = self.hosts.get(key)
        if host is None:
            host = self.hosts[key] = Host(storage)
        return Placed(host, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def unpack(self, kept: Tensor | Placed) -> Tensor:
        """The tensor, on its device and with its strides."""
        if isinstance(kept, Tensor):
            return kept
        return _view(kept.host.back(), kept.dtype, kept.offset, kept.size, kept.stride)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or autocast's copy of one: they stay on the device anyway."""
    made_by = tensor.grad_fn
    if made_by is None or len(made_by.next_functions) != 1:
        return isinstance(tensor, nn.Parameter)
    return hasattr(made_by.next_functions[0][0], "variable")  # autograd's end node of a leaf


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def offloaded() -> AbstractContextManager[None]:
    """A context for a forward pass, whose activations wait in host memory until the backward pass wants them."""
    hooks = Offload()
    return saved_tensors_hooks(hooks.pack, hooks.unpack)
