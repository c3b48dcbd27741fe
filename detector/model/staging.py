"""Where a network is cut into stages that run on different devices."""

from collections.abc import Sequence
from functools import cache
from typing import Literal

from detector.errors import ConfigError
from detector.model.cost import LayerCost

Wanted = int | list[int] | Literal["auto", "off"]  # as the setting `pipeline` says it


def stage_count(wanted: Wanted, devices: int) -> int:
    """How many stages there are; auto: one for each device."""
    if isinstance(wanted, list):
        return len(wanted) + 1
    return {"off": 1, "auto": devices}.get(wanted, wanted)


def first_layers(wanted: Wanted, stages: int, costs: Sequence[LayerCost]) -> list[int]:
    """The first layer of each stage, from 0: as listed, or so that the arithmetic is spread evenly.

    ConfigError where there is no such layer.
    """
    layers = len(costs)
    if stages > layers:
        raise ConfigError(f"pipeline={wanted}: {stages} stages, and this model has {layers} layers; name fewer")
    if not isinstance(wanted, list):
        return balanced([one.operations for one in costs], stages)
    starts = [0, *wanted]
    if any(after <= before for before, after in zip(starts, wanted, strict=False)) or starts[-1] >= layers:
        raise ConfigError(
            f"pipeline={wanted}: names the first layers of the second stage and later ones, in order and each once; "
            f"in this model they can be 1 to {layers - 1}"
        )
    return starts


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """The first of each of so many consecutive parts, of which the costliest costs the least; none is empty."""

    @cache
    def best(start: int, parts: int) -> tuple[float, list[int]]:
        """The costliest part of the costs from `start` on, and where the parts begin."""
        if parts == 1:
            return sum(costs[start:]), [start]
        found = []
        for stop in range(start + 1, len(costs) - parts + 2):
            rest, starts = best(stop, parts - 1)
            found.append((max(sum(costs[start:stop]), rest), [start, *starts]))
        return min(found)

    return best(0, stages)[1]


def told(starts: Sequence[int], costs: Sequence[LayerCost]) -> str:
    """The stages in words, each with its layers and with its share of the arithmetic and of the activations."""

    def share(what: str, start: int, stop: int) -> str:
        return f"{sum(getattr(one, what) for one in costs[start:stop]) / sum(getattr(one, what) for one in costs):.0%}"

    parts = []
    for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True):
        operations, kept = share("operations", start, stop), share("kept", start, stop)
        shares = f"{operations}, {kept}" if start else f"{operations} of the arithmetic, {kept} of the activations"
        parts.append(f"{start}{f' to {stop - 1}' if stop > start + 1 else ''} ({shares})")
    return f"layers {', '.join(parts)}"
