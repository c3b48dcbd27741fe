"""Optimizers that import no compiler are torch's own otherwise."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from detector.step import eager


def trained(build, network, steps, saved=None):
    """A network after some steps of gradients of its own, and the optimizer's state."""
    optimizer = build(network.parameters())
    if saved is not None:
        optimizer.load_state_dict(saved)
    rng = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        assert all(one.grad is None for one in network.parameters())
        network(torch.randn(3, 5, generator=rng)).square().sum().backward()
        optimizer.step()
    assert all(not one.requires_grad for state in optimizer.state.values() for one in state.values() if one is not None)
    return network, optimizer.state_dict()


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}), ("AdamW", {"betas": (0.8, 0.99)})],
)
def test_steps_and_states_are_those_of_torch_to_the_bit(name, options):
    start = nn.Linear(5, 2)
    ways = [partial(getattr(owner, name), lr=0.1, **options) for owner in (eager, torch.optim)]
    halves = [trained(build, copy.deepcopy(start), 3) for build in ways]
    # each goes on with the state of the other
    ends = [trained(build, half[0], 2, other[1]) for build, half, other in zip(ways, halves, halves[::-1], strict=True)]
    for mine, theirs in (halves, ends):
        assert all(torch.equal(*pair) for pair in zip(mine[0].parameters(), theirs[0].parameters(), strict=True))
        assert mine[1].keys() == theirs[1].keys()
        assert not torch.equal(start.weight, mine[0].weight)


def test_hooks_on_a_step_are_called():
    optimizer, called = eager.SGD([nn.Parameter(torch.ones(2))], lr=0.1), []
    optimizer.register_step_post_hook(lambda *given: called.append(1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.step()
    assert called == [1]
    assert len(optimizer.param_groups) == 2
