"""Normalisation for training: which kind of BatchNorm a network has.

All kinds have BatchNorm2d's state-dict names and its formula in eval mode, so checkpoints do not depend on the kind.
"""

from typing import Literal

import torch
from torch import nn

from detector.errors import ConfigError

NormKind = Literal["batch", "sync", "frozen"]


def set_norms(network: nn.Module, kind: NormKind, device: torch.device, world_size: int) -> None:
    """Exchanges the BatchNorm2d layers below `network`, in place, for those of `kind`.

    Weights and statistics are kept, as the same tensors: an optimizer built before or after trains them. `batch` and
    `frozen` change nothing (frozen layers are BatchNorm in eval mode). `sync` on one device is `batch`. Raises
    ConfigError for `sync` where there is no CUDA.
    """
    if kind != "sync":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"bn=sync: statistics are shared between CUDA devices only, and this run is on {device.type}; set bn to "
            "batch, or to frozen with trained weights"
        )
    if world_size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
