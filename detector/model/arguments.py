"""The arguments of a layer in a model description: their words read, and checked against the parameters of its module.

What a module takes stands in the signature of what builds it, so there is no second list of it.
"""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin

from detector.errors import ConfigError

WORDS = {"None": None, "True": True, "False": False}


def read_arguments(
    place: str, module: str, build: Callable[..., object], hidden: Sequence[str], arguments: list[Any], nc: int
) -> list[Any]:
    """A layer's arguments as values for the parameters of `build`, without those named in `hidden`.

    Texts that are `nc`, None, True, False or numbers are read as such, lists become tuples. Raises ConfigError where
    there are too many or too few, or one has not the type of its parameter.
    """
    parameters = [one for name, one in inspect.signature(build).parameters.items() if name not in hidden]
    values = [_value(one, nc) for one in arguments]
    wanted = ", ".join(_shown(one) for one in parameters)
    needed = sum(one.default is one.empty for one in parameters)
    if not needed <= len(values) <= len(parameters):
        raise ConfigError(f"{place}: {module} takes ({wanted}), not the {len(values)} arguments {arguments}")
    for value, parameter in zip(values, parameters, strict=False):
        if not _fits(value, parameter.annotation):
            raise ConfigError(f"{place}: {module} takes ({wanted}): {parameter.name} cannot be {value!r}")
    return [_tuples(value) for value in values]


def _value(written: Any, nc: int) -> Any:
    if not isinstance(written, str):
        return written
    if written == "nc":
        return nc
    if written in WORDS:
        return WORDS[written]
    for number in (int, float):
        try:
            return number(written)
        except ValueError:
            continue
    return written


def _shown(parameter: inspect.Parameter) -> str:
    """A parameter as a message shows it: its name, the kind of value, and what it is if left out."""
    kind = parameter.annotation
    name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "").replace("collections.abc.", "")
    default = "" if parameter.default is parameter.empty else f" = {parameter.default}"
    return f"{parameter.name}: {name}{default}" if kind is not None else f"{parameter.name}=None"


def _fits(value: object, kind: Any) -> bool:
    """Whether a value can be an argument of that type. Numbers are sizes and above 0, but where None is one, too."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        free = types.NoneType in kinds and int in kinds and isinstance(value, int) and not isinstance(value, bool)
        return free or any(_fits(value, one) for one in kinds)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is list:
        return isinstance(value, list) and all(isinstance(one, kinds[0]) and one >= 0 for one in value)
    if origin is Sequence:
        return isinstance(value, list) and bool(value) and all(_fits(one, kinds[0]) for one in value)
    if kind in (None, types.NoneType):
        return value is None
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and value > 0
    return isinstance(value, kind) and (not isinstance(value, int) or value > 0)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
