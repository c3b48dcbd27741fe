"""Batch renormalisation against its formula, and exchanging the norm layers of a network."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from detector.errors import ConfigError
from detector.model.network import build_network, fused
from detector.model.norm import IMAGES, BatchRenorm2d, renorm_limits, set_norms, set_renorm_limits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def images(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer(kind: type, channels: int = 6, dtype=torch.float32) -> nn.BatchNorm2d:
    """A layer with weights and statistics away from their start."""
    norm = kind(channels, eps=1e-3, momentum=0.03).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * images(channels, seed=1))
        norm.bias.copy_(images(channels, seed=2))
        norm.running_mean.copy_(2 * images(channels, seed=3))
        norm.running_var.copy_(images(channels, seed=4).exp())
    return norm


def by_formula(norm: BatchRenorm2d, x: Tensor) -> Tensor:
    """The paper's algorithm 1 in plain autograd, channel by channel."""
    out = []
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.mean()
        sigma_b = (((values - mean) ** 2).mean() + norm.eps).sqrt()
        sigma = math.sqrt(norm.running_var[c].item() + norm.eps)
        r = min(max(sigma_b.item() / sigma, 1 / norm.r_max), norm.r_max)
        d = min(max((mean.item() - norm.running_mean[c].item()) / sigma, -norm.d_max), norm.d_max)
        out.append(norm.weight[c] * ((values - mean) / sigma_b * r + d) + norm.bias[c])
    return torch.stack(out, dim=1)


def gradients(norm: nn.Module, run, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Output, and the gradients of a weighted sum of it with respect to x, weight and bias."""
    x = x.clone().requires_grad_()
    out = run(x)
    return (out, *torch.autograd.grad((out.double() * weights).sum(), (x, norm.weight, norm.bias)))


# --- the layer


@pytest.mark.parametrize(("r_max", "d_max"), [(1.0, 0.0), (1.2, 0.5), (3.0, 5.0), (1e9, 1e9)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_output_and_gradients_follow_the_formula(r_max, d_max, memory_format):
    norm = layer(BatchRenorm2d, dtype=torch.float64)
    norm.r_max, norm.d_max = r_max, d_max
    x = (1.5 * images(2, 6, 5, 4, dtype=torch.float64) + 0.3).to(memory_format=memory_format)
    weights = images(2, 6, 5, 4, seed=9, dtype=torch.float64)
    expected = gradients(norm, lambda x: by_formula(norm, x), x, weights)  # first: the layer moves its statistics
    found = gradients(norm, norm, x, weights)
    assert found[0].is_contiguous(memory_format=memory_format)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_without_clipping_training_is_eval_mode_with_the_statistics_before():
    norm = layer(BatchRenorm2d, dtype=torch.float64)
    norm.r_max, norm.d_max = 1e9, 1e9
    x = images(3, 6, 4, 4, dtype=torch.float64)
    expected = copy.deepcopy(norm).eval()(x)
    torch.testing.assert_close(norm(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_its_start_it_is_batch_norm(dtype):
    renorm, plain = layer(BatchRenorm2d), layer(nn.BatchNorm2d)
    weights = images(IMAGES, 6, 5, 4, seed=9)
    for seed in range(3):
        x = images(IMAGES, 6, 5, 4, seed=seed).to(dtype).contiguous(memory_format=torch.channels_last)
        for a, b in zip(gradients(renorm, renorm, x, weights), gradients(plain, plain, x, weights), strict=True):
            assert torch.equal(a, b)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(renorm.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_eval_mode_is_batch_norm_and_moves_nothing():
    renorm, plain = layer(BatchRenorm2d).eval(), layer(nn.BatchNorm2d).eval()
    renorm.r_max, renorm.d_max = 3.0, 5.0
    before = copy.deepcopy(renorm.state_dict())
    x = images(2, 6, 5, 4)
    assert torch.equal(renorm(x), plain(x))
    assert all(torch.equal(value, before[name]) for name, value in renorm.state_dict().items())


def test_statistics_follow_images_and_not_the_cut():
    fine, whole = layer(BatchRenorm2d, dtype=torch.float64), layer(BatchRenorm2d, dtype=torch.float64)
    pair = images(2, 6, 16, 16, dtype=torch.float64)
    for _ in range(8):
        fine(pair)
    whole(pair.repeat(8, 1, 1, 1))
    torch.testing.assert_close(fine.running_mean, whole.running_mean, rtol=1e-12, atol=1e-12)
    # The unbiased estimates differ: n / (n - 1) of 512 values and of 4096.
    share = 1 - 0.97 ** (16 / IMAGES)
    difference = share * pair.var(dim=(0, 2, 3), correction=0) * (512 / 511 - 4096 / 4095)
    torch.testing.assert_close(fine.running_var, whole.running_var + difference, rtol=1e-12, atol=1e-12)

    fine, whole = layer(BatchRenorm2d, dtype=torch.float64), layer(BatchRenorm2d, dtype=torch.float64)
    different = 1 + images(16, 6, 16, 16, seed=7, dtype=torch.float64)
    for micro_batch in different.split(2):
        fine(micro_batch)
    whole(different)
    torch.testing.assert_close(fine.running_mean, whole.running_mean, rtol=0, atol=1e-2)
    torch.testing.assert_close(fine.running_var, whole.running_var, rtol=1e-2, atol=0)


def test_the_running_variance_is_that_of_the_unbiased_estimate():
    norm = layer(BatchRenorm2d, dtype=torch.float64)
    x = images(IMAGES, 6, 4, 1, dtype=torch.float64)
    expected = 0.97 * norm.running_var + 0.03 * x.var(dim=(0, 2, 3), correction=1)
    norm(x)
    torch.testing.assert_close(norm.running_var, expected)


@pytest.mark.parametrize("affine", [True, False])
def test_a_map_of_one_value_trains(affine):
    norm = BatchRenorm2d(3, eps=1e-3, momentum=0.5, affine=affine)
    norm.r_max, norm.d_max = 3.0, 5.0
    x = torch.tensor([0.5, -1.0, 100.0]).reshape(1, 3, 1, 1).requires_grad_()
    out = norm(x)
    out.sum().backward()
    expected = torch.tensor([0.5 / math.sqrt(1.001), -1 / math.sqrt(1.001), 5.0])
    torch.testing.assert_close(out.flatten(), expected, rtol=1e-4, atol=1e-4)  # x / sqrt(eps) cancels out
    assert torch.equal(x.grad, torch.zeros_like(x))  # x - mean(x) is 0 whatever x is
    assert torch.equal(norm.running_var, torch.ones(3))
    torch.testing.assert_close(norm.running_mean, x.detach().flatten() * (1 - 0.5 ** (1 / IMAGES)))


def test_constant_channels_stay_finite():
    norm = layer(BatchRenorm2d)
    norm.r_max, norm.d_max = 3.0, 5.0
    x = torch.full((2, 6, 4, 4), 3.0, requires_grad=True)
    out = norm(x)
    out.square().sum().backward()
    assert all(torch.isfinite(value).all() for value in (out, x.grad, norm.weight.grad, norm.running_var))


def test_an_overflow_leaves_the_running_statistics_of_its_channel_alone():
    norm = layer(BatchRenorm2d)
    before = copy.deepcopy(norm.state_dict())
    x = images(2, 6, 4, 4)
    x[0, 2, 1, 1] = math.inf
    x[1, 4, 0, 0] = math.nan
    norm(x)
    for name in ("running_mean", "running_var"):
        kept = (norm.state_dict()[name] == before[name]).tolist()
        assert kept == [False, False, True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_fp32_for_half_precision_inputs(dtype):
    half, full = layer(BatchRenorm2d), layer(BatchRenorm2d)
    for norm in (half, full):
        norm.r_max, norm.d_max = 3.0, 5.0
    x = (20 + images(4, 6, 16, 16)).to(dtype)  # a mean that bf16 rounds to 1/8
    out, expected = half(x), full(x.float())
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=0.03)
    torch.testing.assert_close(half.running_mean, full.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half.running_var, full.running_var, rtol=1e-4, atol=1e-5)


def test_trains_under_autocast_to_bf16():
    block = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), layer(BatchRenorm2d))
    set_renorm_limits(block, 3.0, 5.0)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(images(2, 3, 8, 8))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    for parameter in block.parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()


def test_untrained_weights_pass_the_gradient_on():
    norm = layer(BatchRenorm2d).requires_grad_(False)
    x = images(2, 6, 4, 4).requires_grad_()
    norm(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert norm.weight.grad is None


def test_the_other_devices_statistics_are_the_same(monkeypatch):
    """Where BatchNorm's kernel does not exist (Apple's GPUs), var_mean stands in."""
    from detector.model import norm as module

    x = images(2, 6, 5, 4)

    class Elsewhere:
        """x, said to be on another device."""

        device = torch.device("mps")
        shape = x.shape
        numel, to = x.numel, x.to

    running = layer(BatchRenorm2d)
    arguments = running.running_mean, running.running_var, 0.1
    for a, b in zip(module._statistics(Elsewhere(), *arguments), module._statistics(x, *arguments), strict=True):
        torch.testing.assert_close(a, b)


# --- networks


@pytest.fixture
def network():
    """A small network whose statistics are away from their start."""
    built = build_network("v11n", nc=2)
    for index, module in enumerate(built.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.1 * images(module.num_features, seed=index))
            module.running_var.copy_((0.2 * images(module.num_features, seed=index + 1)).exp())
    return built


def norms(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def held(network: nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*network.parameters(), *network.buffers())]


@pytest.mark.parametrize(("kind", "device"), [("renorm", CPU), ("sync", CUDA)])
def test_exchanging_norms_keeps_the_tensors_the_names_and_the_modes(network, kind, device):
    plain = copy.deepcopy(network)
    network.model[0].eval()
    before, names = held(network), list(network.state_dict())
    set_norms(network, kind, device, world_size=2)
    expected = BatchRenorm2d if kind == "renorm" else nn.SyncBatchNorm
    assert {type(norm) for norm in norms(network)} == {expected}
    assert len(norms(network)) == len(norms(plain))
    assert held(network) == before
    assert list(network.state_dict()) == names
    assert [norm.training for norm in norms(network)] == [False] + [True] * (len(norms(plain)) - 1)
    assert {(norm.eps, norm.momentum) for norm in norms(network)} == {(1e-3, 0.03)}
    set_norms(network, kind, device, world_size=2)  # once more changes nothing
    assert held(network) == before

    plain.load_state_dict(network.state_dict(), strict=True)
    network.load_state_dict(plain.state_dict(), strict=True)
    x = images(1, 3, 64, 64)
    for run in (fused, lambda network: copy.deepcopy(network).eval()):
        assert torch.equal(run(network)(x).logits, run(plain)(x).logits)
    assert not norms(fused(network))


@pytest.mark.parametrize(("kind", "device", "world"), [("batch", CPU, 1), ("frozen", CPU, 2), ("sync", CUDA, 1)])
def test_other_kinds_leave_batch_norm(network, kind, device, world):
    before = [id(norm) for norm in norms(network)]
    set_norms(network, kind, device, world)
    assert [id(norm) for norm in norms(network)] == before


@pytest.mark.parametrize("world", [1, 2])
def test_sync_without_cuda_names_the_remedy(network, world):
    with pytest.raises(ConfigError, match=r"bn=sync: .*CUDA.* on cpu; set bn to batch"):
        set_norms(network, "sync", CPU, world)


def test_an_optimizer_built_before_trains_the_exchanged_layers():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    set_norms(network, "renorm", CPU, 1)
    network(images(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(network[1].weight, torch.ones(4))


def test_the_network_trains_on_one_image_whose_last_map_is_one_value(network):
    set_norms(network, "renorm", CPU, 1)
    set_renorm_limits(network, 2.0, 1.0)
    assert {(norm.r_max, norm.d_max) for norm in norms(network)} == {(2.0, 1.0)}
    predictions = network(images(1, 3, 32, 32))
    (predictions.logits.square().sum() + predictions.boxes.square().sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in network.parameters() if parameter.requires_grad)
    assert all(torch.isfinite(buffer).all() for buffer in network.buffers())


# --- the limits


@pytest.mark.parametrize(
    ("progress", "warmup", "limits"),
    [
        (0, 3, (1, 0)),
        (3, 3, (1, 0)),
        (9, 3, (1 + 2 * 2 / 7, 2.5)),
        (15, 3, (1 + 2 * 4 / 7, 5)),
        (24, 3, (3, 5)),
        (40, 3, (3, 5)),
        (0.5, 0, (1, 0)),
        (3, 0, (1 + 2 * 2 / 7, 2.5)),
        (8, 0.5, (3, 5)),
    ],
)
def test_limits_follow_the_papers_ramp_in_warmups(progress, warmup, limits):
    assert renorm_limits(progress, warmup) == pytest.approx(limits)


def test_limits_never_narrow():
    ramp = [renorm_limits(step / 10, 2.5) for step in range(400)]
    assert ramp == sorted(ramp)
    assert [d for _, d in ramp] == sorted(d for _, d in ramp)
