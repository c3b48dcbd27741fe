"""Activation checkpointing: parts of a network keep their input alone, and run again in the backward pass.

Chen et al., "Training deep nets with sublinear memory cost" (2016). What makes it safe here is that the second run is
the first to the bit and leaves no trace: norm layers run again with the statistics that they had before the first run,
and what they do to them is thrown away.
"""

from contextlib import nullcontext
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detector.model.blocks.conv import Conv, Focus, GhostConv


def is_block(layer: nn.Module) -> bool:
    """Whether a layer is one that `checkpoint: stages` runs again.

    A block keeps ten maps and more between its input and its output, a single convolution three, of which the next
    layer needs one anyway.
    """
    return has_weights(layer) and not isinstance(layer, Conv | Focus | GhostConv | nn.Conv2d | nn.ConvTranspose2d)


def has_weights(layer: nn.Module) -> bool:
    """Whether a layer is one that `checkpoint: all` runs again; the others keep nothing but shapes."""
    return next(layer.parameters(), None) is not None


def rerun(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, of which only x is kept: what else the backward pass needs is computed again from it.

    Gradients, statistics and random numbers are those of a plain call, to the bit. The module must be in the same mode
    in the backward pass as in the forward pass.
    """
    if not torch.is_grad_enabled():
        return module(x)
    if torch.compiler.is_compiling():  # into a graph of pure operations, which writes statistics once, at its end
        return checkpoint(module, x, use_reentrant=False)
    before = Before(module)
    return checkpoint(
        module, x, use_reentrant=False, preserve_rng_state=True, context_fn=lambda: (nullcontext(), before)
    )


class Before:
    """A context in which the norm layers of a module have the statistics of when this object was made.

    A second run would move them, and count, once more. Inside, the layers hold copies;
    the tensors themselves, which optimizer, average and ranks know, are put back untouched. An error may leave the
    context (torch stops a second run by one, as soon as nothing more is needed), and it may be entered again.
    """

    def __init__(self, module: nn.Module):
        learning = [one for one in module.modules() if one.training]
        self.saved = [
            (one, name, buffer.clone()) for one in learning for name, buffer in one.named_buffers(recurse=False)
        ]
        self.outside: list[Tensor] = []

    def __enter__(self) -> None:
        self.outside = [getattr(module, name) for module, name, _ in self.saved]
        for module, name, before in self.saved:
            setattr(module, name, before.clone())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for (module, name, _), buffer in zip(self.saved, self.outside, strict=True):
            setattr(module, name, buffer)
        self.outside = []
