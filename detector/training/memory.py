"""Memory: how much there is, and offload, by which what the forward pass keeps waits in host memory.

Bytes are moved, not values: the step is the same to the bit. On a CPU host memory is where the activations are anyway;
there they are copied, so that the same lines can be tested without a GPU.
"""

import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from detector.data.cache import available_memory
from detector.errors import ConfigError

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


def resident(field: str, process: int | str = "self") -> int:
    """Bytes of a process in memory: now (VmRSS), or at most so far (VmHWM); 0 for one that has ended.

    Not getrusage's ru_maxrss, which a process inherits from the one that started it. ConfigError where there is no
    /proc.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except ProcessLookupError:
        return 0
    except OSError:
        if process != "self" and Path("/proc/self/status").exists():
            return 0
        raise ConfigError("memory on a CPU is measured on Linux only; give the batch as a number") from None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:")), 0)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take on a device; what other processes hold there is not free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "cpu":
        return available_memory()
    raise ConfigError(f"device={device}: memory is measured on Linux CPUs and on CUDA GPUs; give the batch as a number")


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device refused memory; its libraries say so in words of their own."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)
