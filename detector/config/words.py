"""What the words of a command line mean that are no `key=value`: files, told apart by what is in them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from yaml import MappingNode

from detector.config.kinds import model_named
from detector.config.settings import Settings, read_yaml
from detector.errors import ConfigError, did_you_mean

SUFFIXES = (".yaml", ".yml")
SPLITS = ("train", "val", "test")
NAMED = re.compile(r"v\d+[a-z](u|-p\d)?")  # a model that comes with the project


@dataclass(frozen=True)
class Said:
    """A command line in its parts."""

    file: Path | None = None  # the config file
    overrides: tuple[str, ...] = ()  # key=value
    values: dict[str, Any] = field(default_factory=dict)  # settings that a word was taken for
    notes: tuple[str, ...] = ()  # what it was taken for, to tell the user


def of_run(words: Sequence[str | Path], others: Iterable[str] = ()) -> Said:
    """The words of `train` and `tune`: a config file, settings, and in place of `data=` and `model=` the file itself.

    others: settings that are given beside the words. Raises ConfigError for a word that is none of them, and for a
    checkpoint or a run's folder, which may be meant to be started from or to be gone on with.
    """
    overrides = tuple(word for word in words if isinstance(word, str) and "=" in word and not Path(word).is_file())
    written = {*others, *(override.partition("=")[0].strip() for override in overrides)}
    file: Path | None = None
    values: dict[str, Any] = {}
    notes: list[str] = []
    for word in (word for word in words if word not in overrides):
        key, value = meaning(word)
        if key is None:
            if file is not None:
                raise ConfigError(f"{word}: a second config file, after {file}; name one, and settings as key=value")
            file = Path(word)
            continue
        if key in values or key in written:
            raise ConfigError(f"{word}: stands for {key}={word}, but {key} is set already; keep one")
        values[key] = value
        notes.append(f"taken as  {key}={str(value).lower() if value is True else value}")
    return Said(file, overrides, values, tuple(notes))


def meaning(word: str | Path) -> tuple[str | None, Any]:
    """(key, value) of the setting that a word stands for; (None, word) for a config file."""
    path = Path(word)
    if str(word) == "resume" and not path.exists():
        return "resume", True
    if path.is_dir():
        raise ConfigError(f"{word}: a folder; resume={word} goes on with the run in it")
    if path.suffix.lower() == ".pt":
        raise ConfigError(f"{word}: a checkpoint; weights={word} starts from it, resume={word} goes on with its run")
    if model_named(str(word), Path()) != str(word) and path.suffix == "":
        return "model", str(word)
    if path.suffix.lower() not in SUFFIXES and not path.exists():
        hint = did_you_mean(word, Settings.model_fields)
        raise ConfigError(f"'{word}': neither a file nor a setting, which is written key=value: epochs=50.{hint}")
    return kind_of(path), str(word)


def model_in(word: str) -> str | None:
    """The model that a word names, v26n or a model's YAML file; None: it names something else."""
    path = Path(word)
    if "=" in word or path.suffix.lower() not in ("", *SUFFIXES) or (path.exists() and not path.is_file()):
        return None
    if path.is_file():
        return word if kind_of(path) == "model" else None
    named = model_named(word, Path())
    return named if named != word or NAMED.fullmatch(word) else None


def kind_of(file: Path) -> str | None:
    """`data` for a data set's YAML file, `model` for a model's, None for a config file and for what is not there."""
    try:
        keys = {str(key.value) for key, _ in read_yaml(file, "config file").value}
    except ConfigError:
        return None  # reading it for its settings will say why
    if keys >= {"backbone", "head"}:
        return "model"
    if keys & (Settings.model_fields.keys() - {"names", "val"}):  # which a data set has, too
        return None
    if keys >= {"train", "names"} or keys >= {"val", "names"} or keys >= {"train", "val"}:
        return "data"
    return None


def of_search(words: Sequence[str]) -> Said:
    """The words of `search`: those of a run, and the YAML file of what is varied, which comes last."""
    loose = [word for word in words if "=" not in word or Path(word).is_file()]
    if named([word for word in words if word not in loose], ("space", "resume")) or not loose:
        return of_run(words)
    if len(loose) == 1 and not is_space(Path(loose[0])):
        return of_run(words)
    said = of_run([word for word in words if word != loose[-1]])
    return replace(said, values={**said.values, "space": loose[-1]})


def is_space(file: Path) -> bool:
    """Whether a YAML file gives a setting a range or choices."""
    try:
        nodes = [value for _, value in read_yaml(file, "search space").value if isinstance(value, MappingNode)]
    except ConfigError:
        return False
    return any({str(key.value) for key, _ in node.value} & {"low", "high", "choices"} for node in nodes)


def of_checkpoint(words: Sequence[str], sources: bool = False) -> Said:
    """The words of commands that use a checkpoint, which comes first unless `weights=` or `model=` names it.

    What follows is, with `sources`, what to look at, else a data set's YAML file.
    """
    loose = [word for word in words if "=" not in word or (sources and Path(word).exists())]
    overrides = tuple(word for word in words if word not in loose)
    values: dict[str, Any] = {}
    if loose and not named(overrides, ("weights", "model")):
        values["weights"] = loose.pop(0)
    if loose and sources:
        values["source"] = loose
    elif loose:
        if len(loose) > 1 or kind_of(Path(loose[0])) != "data" or named(overrides, ("data",)):
            raise ConfigError(f"'{loose[-1]}': a setting is written key=value, for example batch=8")
        values["data"] = loose[0]
    return Said(None, overrides, values)


def of_conversion(words: Sequence[str], keys: Sequence[str] = ("weights", "to")) -> Said:
    """The words of `convert`: what is read and what is to be written, in this order unless their keys name them."""
    loose = [word for word in words if "=" not in word]
    overrides = tuple(word for word in words if "=" in word)
    values: dict[str, Any] = {}
    for key in keys:
        if loose and not named(overrides, ("weights", "model") if key == "weights" else (key,)):
            values[key] = loose.pop(0)
    if loose:
        raise ConfigError(f"'{loose[-1]}': a setting is written key=value, for example exist_ok=true")
    return Said(None, overrides, values)


def of_check(words: Sequence[str]) -> Said:
    """The words of `check`: a data set's YAML file, and the splits to look at."""
    loose = [word for word in words if "=" not in word or Path(word).is_file()]
    overrides = tuple(word for word in words if word not in loose)
    values: dict[str, Any] = {}
    splits = [word for word in loose if word.lower() in SPLITS and not Path(word).is_file()]
    files = [word for word in loose if word not in splits]
    if len(files) > 1 or (files and named(overrides, ("data",))):
        raise ConfigError(f"'{files[-1]}': name one data set; a setting is written key=value, for example imgsz=640")
    if splits and named(overrides, ("split",)):
        raise ConfigError(f"'{splits[0]}': stands for split={splits[0]}, but split is set already; keep one")
    if files:
        values["data"] = files[0]
    if splits:
        values["split"] = splits
    return Said(None, overrides, values)


def of_folder(words: Sequence[str], key: str, example: str) -> Said:
    """The words of `runs` and `report`: one folder, which is the setting `key`."""
    overrides = tuple(word for word in words if "=" in word and not Path(word).is_dir())
    loose = [word for word in words if word not in overrides]
    if len(loose) > 1 or (loose and named(overrides, (key,))):
        raise ConfigError(f"'{loose[-1]}': name one folder; a setting is written key=value: {example}")
    return Said(None, overrides, {key: loose[0]} if loose else {})


def of_comparison(words: Sequence[str]) -> Said:
    """The words of `compare`: runs, and a data set's YAML file, which is known by what is in it."""
    overrides = tuple(word for word in words if "=" in word and not Path(word).exists())
    loose = [word for word in words if word not in overrides]
    values: dict[str, Any] = {}
    if loose and kind_of(Path(loose[-1])) == "data" and not named(overrides, ("data",)):
        values["data"] = loose.pop()
    if loose and named(overrides, ("runs",)):
        raise ConfigError(f"'{loose[0]}': stands for a run, but runs= is set already; keep one")
    return Said(None, overrides, {**values, "runs": loose} if loose else values)


def named(overrides: Iterable[str], keys: Sequence[str]) -> bool:
    return any(word.partition("=")[0].strip() in keys for word in overrides)
