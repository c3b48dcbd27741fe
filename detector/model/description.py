"""Model descriptions: from a name (`v11n`) or a YAML file to plain, checked data."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detector.errors import ConfigError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
_KEYS = ("nc", "scale", "scales", "backbone", "head", "reg_max", "end2end", "activation", "class_channels")
_OTHERS = ("depth_multiple", "width_multiple", "ch", "channels")  # keys of public files, which are read into those
ANY = 10**6  # channels that no layer has: there is no cap
_SUFFIXES = (".yaml", ".yml")
_STEM = re.compile(r"(.*?\d+)(.*)")  # of a file of several scales: what stands before the scale, and what after
_NAME = re.compile(r"(.*?\d+)([a-z])(|u|-.*)")  # of a model: what stands before its scale, the scale, what after


def shipped_folder() -> Path:
    """The folder of the model descriptions that come with the project: in the installed package, or in the checkout."""
    installed = _PACKAGE / "configs" / "models"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs" / "models"


def load_description(name_or_path: str | Path) -> dict[str, Any]:
    """The description of `v11n`, `v8s-p2`, ..., or of a YAML file, as plain data with its scale resolved.

    The scale is the letter after the number in the name. A path that is no file but has one, such as
    configs/models/v11s.yaml, is v11.yaml at scale s; a file's own `scale` is next, then the first of its scales. Keys
    of the result: name (as given, for messages), nc, scale, scales, backbone, head, and the other keys where they are
    written. Raises ConfigError.
    """
    name = str(name_or_path)
    file, scale = _locate(name)
    content = _read(name, file)
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: is not a model description (a mapping with the keys {', '.join(_KEYS)})")
    for key in content:
        if key not in (*_KEYS, *_OTHERS):
            raise ConfigError(f"{name}: {key!r} is not a key of a model description.{did_you_mean(key, _KEYS)}")
    channels = [content.pop(key) for key in ("ch", "channels") if key in content]
    if any(one != 3 for one in channels):  # which goes without saying; in a run the data set's take their place
        content["channels"] = channels[-1]
    depth, width = content.pop("depth_multiple", 1.0), content.pop("width_multiple", 1.0)
    if "scales" not in content:
        content |= {"scales": {"": [depth, width, ANY]}, "scale": ""}
    scales = content["scales"]
    if scale is not None:
        content["scale"] = scale
    elif content.get("scale") is None and isinstance(scales, dict):
        letter = _scale_in(file.stem)
        content["scale"] = letter if letter in scales else next(iter(scales))
    description = {"name": name, **content}
    check_description(description)
    return description


def for_images(
    description: dict[str, Any], channels: int = 3, value_range: tuple[float, float] | None = None
) -> dict[str, Any]:
    """A description with what the images are: their channels, and the values in their files that become 0 and 255.

    What goes without saying, RGB and no range, is left out.
    """
    others = {key: value for key, value in description.items() if key not in ("channels", "range")}
    said = {} if channels == 3 else {"channels": channels}
    return {**others, **said, **({} if value_range is None else {"range": list(value_range)})}


def title(description: dict[str, Any]) -> str:
    """What a description is called, with its scale where the name does not tell."""
    name, scale = description.get("name", "a model"), description.get("scale")
    return f"{name}, scale {scale}" if scale and _scale_in(name) != scale else name


def _read(name: str, file: Path) -> Any:
    """What a YAML file holds."""
    import yaml  # a checkpoint's network is built without it

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: cannot be read as YAML: {error}") from error


def check_description(description: dict[str, Any]) -> None:
    """Raises ConfigError unless the keys of a description have the form that building relies on."""
    name = description.get("name", "model description")
    for key in ("nc", "scales", "backbone", "head"):
        if key not in description:
            raise ConfigError(f"{name}: the key {key!r} is missing")
    nc, scales = description["nc"], description["scales"]
    reg_max, end2end = description.get("reg_max", 16), description.get("end2end", False)
    if not _is_whole(reg_max) or reg_max < 1:
        raise ConfigError(f"{name}: reg_max {reg_max!r} is not a number of bins (16; 1: the distance itself)")
    width = description.get("class_channels")
    if width is not None and (not _is_whole(width) or width < 1):
        raise ConfigError(f"{name}: class_channels {width!r} is not a number of channels (left out: by the classes)")
    if not _is_whole(channels := description.get("channels", 3)) or channels < 1:
        raise ConfigError(f"{name}: channels {channels!r} is not a number of channels of an image (3: RGB)")
    if not isinstance(end2end, bool):
        raise ConfigError(f"{name}: end2end {end2end!r} is not true or false")
    if not isinstance(description.get("activation", ""), str):
        raise ConfigError(f"{name}: activation {description['activation']!r} is not a text such as torch.nn.ReLU()")
    if not _is_whole(nc) or nc < 1:
        raise ConfigError(f"{name}: nc {nc!r} is not a number of classes (a whole number from 1)")
    if not isinstance(scales, dict) or not scales:
        raise ConfigError(f"{name}: scales {scales!r} is not a mapping such as `n: [0.50, 0.25, 1024]`")
    for key, values in scales.items():
        numbers = isinstance(values, list) and len(values) == 3 and all(_is_number(v) and v > 0 for v in values)
        if not numbers or not _is_whole(values[2]):
            raise ConfigError(f"{name}: scale {key}: {values!r} is not [depth, width, most channels], all above 0")
    scale = description.get("scale")
    if scale is None:
        raise ConfigError(f"{name}: no scale is chosen; add `scale: {next(iter(scales))}` (one of {_listed(scales)})")
    if scale not in scales:
        raise ConfigError(f"{name}: scale {scale!r} is not one of {_listed(scales)}")
    layers = 0
    for part in ("backbone", "head"):
        if not isinstance(description[part], list) or not description[part]:
            raise ConfigError(f"{name}: {part} is not a list of layers [from, repeats, module, arguments]")
        for layer in description[part]:
            _check_layer(f"{name}: layer {layers}", layer)
            layers += 1


def _check_layer(place: str, layer: object) -> None:
    """Raises ConfigError unless a layer is [from, repeats, module, arguments] of the right types."""
    if not isinstance(layer, list) or len(layer) != 4:
        raise ConfigError(f"{place}: {layer!r} is not [from, repeats, module, arguments]")
    source, repeats, module, arguments = layer
    if not (_is_whole(source) or (isinstance(source, list) and source and all(map(_is_whole, source)))):
        raise ConfigError(f"{place}: from {source!r} is not a layer's number (-1 is the previous layer) or a list")
    if not _is_whole(repeats) or repeats < 1:
        raise ConfigError(f"{place}: repeats {repeats!r} is not a whole number from 1")
    if not isinstance(module, str):
        raise ConfigError(f"{place}: {module!r} is not the name of a module")
    if not isinstance(arguments, list):
        raise ConfigError(f"{place}: arguments {arguments!r} of {module} are not a list; write [{arguments}]")


def _locate(name: str) -> tuple[Path, str | None]:
    """The file that a name or path stands for, and the scale it names (None: the file or its name does)."""
    if not name.lower().endswith(_SUFFIXES):
        return _locate_shipped(name)
    path = Path(name)
    if path.is_file():
        return path, None
    if parts := _NAME.fullmatch(path.stem):
        unscaled = path.with_name(f"{parts[1]}{parts[3]}{path.suffix}")
        if unscaled.is_file():
            return unscaled, parts[2]
    known = [str(found) for found in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
    raise ConfigError(f"{name}: no such file.{did_you_mean(name, [*known, *_shipped()])}")


def _scale_in(stem: str) -> str | None:
    """The scale that a file's name names: the s of v11s, my-v8s-p2, yolo11s."""
    parts = _NAME.fullmatch(stem)
    return parts[2] if parts else None


def _shipped() -> list[str]:
    """The names of the models that come with the project: v11n, v11s, v8n-p2, v5nu, v10n, ..."""
    names = []
    for file in sorted(shipped_folder().glob("*.yaml")):
        scales = list(_read(file.name, file).get("scales", ()))
        if len(scales) < 2:  # one file a scale
            names.append(file.stem)
        else:
            number, rest = _STEM.fullmatch(file.stem).groups()
            names += [f"{number}{scale}{rest}" for scale in scales]
    return names


def _locate_shipped(name: str) -> tuple[Path, str | None]:
    """The shipped file and the scale of a name such as v11n; None: it is a file of one scale."""
    if parts := _NAME.fullmatch(name):
        own, shared = (shipped_folder() / f"{stem}.yaml" for stem in (name, f"{parts[1]}{parts[3]}"))
        if shared.is_file() and parts[2] in _read(name, shared)["scales"]:
            return shared, parts[2]
        if own.is_file():
            return own, None
    known = _shipped()
    hint = did_you_mean(name, known)
    raise ConfigError(f"{name}: not a model ({_families(known)}, or a path to a .yaml file).{hint}")


def _families(names: Iterable[str]) -> str:
    """v11n, v11s, v11m, v8n-p2, ... as `v11[nsm], v8[n]-p2`."""
    families: dict[tuple[str, str], list[str]] = {}
    for name in names:
        number, scale, rest = _NAME.fullmatch(name).groups()
        families.setdefault((number, rest), []).append(scale)
    return ", ".join(f"{number}[{''.join(scales)}]{rest}" for (number, rest), scales in families.items())


def _listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
