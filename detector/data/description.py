"""Reads a data-set description: a YAML file in the form that YOLO users know.

path: shapes            # optional, relative to this file
train: images/train     # a folder, a text file that lists images, or a list of those; or COCO's JSON, VOC's image set
val: images/val
names: {0: circle, 1: square}
format: yolo            # or coco, voc; left out: recognised
channels: 1             # of an image; left out: 3, RGB. 1 is grey, other numbers are as the files have them
range: [0, 4095]        # the values that become black and white, in files of more than 8 bits; left out: by their depth
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from detector.data.storage import is_url
from detector.errors import ConfigError, DataError
from detector.files import spelt_here

SPLITS = ("train", "val", "test")
MOST_CHANNELS = 128  # that OpenCV resizes


@dataclass(frozen=True)
class DataDescription:
    """What a data set consists of; nothing of it has been looked for on disk yet, but what `splits` names.

    `splits` holds absolute folders of images and files that list images; `generate` holds the parameters of a data set
    that the project draws itself.
    """

    path: Path
    root: Path
    splits: dict[str, list[Path | str]]  # a str: the URL of shards
    names: tuple[str, ...]  # empty: those of the annotations, see formats.completed
    generate: dict[str, Any] | None = None
    format: str | None = None  # yolo, coco or voc; None: to be recognised
    annotations: dict[Path, Path] = field(default_factory=dict)  # of an entry of a split, where they are named
    keypoints: int = 0  # numbers of keypoints that follow a box in YOLO rows
    channels: int = 3  # of images as they are decoded: 1 is grey, 3 are RGB
    value_range: tuple[float, float] | None = None  # what becomes 0 and 255 in files of more than 8 bits
    download: str | None = None  # what others would run or fetch if the images are not there

    @property
    def absence(self) -> str:
        """What to do about images that are not there."""
        if self.download is None:
            return "put them there, or mend the path"
        first = f"{self.download.strip()} ".splitlines()[0].strip()
        return f"its `download` ({first[:80]} ...) is never run: fetch the images yourself"

    def named(self, names: Sequence[str] | None) -> "DataDescription":
        """The same with other names for its classes, in their order; None: with its own. Raises ConfigError."""
        if names is None:
            return self
        if len(names) != len(self.names):
            raise ConfigError(f"names={list(names)}: {self.path} has {len(self.names)} classes; name each of them")
        return replace(self, names=tuple(names))


def data_root(path: str | Path) -> Path:
    """The folder that the paths in a description start at; nothing else of it is looked at. Raises DataError."""
    path = Path(path).absolute()
    return _root(path, _read_yaml(path).get("path"))


def load_description(path: str | Path) -> DataDescription:
    """The description in a YAML file. Keys that mean nothing here are ignored; `download` is never executed.

    Raises DataError when the file cannot be read or lacks train, val or names, or when they contradict each other.
    """
    from detector.data.formats import completed

    path = Path(path).absolute()
    content = dict(_read_yaml(path))
    if content.get("val") is None and "validation" in content:
        content["val"] = content["validation"]
    root = _root(path, content.get("path"))
    splits: dict[str, list[Path | str]] = {}
    annotations: dict[Path, Path] = {}
    for split in SPLITS:
        if content.get(split) is None:
            continue
        splits[split] = []
        for entry in _entries(path, split, content[split]):
            if isinstance(entry, Mapping):
                place = _located(root, entry["images"])
                annotations[place] = _located(root, entry["annotations"])
            else:
                place = _located(root, entry)
            splits[split].append(place)
    for split in ("train", "val"):
        if split not in splits:
            raise DataError(
                f"{path}: '{split}' is missing; give a folder of images or a text file that lists them, "
                f"for example `{split}: images/{split}`"
            )
    generate = content.get("generate")
    if generate is not None and not isinstance(generate, Mapping):
        raise DataError(f"{path}: generate is {generate!r}, expected parameters such as `{{scenes: shapes, seed: 0}}`")
    download = content.get("download")
    description = DataDescription(
        path=path,
        root=root,
        splits=splits,
        names=_names(path, content),
        generate=None if generate is None else dict(generate),
        format=_format(path, content.get("format")),
        annotations=annotations,
        keypoints=_keypoints(path, content.get("kpt_shape")),
        channels=_channels(path, content.get("channels", 3)),
        value_range=_range(path, content.get("range")),
        download=None if download is None else str(download),
    )
    return completed(description)


def _root(path: Path, base: Any) -> Path:
    """The folder that the description's paths start at: `path` from the file's own folder, or from where we are."""
    if base is not None and not isinstance(base, str):
        raise DataError(f"{path}: path is {base!r}, expected a folder, relative to this file")
    folder = Path(spelt_here(base or "")).expanduser()
    own = (path.parent / folder).resolve()
    return folder.resolve() if not own.exists() and folder.is_dir() else own


def _format(path: Path, value: Any) -> str | None:
    known = ("yolo", "coco", "voc")
    if value is None:
        return None
    if str(value).lower() not in known:
        raise DataError(f"{path}: format is {value!r}, expected {', '.join(known)}; leave it out to have it recognised")
    return str(value).lower()


def _keypoints(path: Path, shape: Any) -> int:
    if shape is None:
        return 0
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
        raise DataError(f"{path}: kpt_shape is {shape!r}, expected [points, numbers of each], as [17, 3]")
    return shape[0] * shape[1]


def _channels(path: Path, channels: Any) -> int:
    if isinstance(channels, bool) or not isinstance(channels, int) or not 1 <= channels <= MOST_CHANNELS:
        raise DataError(
            f"{path}: channels is {channels!r}, expected 1 (grey), 3 (RGB) or how many the images have, at most "
            f"{MOST_CHANNELS}"
        )
    return channels


def _range(path: Path, limits: Any) -> tuple[float, float] | None:
    if limits is None:
        return None
    numbers = [one for one in limits if type(one) in (int, float)] if isinstance(limits, list) else []
    if len(numbers) != 2 or numbers != limits or not -math.inf < numbers[0] < numbers[1] < math.inf:
        raise DataError(
            f"{path}: range is {limits!r}, expected [low, high]: the values in the images that become black and white"
        )
    return float(numbers[0]), float(numbers[1])


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


def _entries(path: Path, split: str, value: Any) -> list[str | Mapping[str, str]]:
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        pair = isinstance(entry, Mapping) and entry.keys() == {"images", "annotations"}
        for text in entry.values() if pair else (entry,):
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{path}: {split} holds {entry!r}, expected a folder of images, a file that lists images, "
                    "{images: folder, annotations: where}, or a list of those"
                )
    if not entries:
        raise DataError(f"{path}: {split} is an empty list; name at least one folder or text file")
    return entries


def _located(root: Path, entry: str) -> Path | str:
    """Where an entry lies; exports name their folders from a folder that is not there: `../train/images`."""
    if is_url(entry):
        return entry.strip()
    place = root / Path(spelt_here(entry.strip())).expanduser()
    if not place.exists() and entry.strip().startswith("../"):
        without = root / spelt_here(entry.strip().removeprefix("../"))
        if without.exists():
            return without
    return place


def _names(path: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes' names; empty where the description gives none."""
    names, count = content.get("names"), content.get("nc")
    if isinstance(count, str) and count.strip().isdecimal():
        count = int(count)
    if names is None and count is None:
        return ()
    if names is None:
        if type(count) is not int or count < 1:
            raise DataError(f"{path}: nc is {count!r}, expected the number of classes")
        return tuple(f"class_{number}" for number in range(count))
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
