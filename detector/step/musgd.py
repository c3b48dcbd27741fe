"""MuSGD: SGD, and before it, for matrices and convolutions, a move along the orthogonalised momentum (Muon)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from detector.step.eager import SGD
from detector.step.muon import orthogonalized

MUON = 0.2  # of a group's rate; SGD's own step is at all of it


class MuSGD(SGD):
    """SGD with Nesterov momentum, and more in groups with `muon: True`, whose parameters all have 2 or 4 dimensions.

    There, first, with a momentum M of its own (`muon_buffer`): M = mu M + (1 - mu) g; U = mu M + (1 - mu) g, as a
    matrix (out, in * kh * kw); and the weight moves by 0.2 lr f X, where X is U orthogonalised and f the root of the
    ratio of the gradient's last two sizes, if that is more than 1. There is no decay in this move. Then SGD's own
    step, with decay, from where the weight is now.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, fused: bool | None = None):
        super().__init__(params, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=fused)
        for group in self.param_groups:
            group.setdefault("muon", False)
        # A fused step is called by a loss scaler also where it is to be left out; we want to be left out with it.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Every rank must call it, with the same gradients; where one fails in the first move, all do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.move()
        super().step()
        return loss

    def move(self) -> None:
        """Muon's move, of all groups at once."""
        parameters: list[Tensor] = []
        updates: list[Tensor] = []
        factors: list[float] = []
        for group in self.param_groups:
            mine = [parameter for parameter in group["params"] if parameter.grad is not None and group["muon"]]
            if not mine:
                continue
            gradients, mu = [parameter.grad for parameter in mine], group["momentum"]
            momenta = [self.muon_buffer(parameter) for parameter in mine]
            torch._foreach_lerp_(momenta, gradients, 1 - mu)
            updates += torch._foreach_lerp(gradients, momenta, mu)
            factors += [-MUON * group["lr"] * stretch(gradient) for gradient in gradients]
            parameters += mine
        if parameters:
            moves = orthogonalized([as_matrix(update) for update in updates])
            torch._foreach_mul_(moves, factors)
            torch._foreach_add_(parameters, [as_weight(*pair) for pair in zip(moves, parameters, strict=True)])

    def muon_buffer(self, parameter: Tensor) -> Tensor:
        """The momentum M of a parameter, from 0."""
        state = self.state[parameter]
        if "muon_buffer" not in state:
            state["muon_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["muon_buffer"]


def stretch(gradient: Tensor) -> float:
    """The factor f: of a matrix by its rows and columns, of a convolution by its kernel's."""
    return max(1.0, gradient.shape[-2] / gradient.shape[-1]) ** 0.5


def as_matrix(update: Tensor) -> Tensor:
    """(out, in * kh * kw); the columns as they lie in memory in channels_last, for their order means nothing."""
    return update.permute(0, 2, 3, 1).flatten(1) if update.ndim == 4 else update


def as_weight(matrix: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_matrix`."""
    if like.ndim == 2:
        return matrix
    out, channels, height, width = like.shape
    return matrix.view(out, height, width, channels).permute(0, 3, 1, 2)
