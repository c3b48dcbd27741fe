"""Networks out of checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detector import checkpoint_file
from detector.classes import order_of
from detector.errors import CheckpointError, ConfigError
from detector.model.network import Network, network_from_description


def network_of(saved: dict[str, Any], path: Path) -> Network:
    """The averaged network (`ema`) of a checkpoint. CheckpointError where it is not whole."""
    try:
        network = network_from_description(saved["description"], seed=None)
        network.load_state_dict(finite(saved["ema"], path))
    except KeyError as error:
        raise CheckpointError(f"{path}: holds no {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{path}: its weights do not fit its description: {error}") from None
    return network.eval()


def finite(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The weights, all of which are numbers. Raises CheckpointError with the name of one that is not."""
    if name := checkpoint_file.not_finite(weights):
        raise CheckpointError(
            f"{path}: '{name}' holds values that are not finite, with which nothing can be found or learned; "
            "take an earlier checkpoint"
        )
    return weights


def start_from(network: Network, path: Path, names: Sequence[str]) -> str:
    """Start `network`, of the classes `names`, from a checkpoint's averaged weights; returns a line that says how.

    Classes are told by their names: those of the checkpoint in another order are put in this one, and with other
    classes the head's class layers stay fresh. Raises ConfigError for another architecture.
    """
    path = checkpoint_file.weights_in(path)
    saved = checkpoint_file.read(path)
    theirs, ours = finite(saved.get("ema", {}), path), network.state_dict()
    order = order_of(names, saved.get("names", ()))
    outputs = {f"{name}." for name, module in network.named_modules() if module in network.head.class_outputs}
    fits = {
        key: value
        for key, value in theirs.items()
        if key in ours and ours[key].shape == value.shape and (order is not None or not key.startswith(tuple(outputs)))
    }
    fresh = sorted(ours.keys() - fits.keys())
    class_branches = tuple(f"model.{len(network.model) - 1}.{name}." for name in network.head.class_branches)
    foreign = [key for key in fresh if order is not None or not key.startswith(class_branches)]
    if foreign or theirs.keys() - ours.keys():
        stray = (foreign or sorted(theirs.keys() - ours.keys()))[0]
        raise ConfigError(
            f"weights={path}: of another architecture: '{stray}' does not fit. "
            "Set 'model' to the model these weights were trained with"
        )
    network.load_state_dict(fits, strict=False)
    note = ""
    if order is None:
        note = f"; fresh for {network.nc} other classes: {len(fresh)} class tensors (names= where they are the same)"
    elif order != sorted(order):
        put_in_order(network, order)
        note = "; its classes in the data set's order"
    return f"weights of {path.name}: {len(fits)} of {len(ours)} tensors{note}"


@torch.no_grad()
def put_in_order(network: Network, order: Sequence[int]) -> None:
    """Give class i of a network what its class order[i] was."""
    for layer in network.head.class_outputs:
        layer.weight.copy_(layer.weight[list(order)])
        layer.bias.copy_(layer.bias[list(order)])
