"""The images of a split in folders and lists, and the files that annotate them.

Paths are strings: there may be a million.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.errors import DataError
from detector.files import IMAGES, images_among


def listed_images(description: DataDescription, split: str) -> tuple[list[str], list[Finding]]:
    """The images of a split, sorted by path, each once. DataError where an entry of it holds none."""
    listed = [path for entry in description.splits[split] for path in _images(description, split, entry)]
    repeated = [path for path, count in Counter(listed).items() if count > 1]
    findings = [Finding("listed twice", path, image=path) for path in repeated]
    return sorted(set(listed)), findings


def _images(description: DataDescription, split: str, entry: Path) -> list[str]:
    """The images of a folder, with its subfolders, or of a text file that lists them."""
    place = f"{description.path}: {split}: {entry}"
    if entry.is_dir():
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(entry, followlinks=True)
            for name in images_among(names)
        ]
        if not found:
            raise DataError(f"{place} holds no images ({' '.join(IMAGES)}); put them there or name another folder")
        return found
    if not entry.is_file():
        raise DataError(f"{place} does not exist; paths are relative to {description.root}; {description.absence}")
    if is_image(entry.name):
        raise DataError(f"{place} is an image; name its folder, or a text file that lists images")
    lines = list_lines(entry, place)
    if not lines:
        raise DataError(f"{place} lists no images; write one path a line")
    for start in (entry.parent, description.root, Path.cwd(), None):
        found = [str(start / line) if start else str(entry.parent / Path(*Path(line).parts[1:])) for line in lines]
        if os.path.exists(found[0]):
            return found
    found = [str(entry.parent / line) for line in lines]
    if not any(map(os.path.exists, found)):
        raise DataError(
            f"{place}: none of the {len(found):,} images that it lists exists (first: {found[0]}); relative paths "
            f"start at the list's folder, at {description.root}, or where you are; {description.absence}"
        )
    return found


def is_image(name: str) -> bool:
    """By its name; those with a dot before it are of the system."""
    return name.lower().endswith(IMAGES) and not name.startswith(".")


def list_lines(file: Path, place: str) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read as a list of images ({error})") from None
    return [line for line in lines if line and not line.startswith("#")]


def annotation_files(
    images: Sequence[str], folder_of: Callable[[str], str], ending: str
) -> tuple[list[str | None], list[str]]:
    """The file that annotates each image, None where there is none, and files there that belong to no image.

    They are in the folder that `folder_of` says for an image's, under the image's name with another ending; `.TXT` is
    as good as `.txt`.
    """
    folders: dict[str, str] = {}  # of images: that of their annotations
    there: dict[str, dict[str, str]] = {}  # its files, by names with small endings
    files: list[str | None] = []
    for image in images:
        folder, name = _parts(image)
        if folder not in folders:
            folders[folder] = place = folder_of(folder)
            there.setdefault(place, _by_small_ending(place))
        place = folders[folder]
        actual = there[place].get(_stem(name) + ending)
        files.append(f"{place}{os.sep}{actual}" if actual else None)
    used, orphans = set(files), []
    for place, names in there.items():
        left = [
            name for name in names.values() if name.lower().endswith(ending) and f"{place}{os.sep}{name}" not in used
        ]
        if left:
            pictures = [name for folder in folders if folders[folder] == place for name in _names(folder)]
            pictured = {_stem(name) for name in pictures if is_image(name)}
            orphans += [f"{place}{os.sep}{name}" for name in left if _stem(name) not in pictured]
    return files, sorted(orphans)


def annotation_path(image: str, folder_of: Callable[[str], str], ending: str) -> str:
    """Where the annotation of an image is looked for."""
    folder, name = _parts(image)
    return os.path.join(folder_of(folder), _stem(name) + ending)


def _parts(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition(os.sep)
    return folder, name


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _by_small_ending(folder: str) -> dict[str, str]:
    """The files of a folder by their names with the ending in small letters, which wins where there are both."""
    names = {}
    for name in sorted(_names(folder)):
        stem, ending = os.path.splitext(name)
        names[stem + ending.lower()] = name
    return names


def _names(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return []
