"""Reads a data-set description: a YAML file in the form that YOLO users know.

path: shapes            # optional, relative to this file
train: images/train     # a folder, a text file that lists images, or a list of those
val: images/val
names: {0: circle, 1: square}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from detector.errors import ConfigError, DataError
from detector.files import spelt_here

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class DataDescription:
    """What a data set consists of; nothing of it has been looked for on disk yet.

    `splits` holds absolute folders of images and text files that list images; `generate` holds the parameters of a data
    set that the project draws itself.
    """

    path: Path
    root: Path
    splits: dict[str, list[Path]]
    names: tuple[str, ...]
    generate: dict[str, Any] | None

    def named(self, names: Sequence[str] | None) -> "DataDescription":
        """The same with other names for its classes, in their order; None: with its own. Raises ConfigError."""
        if names is None:
            return self
        if len(names) != len(self.names):
            raise ConfigError(f"names={list(names)}: {self.path} has {len(self.names)} classes; name each of them")
        return replace(self, names=tuple(names))


def load_description(path: str | Path) -> DataDescription:
    """The description in a YAML file. Keys that mean nothing here (`download`, ...) are ignored, never executed.

    Raises DataError when the file cannot be read or lacks train, val or names, or when they contradict each other.
    """
    path = Path(path).absolute()
    content = _read_yaml(path)
    base = content.get("path")
    if base is not None and not isinstance(base, str):
        raise DataError(f"{path}: path is {base!r}, expected a folder, relative to this file")
    root = (path.parent / Path(spelt_here(base or "")).expanduser()).resolve()
    splits = {}
    for split in SPLITS:
        if content.get(split) is None:
            continue
        splits[split] = [_located(root, entry) for entry in _entries(path, split, content[split])]
    for split in ("train", "val"):
        if split not in splits:
            raise DataError(
                f"{path}: '{split}' is missing; give a folder of images or a text file that lists them, "
                f"for example `{split}: images/{split}`"
            )
    generate = content.get("generate")
    if generate is not None and not isinstance(generate, Mapping):
        raise DataError(f"{path}: generate is {generate!r}, expected parameters such as `{{scenes: shapes, seed: 0}}`")
    return DataDescription(path, root, splits, _names(path, content), None if generate is None else dict(generate))


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the path of a data-set description (a YAML file)") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); give a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: is not valid YAML ({reason}); mend the line it names") from None
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: holds {type(content).__name__}, expected keys such as train, val and names")
    return content


def _entries(path: Path, split: str, value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        if not isinstance(entry, str) or not entry.strip():
            raise DataError(
                f"{path}: {split} holds {entry!r}, expected a folder of images, a text file that lists images, "
                "or a list of those"
            )
    if not entries:
        raise DataError(f"{path}: {split} is an empty list; name at least one folder or text file")
    return entries


def _located(root: Path, entry: str) -> Path:
    return root / Path(spelt_here(entry.strip())).expanduser()


def _names(path: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    names, count = content.get("names"), content.get("nc")
    if names is None:
        raise DataError(f"{path}: 'names' is missing; name the classes, for example `names: {{0: cat, 1: dog}}`")
    if isinstance(names, Mapping):
        names = _ordered(path, names)
    if not isinstance(names, list) or not names:
        raise DataError(f"{path}: names is {names!r}, expected a map {{0: cat, 1: dog}} or a list [cat, dog]")
    for number, name in enumerate(names):
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise DataError(f"{path}: names: class {number} is {name!r}, expected text; put quotes around the name")
    if count is not None and count != len(names):
        raise DataError(f"{path}: nc is {count!r} but names has {len(names)} classes; leave nc out or make them agree")
    return tuple(str(name) for name in names)


def _ordered(path: Path, names: Mapping[Any, Any]) -> list[Any]:
    """The names of a map {0: a, 1: b}, in the order of its keys, which must be 0..n-1."""
    by_number = {}
    for key, name in names.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        if isinstance(number, bool) or not isinstance(number, int) or number in by_number:
            raise DataError(f"{path}: names has the key {key!r}; number the classes 0 to {len(names) - 1}, each once")
        by_number[number] = name
    gap = next((number for number in range(len(names)) if number not in by_number), None)
    if gap is not None:
        raise DataError(
            f"{path}: names has {len(names)} classes but none with the number {gap}; "
            f"number them 0 to {len(names) - 1} without gaps"
        )
    return [by_number[number] for number in range(len(names))]
