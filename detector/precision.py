"""Which arithmetic a run uses, and the loss scaler that fp16 needs."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from detector.errors import ConfigError
from detector.spelling import AMP, spelt
from detector.values import plain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtype of the network's arithmetic on a kind of device; weights, losses and averages are fp32 always."""

    name: str  # fp32, bf16 or fp16
    device_type: str

    def autocast(self) -> AbstractContextManager[None]:
        """A context for the forward pass; with fp32 it changes nothing."""
        return torch.autocast(self.device_type, dtype=DTYPES[self.name], enabled=self.name != "fp32")

    def scaler(self) -> torch.amp.GradScaler:
        """A loss scaler, which is disabled (and passes everything through) unless the arithmetic is fp16."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")


def choose_precision(amp: str | bool | torch.dtype, device: torch.device) -> Precision:
    """The precision that `amp` asks for, as in a config; `auto` takes what the device computes natively.

    bf16 on GPUs with native support and on CPUs with AVX512-BF16 or AMX; fp16 on older GPUs; else fp32. ConfigError for
    another, and for one that the device lacks.
    """
    amp = spelt(plain(amp), AMP | {name: name for name in ("auto", *DTYPES)})
    if amp not in ("auto", *DTYPES):
        raise ConfigError(f"amp={amp!r}: should be auto, {', '.join(DTYPES)}")
    if amp == "auto":
        amp = native_precision(device)
    if amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=True):
        raise ConfigError(f"amp=bf16: {torch.cuda.get_device_name(device)} has no bf16; use amp=fp16 or amp=auto")
    return Precision(amp, device.type)


def native_precision(device: torch.device) -> str:
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu":
        has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # older torch cannot tell
        return "bf16" if has.get("avx512_bf16") or has.get("amx_bf16") else "fp32"
    return "fp32"
