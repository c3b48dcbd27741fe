"""How much memory there is, and how much a process takes."""

from pathlib import Path

import torch

from detector.data.cache import available_memory
from detector.errors import ConfigError


def resident(field: str, process: int | str = "self") -> int:
    """Bytes of a process in memory: now (VmRSS), or at most so far (VmHWM); 0 for one that has ended.

    Not getrusage's ru_maxrss, which a process inherits from the one that started it. ConfigError where there is no
    /proc.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
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
