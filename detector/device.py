"""Which devices a run's processes compute on."""

import torch

from detector import distributed
from detector.errors import ConfigError


def choose_devices(name: str | int | list[int]) -> list[torch.device]:
    """The devices that a `device` setting names, one a process on this machine.

    auto, cpu, mps, a GPU's number or cuda:0 are one; '0,1' or [0, 1] are several GPUs, cpu:2 is the CPU for two
    processes. ConfigError where a device is not there.
    """
    text = ",".join(map(str, name)) if isinstance(name, list) else str(name).strip().lower()
    if text == "auto":
        return [torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")]
    kind, _, count = text.partition(":")
    if kind == "cpu" and count.isdigit() and int(count) > 0:
        return [torch.device("cpu")] * int(count)
    parts = [part.strip() for part in text.split(",")]
    devices = [_device(f"cuda:{part}" if part.isdigit() else part, name) for part in parts]
    if len(devices) > 1 and (len(set(devices)) < len(devices) or any(one.type != "cuda" for one in devices)):
        raise ConfigError(f"device={name}: several devices are different GPUs, as in '0,1', or the CPU, as in cpu:2")
    return devices


def _device(text: str, name: object) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device={name}: not a device this trainer uses; use auto, cpu, mps or a GPU's number")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name}: this machine has {torch.cuda.device_count()} CUDA GPUs; use device=auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name}: no Apple GPU here; use device=auto or cpu")
    return device


def choose_device(name: str | int | list[int]) -> torch.device:
    """The device of this process: the one that is named or, under torchrun, the one of its local rank."""
    devices, here = choose_devices(name), distributed.local_world_size()
    if len(devices) == 1 and (here == 1 or devices[0].type == "cpu" or name == "auto"):
        return devices[0]
    if len(devices) != here:
        raise ConfigError(
            f"device={name}: {len(devices)} devices for {here} processes on this machine; name one each, or auto"
        )
    return devices[distributed.local_rank()]
