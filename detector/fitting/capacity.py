"""How much memory there is for a run, and how much a process takes."""

import torch

from detector.errors import ConfigError
from detector.memory import available_memory, resident_memory


def resident(field: str, process: int | str = "self") -> int:
    """`resident_memory`. Raises ConfigError where the system does not say."""
    held = resident_memory(field, process)
    if held is None:
        raise ConfigError("memory on a CPU is measured on Linux only; give the batch as a number")
    return held


def free_memory(device: torch.device) -> int:
    """Bytes that this process may hold on a device, with those that it holds; what others hold is not free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "cpu":
        return available_memory() + resident("VmRSS")
    raise ConfigError(f"device={device}: memory is measured on Linux CPUs and on CUDA GPUs; give the batch as a number")
