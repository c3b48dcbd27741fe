"""Exchanging the norm layers of a network."""

import copy

import pytest
import torch
from torch import Tensor, nn

from detector.errors import ConfigError
from detector.model.network import build_network, fused
from detector.model.norm import set_norms

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def test_exchanging_norms_keeps_the_tensors_the_names_and_the_modes(network):
    plain = copy.deepcopy(network)
    network.model[0].eval()
    before, names = held(network), list(network.state_dict())
    set_norms(network, "sync", CUDA, world_size=2)
    assert {type(norm) for norm in norms(network)} == {nn.SyncBatchNorm}
    assert len(norms(network)) == len(norms(plain))
    assert held(network) == before
    assert list(network.state_dict()) == names
    assert [norm.training for norm in norms(network)] == [False] + [True] * (len(norms(plain)) - 1)
    assert {(norm.eps, norm.momentum) for norm in norms(network)} == {(1e-3, 0.03)}
    set_norms(network, "sync", CUDA, world_size=2)  # once more changes nothing
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
