"""Which parameters of a network stay as they are."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from detector.errors import ConfigError
from detector.model.network import Network


def freeze(network: Network, what: int | Sequence[int | str]) -> None:
    """Stop training the first `what` layers, or those that are listed.

    An entry of the list is a layer's number or a part of the network by its name without `model.`: `23.cv2`, `*.bn`.
    Norm layers whose parameters are all frozen keep their statistics, too (`set_modes`). ConfigError where the model
    has no such part, or where nothing would be left to train in a branch of the loss.
    """
    listed = list(range(what)) if isinstance(what, int) else list(what)
    count = len(network.model)
    names = [name for name, _ in network.named_parameters()]
    chosen: set[str] = set()
    for entry in listed:
        if isinstance(entry, int) and not 0 <= entry < count - 1:
            raise ConfigError(
                f"freeze={what}: this model has layers 0 to {count - 1}, and the last, the head, must train; parts of "
                f"it are frozen by name, as in freeze=['{count - 1}.cv2']"
            )
        pattern = str(entry).removeprefix("model.")
        found = {name for name in names if _is_part(name.removeprefix("model."), pattern)}
        if not found and not isinstance(entry, int):
            raise ConfigError(
                f"freeze: '{entry}' is no part of this model; parts are layers ('10'), members ('10.cv1') and patterns "
                "('*.bn'), by the names in a checkpoint without their 'model.'"
            )
        chosen |= found
    for name, parameter in network.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    if not all(network.branches()):
        raise ConfigError(f"freeze={what}: nothing is left to train in one of the loss's branches; freeze less")


def _is_part(name: str, pattern: str) -> bool:
    """Whether a parameter's name is, or lies below, what a pattern names."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
