"""Networks out of checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detector import checkpoint_file
from detector.classes import matches
from detector.errors import CheckpointError, ConfigError
from detector.model.description import for_images, load_description
from detector.model.network import Network, network_from_description
from detector.model.sameness import adopted, difference

DEFAULT = "v11n"  # the model where none is named
SHOWN = 10  # classes that are named where some start fresh


def network_of(saved: dict[str, Any], path: Path) -> Network:
    """The averaged network (`ema`) of a checkpoint. CheckpointError where it is not whole."""
    try:
        network = network_from_description(saved["description"], seed=None)
        check_public(network, saved, path)
        network.load_state_dict(finite(saved["ema"], path))
    except KeyError as error:
        raise CheckpointError(f"{path}: holds no {error}") from None
    except ConfigError as error:
        raise CheckpointError(f"{path}: its network cannot be built here: {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{path}: its weights do not fit its description: {error}") from None
    return network.eval()


def check_public(network: Network, saved: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError where the network of a public checkpoint is not what was built from its layer list.

    That is what no tensor tells: which convolutions an activation follows, and the strides.
    """
    modules = dict(network.named_modules())
    for name, kind in saved.get("activations", {}).items():
        ours = getattr(modules.get(name), "activation", kind)
        if (ours is None) != (kind == "Identity"):
            raise CheckpointError(
                f"{path}: '{name}' is followed by {kind}, and by {'nothing' if ours is None else 'an activation'} in "
                "what its layer list describes: a network that was altered is not read"
            )
    if (strides := tuple(saved.get("strides", ()))) and strides != network.head.strides:
        raise CheckpointError(f"{path}: has the strides {strides}, and its layer list {network.head.strides}")


def finite(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The weights, all of which are numbers. Raises CheckpointError with the name of one that is not."""
    if name := checkpoint_file.not_finite(weights):
        raise CheckpointError(
            f"{path}: '{name}' holds values that are not finite, with which nothing can be found or learned; "
            "take an earlier checkpoint"
        )
    return weights


def chosen_description(model: str, weights: Path | None) -> dict[str, Any]:
    """The description of a model by its name or file; `auto`: that of the weights, or v11n. Raises ConfigError."""
    if model != "auto":
        return load_description(model)
    if weights is None:
        return load_description(DEFAULT)
    return dict(checkpoint_file.read(checkpoint_file.weights_in(weights))["description"])


def started(description: dict[str, Any], path: Path, names: Sequence[str], seed: int = 0) -> tuple[Network, str]:
    """A network of that description, for the classes `names`, that starts from a checkpoint's averaged weights.

    With it comes a line that says what was taken. Classes go by their names: the checkpoint's in another order are put
    in this one, and those that it has not start fresh. What differs in no tensor between networks of one description is
    as in the checkpoint. Raises ConfigError for another architecture.
    """
    path = checkpoint_file.weights_in(path)
    saved = checkpoint_file.read(path)
    theirs, taken = with_channels(network_of(saved, path), description.get("channels", 3), path, seed)
    description, notes = adopted({**description, "nc": len(names)}, theirs)
    network = network_from_description(description, seed)
    if problem := difference(network, theirs):
        raise ConfigError(
            f"weights={path}: of another architecture: {problem}. "
            "Set 'model' to the model these weights were trained with"
        )
    network.load_state_dict(_shared(network, theirs), strict=False)
    order = matches(names, saved.get("names", ()))
    take_classes(network, theirs, order)
    return network, "; ".join([f"weights of {path.name}: {_told(network, theirs, names, order)}", *taken, *notes])


@torch.no_grad()
def with_channels(network: Network, channels: int, path: Path, seed: int) -> tuple[Network, list[str]]:
    """The network for images of so many channels; and what was taken of what reads them, in words.

    What it has for the channels that both have is taken, and the others start fresh; one channel gets the sum, which
    sees a grey image as the network did. Raises ConfigError where that cannot be done.
    """
    if channels == network.channels:
        return network, []
    other = network_from_description(for_images(network.description, channels, network.value_range), seed).eval()
    place = f"weights={path}: of a network for {network.channels} channels, not {channels}"
    before = network.state_dict()
    groups = [[m.groups for m in one.modules() if isinstance(m, nn.Conv2d)] for one in (network, other)]
    for key, now in other.state_dict().items():
        was = before[key]
        if was.shape == now.shape:
            now.copy_(was)
            continue
        if was.ndim != 4 or now.shape[1] * network.channels != was.shape[1] * channels or groups[0] != groups[1]:
            raise ConfigError(f"{place}, and its '{key}' cannot be changed to that; train without weights=")
        copies = was.shape[1] // network.channels  # of the image, which Focus reads four of, shifted
        source, target = was.unflatten(1, (copies, -1)), now.unflatten(1, (copies, -1))
        common = min(channels, network.channels)
        target[:, :, :common] = source.sum(dim=2, keepdim=True) if channels == 1 else source[:, :, :common]
    taken = "the sum of them all" if channels == 1 else f"the first {min(channels, network.channels)}"
    return other, [f"its first layer for {channels} channels: {taken} of {network.channels}"]


def _shared(network: Network, other: Network) -> dict[str, Tensor]:
    """The other network's tensors but those of the layers whose outputs are the classes."""
    outputs = tuple(f"{name}." for name, module in network.named_modules() if module in network.head.class_outputs)
    return {key: value for key, value in other.state_dict().items() if not key.startswith(outputs)}


@torch.no_grad()
def take_classes(network: Network, other: Network, order: Sequence[int | None]) -> None:
    """Make class i of a network what class order[i] of the other is; None: it stays as it is."""
    ours = [i for i, number in enumerate(order) if number is not None]
    theirs = [number for number in order if number is not None]
    for layer, source in zip(network.head.class_outputs, other.head.class_outputs, strict=True):
        layer.weight[ours] = source.weight[theirs]
        layer.bias[ours] = source.bias[theirs]


def _told(network: Network, other: Network, names: Sequence[str], order: Sequence[int | None]) -> str:
    """What was taken, and what was not."""
    fresh = [name for name, number in zip(names, order, strict=True) if number is None]
    every = len(network.state_dict())
    last = 2 * len(network.head.class_outputs)  # their weights and biases
    if not fresh and list(order) == list(range(other.nc)):
        return f"{every} of {every} tensors"
    if not fresh and len(order) == other.nc:
        return f"{every} of {every} tensors; its classes in the data set's order"
    if not fresh:
        return f"{every} of {every} tensors; {len(order)} of its {other.nc} classes, by their names"
    if len(fresh) == len(order):
        note = f"fresh for {len(order)} other classes: {last} class tensors"
    else:
        shown = ", ".join(fresh[:SHOWN]) + (f" and {len(fresh) - SHOWN} more" if len(fresh) > SHOWN else "")
        note = f"{len(order) - len(fresh)} of {len(order)} classes by their names, and fresh: {shown}"
    return f"{every - last} of {every} tensors; {note} (names= where they are the same)"
