"""From config files, words of a command line and Python values to settings, each with its place.

Which settings there are is told by the class that is asked for; nothing here knows one of them by name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from detector.config import foreign
from detector.errors import ConfigError, did_you_mean
from detector.files import spelt_here
from detector.values import plain

AnySettings = TypeVar("AnySettings", bound=BaseModel)


class Origin(NamedTuple):
    """Where a setting was written, and the folder its relative path starts from."""

    place: str
    folder: Path


Given = tuple[str, Any, Origin]  # key, value, where it was written


def load_settings(
    cls: type[AnySettings],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> AnySettings:
    """Settings of the kind `cls` from a config file (or none), `key=value` words, whose values are YAML, and values
    from Python; what comes later wins.

    Raises ConfigError with the place for a missing file, bad YAML, an unknown key (with the nearest name), a wrong type
    and a value out of range.
    """
    found: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    names: dict[str, str] = {}
    for name, value, origin in [*_from_file(cls, file), *_from_overrides(cls, overrides), *_from_values(values or {})]:
        key = getattr(cls, "also", {}).get(name, name)
        if key not in cls.model_fields:
            raise ConfigError(f"{origin.place}: {unknown(cls, key)}")
        if names.setdefault(key, name) != name:
            raise ConfigError(f"{origin.place}: '{names[key]}' and '{name}' are the same setting; keep one")
        found[key], origins[key] = value, origin
    for key, origin in origins.items():
        found[key] = resolved(cls, key, found[key], origin.folder)
    return validated(cls, found, {key: origin.place for key, origin in origins.items()}, str(file or "settings"))


def validated(
    cls: type[AnySettings], values: dict[str, Any], places: dict[str, str], default_place: str
) -> AnySettings:
    """`cls(**values)`, with pydantic's complaints turned into one ConfigError that names each place."""
    try:
        return cls(**values)
    except ValidationError as error:
        complaints: dict[str, str] = {}
        for item in error.errors():
            key = str(item["loc"][0]) if item["loc"] else ""
            if not key:
                complaints[key] = f"{default_place}: {_reason(item)}"
            elif key not in cls.model_fields:
                complaints[key] = f"{default_place}: {unknown(cls, key)}"
            else:
                place, reason = places.get(key, default_place), _reason(item)
                before = complaints.get(key)
                if before is None:
                    complaints[key] = f"{place}: {key}={values[key]!r}: {reason}"
                elif not before.endswith(reason):
                    complaints[key] = f"{before} or {reason}"
        raise ConfigError("\n".join(complaints.values())) from None


def _reason(item: Any) -> str:
    return (
        item["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "should be")
        .replace("a valid integer", "an integer")
        .replace("a valid ", "a ")
    )


def unknown(cls: type[BaseModel], key: str) -> str:
    """What to say of a key that is no setting: the nearest name, or what users of other trainers mean by it."""
    name = key.lower().replace("-", "_")
    hint = did_you_mean(key, cls.model_fields)
    if name in cls.model_fields:
        pass
    elif foreign.CALLED.get(name) in cls.model_fields:
        hint = f" The setting here is {foreign.CALLED[name]!r}."
    elif name in foreign.ABSENT:
        hint = f" {foreign.ABSENT[name]}."
    return f"'{key}' is not a setting{getattr(cls, 'of', '')}.{hint}"


# --- files -----------------------------------------------------------------------------------------------------------


class Yaml(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, as in YAML 1.2."""


Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
NULL = "tag:yaml.org,2002:null"


def read_yaml(path: Path, kind: str) -> yaml.MappingNode:
    """The top-level mapping of a YAML file as a node (keys carry line numbers); ConfigError if it is not one."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=Yaml)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this {kind}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if node is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: a {kind} is a list of 'key: value' lines")
    return node


def _from_file(cls: type[BaseModel], file: Path | None) -> Iterator[Given]:
    if file is None:
        return
    seen: dict[str, int] = {}
    for key_node, value_node in read_yaml(file, "config file").value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(f"{file}:{line}: '{key}' is set twice, first in line {seen[key]}; keep one")
        seen[key] = line
        try:
            value = _value(value_node, takes_text(cls, key))
        except yaml.YAMLError as error:
            raise ConfigError(f"{file}:{line}: {key}: {' '.join(str(error).split())}") from None
        yield key, value, Origin(f"{file}:{line}", file.resolve().parent)


# --- words and values ------------------------------------------------------------------------------------------------


def _from_overrides(cls: type[BaseModel], overrides: Sequence[str]) -> Iterator[Given]:
    origin = Origin("command line", Path.cwd())
    for word in overrides:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals:
            raise ConfigError(f"'{word}': an override is written key=value, for example epochs=50")
        text_only = takes_text(cls, key)
        try:
            node = yaml.compose(text if text_only and text[:1] not in "[{" else _readable(text), Loader=Yaml)
            if node is None:
                raise ConfigError(f"{word}: there is no value; give one, or leave the setting out")
            yield key, _value(node, text_only), origin
        except yaml.YAMLError as error:
            if not text_only:
                raise ConfigError(f"{word}: the value is not YAML: {' '.join(str(error).split())}") from None
            yield key, text, origin  # *.jpg, or a name that this locale cannot decode


def _readable(text: str) -> str:
    """A word of the command line that came in UTF-8 into a program of another locale; others as they are."""
    try:
        return text.encode("ascii", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return text


def _from_values(values: Mapping[str, Any]) -> Iterator[Given]:
    origin = Origin("argument", Path.cwd())
    for key, value in values.items():
        try:
            yield str(key), plain(value), origin
        except ConfigError as error:
            raise ConfigError(f"{origin.place}: {key}={error}") from None


def _value(node: yaml.Node, text_only: bool) -> Any:
    """What a node says; with `text_only` numbers, dates, no and off are the text that they were written as."""
    loader = Yaml("")
    try:
        value = loader.construct_object(node, deep=True)  # raises for tags that are not YAML's own
    finally:
        loader.dispose()
    if not text_only or value is None:
        return value
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode):
        return [_text(one) for one in node.value]
    return {key: _text(one) for key, (_, one) in zip(value, node.value, strict=False)}


def _text(node: yaml.Node) -> Any:
    return node.value if isinstance(node, yaml.ScalarNode) and node.tag != NULL else _value(node, text_only=False)


# --- what a setting takes --------------------------------------------------------------------------------------------


def _kinds(annotation: Any) -> set[type]:
    """The types that values of an annotation are made of, inside unions, lists and choices of words too."""
    if get_origin(annotation) is Literal:
        return {type(option) for option in get_args(annotation)}
    if get_origin(annotation) is not None or get_args(annotation):
        parts = get_args(annotation)
        parts = parts[:1] if hasattr(annotation, "__metadata__") else parts
        return set().union(*map(_kinds, parts))
    return {annotation}


def takes(cls: type[BaseModel], key: str, kind: type) -> bool:
    """Whether there are values of a setting that are of this type."""
    return kind in _kinds(cls.model_fields[key].annotation)


def takes_text(cls: type[BaseModel], key: str) -> bool:
    """Whether all values of a setting are text, so that 5, 1e3 and off are to be taken as they stand."""
    field = cls.model_fields.get(key)
    return field is not None and _kinds(field.annotation) <= {str, Path, NoneType}


def resolved(cls: type[BaseModel], key: str, value: Any, folder: Path) -> Any:
    """A value as it was written in a folder: paths made absolute, and what the class itself makes of a text that may
    be one (its `located`)."""
    if not isinstance(value, str):
        return value
    if Path in _kinds(cls.model_fields[key].annotation):
        return absolute(value, folder)
    located = getattr(cls, "located", {}).get(key)
    return located(value, folder) if located else value


def absolute(text: str, folder: Path) -> Path:
    """The path that a text means in a folder."""
    return (folder / Path(spelt_here(text)).expanduser()).resolve()
