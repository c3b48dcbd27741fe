"""From a checkpoint, or an export of one, to a detector that is ready to predict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from detector import checkpoint_file
from detector.device import choose_device
from detector.errors import ConfigError
from detector.inference.detector import Detector
from detector.inference.infer import NetworkRuntime
from detector.inference.runtimes.engines import is_export
from detector.model.checkpoint import network_of
from detector.precision import choose_precision
from detector.values import plain


def load(
    path: str | Path,
    device: str | int | torch.device = "auto",
    amp: str | bool | torch.dtype = "auto",
    nms: bool | Literal["auto"] = "auto",
    names: Sequence[str] | None = None,
    imgsz: int | None = None,
    layout: Literal["raw", "detections"] | None = None,
) -> Detector:
    """A trained detector from a checkpoint, a run's folder or an export: `.names`, `.predict(...)`, `.network`.

    device, amp and nms are as in a config: where it runs, in which precision, and whether boxes are suppressed; the
    latter two are settled in an export. names and imgsz take the place of the file's own; an export that another tool
    made needs them, and layout where its output may be of either kind. Raises CheckpointError for a file that is
    missing, damaged or of another program, ConfigError for a device, precision or head that is not there.
    """
    path, device, nms, amp = Path(path), plain(device), plain(nms), plain(amp)
    if is_export(path):
        from detector.inference.runtimes.opening import open_export

        runtime = open_export(path, str(device), names, imgsz, layout)
        check_settled(path, amp, nms, runtime.facts.nms == "none")
        return Detector(runtime, runtime.facts.names, runtime.facts.imgsz)
    if layout is not None:
        raise ConfigError(f"layout={layout}: {path} is a checkpoint, whose output is known; leave it out")
    path = checkpoint_file.weights_in(path)
    detector = of_checkpoint(checkpoint_file.read(path), path, device, amp, nms)
    if names is not None and len(names) != len(detector.names):
        raise ConfigError(f"names: {len(names)} of them, and {path} has {len(detector.names)} classes")
    return Detector(detector.runtime, tuple(names or detector.names), imgsz or detector.imgsz)


def of_checkpoint(
    saved: dict[str, Any], path: Path, device: str | int = "auto", amp: str | bool = "auto", nms: bool | str = "auto"
) -> Detector:
    """The detector of a checkpoint that is read already. Errors are those of `load`."""
    target = choose_device(device)
    network = network_of(saved, path).to(target)
    network.head.choose(nms)
    precision = choose_precision(amp, target)
    return Detector(NetworkRuntime(network, target, precision.autocast), tuple(saved["names"]), saved["imgsz"])


def check_settled(path: Path, amp: object, nms: object, free: bool) -> None:
    """Raise ConfigError for what an export has settled otherwise; `free`: its head needs no suppression."""
    if amp != "auto":
        raise ConfigError(f"amp={amp}: {path} computes as it was exported; half=true exports one in float16")
    if nms != "auto" and nms == free:
        raise ConfigError(
            f"nms={str(nms).lower()}: {path} was exported with{'out' if free else ''} suppression; leave it out"
        )
