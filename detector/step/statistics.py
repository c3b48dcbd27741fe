"""BatchNorm's running statistics in training: which layers learn them, and what several ranks do with them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from detector import distributed
from detector.step.pipeline import Pipeline

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def norm_layers(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, NORMS)]


def set_modes(network: nn.Module, freeze_norms: bool) -> None:
    """Training mode; but frozen layers, and with `freeze_norms` every norm layer, use and keep running statistics."""
    network.train()
    for module in network.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
    if freeze_norms:
        for module in norm_layers(network):
            module.eval()


@contextmanager
def norms_at_rest(network: nn.Module) -> Iterator[None]:
    """A context in which no norm layer learns running statistics.

    But for SyncBatchNorm, where the other ranks wait for this one's share: what runs inside enters their statistics.
    """
    learning = [one for one in norm_layers(network) if one.training and not isinstance(one, nn.SyncBatchNorm)]
    for module in learning:
        module.eval()
    try:
        yield
    finally:
        for module in learning:
            module.train()


class Statistics:
    """The running means, variances and counters that training moves, and what they were when this object was made."""

    def __init__(self, network: nn.Module):
        learning = [module for module in norm_layers(network) if module.training]
        self.layers = [module for module in learning for _ in module.buffers(recurse=False)]
        self.buffers = [buffer for module in learning for buffer in module.buffers(recurse=False)]
        self.before = [buffer.clone() for buffer in self.buffers]

    def back(self) -> None:
        """Put back what they were: a step that is thrown away has taught them nothing."""
        for buffer, before in zip(self.buffers, self.before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def average(self, pipeline: Pipeline | None = None) -> None:
        """Make those of all ranks, each of which moves its own, their mean; every rank must call it.

        With stages a layer's are moved by one stage of each replica: theirs is the mean, and all ranks get it. What
        counts steps is that of the first replica.
        """
        floating = [buffer for buffer in self.buffers if buffer.is_floating_point()]
        if pipeline is None:
            distributed.average_over_ranks(floating)
            return
        for layer, buffer in zip(self.layers, self.buffers, strict=True):
            if id(layer) not in pipeline.own or (pipeline.mesh.replica and not buffer.is_floating_point()):
                buffer.zero_()
        distributed.average_over_ranks(floating, pipeline.mesh.replicas)
        distributed.average_over_ranks([buffer for buffer in self.buffers if not buffer.is_floating_point()], 1)
