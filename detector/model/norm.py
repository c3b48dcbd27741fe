"""Normalisation for training: batch renormalisation, and exchanging the norm layers of a network.

All kinds have BatchNorm2d's state-dict names and its formula in eval mode, so checkpoints do not depend on the kind.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from detector.errors import ConfigError

NormKind = Literal["batch", "sync", "frozen", "renorm"]

IMAGES = 2  # of the micro-batch that a norm layer's momentum is meant for
R_MAX, D_MAX = 3.0, 5.0  # the paper's final limits


class BatchRenorm2d(nn.BatchNorm2d):
    """Batch renormalisation (Ioffe 2017, arXiv 1702.03275): BatchNorm that small micro-batches train as well.

        x_hat = (x - mu_B) / sigma_B * r + d
        r = clip(sigma_B / sigma, 1 / r_max, r_max)
        d = clip((mu_B - mu) / sigma, -d_max, d_max)

    mu_B, sigma_B are the micro-batch's statistics, mu, sigma the running ones before this micro-batch. r and d carry no
    gradient. Where nothing is clipped, x_hat is what eval mode gives. r_max 1 and d_max 0, the start, are plain
    BatchNorm. The limits are no state: they follow from the progress of a run, see `renorm_limits`.

    The running statistics follow images, not the cut: a micro-batch of B images has the momentum
    1 - (1 - momentum) ** (B / 2), so that with the networks' momentum of 0.03 they average over about 66 images, one
    nominal step, however it is cut. Here what the statistics lag behind the weights is an error in training, and one
    step is as fresh as they can be: over 530 images (the same momentum for 16) a short run learned far less.

    A map of one value (one image, 1x1) gives d, and leaves the running variance, of which it says nothing, alone. A
    channel that is not finite leaves its running statistics alone: one overflow would else spoil all later steps.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True, **factory):
        super().__init__(num_features, eps, momentum, affine, **factory)
        self.r_max = 1.0
        self.d_max = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape, memory format and dtype."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        r, d = self._renew(x)
        weight, bias = r, d
        if self.affine:
            weight, bias = self.weight * r, torch.addcmul(self.bias, self.weight, d)
        # Not F.batch_norm, which refuses a map of one value; the statistics inside are fp32 whatever x is.
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, self.eps, torch.backends.cudnn.enabled)

    @torch.no_grad()
    def _renew(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """r and d, (C,) each, of a micro-batch; then takes its statistics into the running ones."""
        images, values = len(x), x.numel() // x.shape[1]
        momentum = 1 - (1 - self.momentum) ** (images / IMAGES)
        mean, var, new_mean, new_var = _statistics(x, self.running_mean, self.running_var, momentum)

        scale = (self.running_var + self.eps).rsqrt_()  # 1 / sigma
        r = ((var + self.eps).sqrt_() * scale).clamp_(1 / self.r_max, self.r_max)
        d = ((mean - self.running_mean) * scale).clamp_(-self.d_max, self.d_max)

        finite = torch.isfinite(mean + var)
        self.running_mean.copy_(torch.where(finite, new_mean, self.running_mean))
        if values > 1:
            self.running_var.copy_(torch.where(finite, new_var, self.running_var))
        self.num_batches_tracked.add_(1)
        return r, d


def _statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and biased variance of x per channel, and the next running mean and (unbiased) variance; (C,), fp32."""
    if x.device.type in ("cpu", "cuda"):  # BatchNorm's own kernel, on CPUs 30 times as fast as var_mean
        new_mean, new_var = running_mean.clone(), running_var.clone()
        mean, var = torch.batch_norm_update_stats(x, new_mean, new_var, momentum)
        return mean, var, new_mean, new_var
    values = x.numel() // x.shape[1]
    var, mean = torch.var_mean(x.to(running_mean.dtype), dim=(0, 2, 3), correction=0)
    unbiased = var * (values / max(values - 1, 1))
    return mean, var, running_mean.lerp(mean, momentum), running_var.lerp(unbiased, momentum)


def set_norms(network: nn.Module, kind: NormKind, device: torch.device, world_size: int) -> None:
    """Exchanges the BatchNorm2d layers below `network`, in place, for those of `kind`.

    Weights and statistics are kept, as the same tensors: an optimizer built before or after trains them. `batch` and
    `frozen` change nothing (frozen layers are BatchNorm in eval mode). `sync` on one device is `batch`. Raises
    ConfigError for `sync` where there is no CUDA.
    """
    if kind == "sync":
        if device.type != "cuda":
            raise ConfigError(
                f"bn=sync: statistics are shared between CUDA devices only, and this run is on {device.type}; "
                "set bn to batch, or to renorm for small batches"
            )
        if world_size > 1:
            nn.SyncBatchNorm.convert_sync_batchnorm(network)
    elif kind == "renorm":
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.BatchNorm2d) and not isinstance(child, BatchRenorm2d):
                    setattr(parent, name, _renorm_of(child))


def _renorm_of(norm: nn.BatchNorm2d) -> BatchRenorm2d:
    """A BatchRenorm2d that holds the tensors of `norm`."""
    assert norm.momentum is not None, "the average over all of a run is not supported"
    assert norm.track_running_stats, "renormalisation needs running statistics"
    new = BatchRenorm2d(norm.num_features, norm.eps, norm.momentum, norm.affine, device="meta")
    for name, parameter in norm.named_parameters(recurse=False):
        setattr(new, name, parameter)
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(new, name, buffer)
    return new.train(norm.training)


def set_renorm_limits(network: nn.Module, r_max: float, d_max: float) -> None:
    """Sets the limits of all BatchRenorm2d layers in `network`; other layers stay as they are."""
    assert r_max >= 1, r_max
    assert d_max >= 0, d_max
    for module in network.modules():
        if isinstance(module, BatchRenorm2d):
            module.r_max, module.d_max = r_max, d_max


def renorm_limits(progress: float, warmup: float) -> tuple[float, float]:
    """(r_max, d_max) at `progress` epochs: (1, 0), plain BatchNorm, until `warmup` epochs, then linearly to (3, 5).

    The paper starts with 5,000 steps of plain BatchNorm, for the running statistics to settle, and reaches d_max at
    25,000 and r_max at 40,000 steps. Here its 5,000 steps are the warmup, at least one epoch: d_max is reached at 5
    warmups and r_max at 8. With 3 epochs of warmup that is epoch 15 and 24, so a run of 40 epochs has it all; at 2
    warmups the limits are 1.29 and 1.25. A run that ends sooner never has the full limits: a bound, not an aim.
    """
    start = max(warmup, 1.0)

    def done(full: float) -> float:
        """From 0 at the start to 1 at `full` starts."""
        return min(max((progress / start - 1) / (full - 1), 0.0), 1.0)

    return 1 + (R_MAX - 1) * done(8), D_MAX * done(5)
