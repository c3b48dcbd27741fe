"""Values as Python programs hold them, as plain ones: what a config file could have said. No torch, no numpy."""

import os
import sys
from collections.abc import KeysView, Mapping, Sequence, ValuesView
from enum import Enum
from numbers import Integral, Real
from typing import Any

from detector.errors import ConfigError

MOST = 100_000  # values in an array that may still be a setting


def nearest_multiple(side: int, step: int) -> int:
    """The multiple of `step` that is nearest to a side, at least one step."""
    return max(round(side / step), 1) * step


def plain(value: Any) -> Any:
    """None, bool, int, float, str, or a list or dict of them, that says the same as `value`.

    Numbers of numpy and torch, arrays, paths, enumerations, torch's devices and dtypes, tuples and other sequences are
    understood. Raises ConfigError for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):  # also of a class of its own, such as numpy's
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence | KeysView | ValuesView) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(one) for one in value]
    return _of_arrays(value)


def _of_arrays(value: Any) -> Any:
    """`plain` of what numpy and torch have: an array, a number, a device or a dtype."""
    torch = sys.modules.get("torch")  # whoever has a value of it has imported it
    if torch is not None and isinstance(value, torch.device | torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        size = 1
        for side in value.shape:
            size *= int(side)
        if size <= MOST:
            return plain(value.tolist())
    raise ConfigError(
        f"{_shown(value)}: a {type(value).__name__} is no value of a setting; "
        "give a number, a text, a path, true or false, or a list or dict of them"
    )


def _shown(value: object, most: int = 60) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}..."
