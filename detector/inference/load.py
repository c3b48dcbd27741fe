"""From a checkpoint to a detector that is ready to predict."""

from pathlib import Path
from typing import Literal

import torch

from detector import checkpoint_file
from detector.device import choose_device
from detector.inference.detector import Detector
from detector.inference.infer import NetworkRuntime
from detector.model.checkpoint import network_of
from detector.precision import choose_precision
from detector.values import plain


def load(
    path: str | Path,
    device: str | int | torch.device = "auto",
    amp: str | bool | torch.dtype = "auto",
    nms: bool | Literal["auto"] = "auto",
) -> Detector:
    """A trained detector from a checkpoint or a run's folder: `.network`, `.names`, `.predict(...)`.

    device, amp and nms are as in a config: where it runs, in which precision, and whether boxes are suppressed. Raises
    CheckpointError for a file that is missing, damaged or of another program, ConfigError for a device, precision or
    head that is not there.
    """
    path = checkpoint_file.weights_in(Path(path))
    saved = checkpoint_file.read(path)
    target = choose_device(plain(device))
    network = network_of(saved, path).to(target)
    network.head.choose(plain(nms))
    precision = choose_precision(amp, target)
    return Detector(NetworkRuntime(network, target, precision.autocast), tuple(saved["names"]), saved["imgsz"])
