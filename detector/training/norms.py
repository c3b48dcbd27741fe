"""Norm layers in training: which learn statistics, and what several ranks do with them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from detector.model.network import Network

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def norm_layers(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, NORMS)]


def set_modes(network: Network, freeze_norms: bool) -> None:
    """Training mode; but frozen layers, and with `freeze_norms` every norm layer, use and keep running statistics."""
    network.train()
    for layer in network.model:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            layer.eval()
    if freeze_norms:
        for module in norm_layers(network):
            module.eval()


@contextmanager
def norms_at_rest(network: nn.Module) -> Iterator[None]:
    """A context in which no norm layer learns statistics, but for SyncBatchNorm: the other ranks wait for its share."""
    learning = [one for one in norm_layers(network) if one.training and not isinstance(one, nn.SyncBatchNorm)]
    for module in learning:
        module.eval()
    try:
        yield
    finally:
        for module in learning:
            module.train()


def running_statistics(network: nn.Module) -> list[Tensor]:
    """The running means and variances that training moves; each rank moves its own."""
    learning = [module for module in norm_layers(network) if module.training]
    return [buffer for module in learning for buffer in module.buffers(recurse=False) if buffer.is_floating_point()]
