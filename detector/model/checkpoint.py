"""Networks out of checkpoints."""

from pathlib import Path
from typing import Any

from detector import checkpoint_file
from detector.errors import CheckpointError, ConfigError
from detector.model.network import Network, network_from_description


def network_of(saved: dict[str, Any], path: Path) -> Network:
    """The averaged network (`ema`) of a checkpoint."""
    try:
        network = network_from_description(saved["description"])
        network.load_state_dict(saved["ema"])
    except KeyError as error:
        raise CheckpointError(f"{path}: holds no {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{path}: its weights do not fit its description: {error}") from None
    return network.eval()


def start_from(network: Network, path: Path) -> str:
    """Start `network` from a checkpoint's averaged weights, or a run's best; returns a line that says what was taken.

    With another number of classes the head's class layers stay fresh. Raises ConfigError for another architecture.
    """
    path = checkpoint_file.weights_in(path)
    saved = checkpoint_file.read(path)
    theirs, ours = saved.get("ema", {}), network.state_dict()
    class_branch = f"model.{len(network.model) - 1}.cv3."
    same_classes = saved.get("description", {}).get("nc") == network.nc
    fits = {key: value for key, value in theirs.items() if key in ours and ours[key].shape == value.shape}
    fresh = sorted(ours.keys() - fits.keys())
    foreign = [key for key in fresh if same_classes or not key.startswith(class_branch)]
    if foreign or theirs.keys() - ours.keys():
        stray = (foreign or sorted(theirs.keys() - ours.keys()))[0]
        raise ConfigError(
            f"weights={path}: of another architecture: '{stray}' does not fit. "
            "Set 'model' to the model these weights were trained with"
        )
    network.load_state_dict(fits, strict=False)
    note = f"; fresh for {network.nc} classes: {len(fresh)} class tensors" if fresh else ""
    return f"weights of {path.name}: {len(fits)} of {len(ours)} tensors{note}"
