"""The images of a split in folders and lists, and the files that annotate them.

Paths are strings: there may be a million.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from detector.data.description import DataDescription
from detector.data.findings import Finding
from detector.errors import DataError
from detector.files import IMAGES


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
            for name in names
            if is_image(name)
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


def annotation_files(images: Sequence[str], expected: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """The file that annotates each image, None where there is none, and files there that belong to no image.

    `expected` is where they are looked for; `.TXT` is as good as `.txt`.
    """
    folders: dict[str, set[str]] = defaultdict(set)  # of annotations: the images' folders
    for image, file in zip(images, expected, strict=True):
        folders[os.path.dirname(file)].add(os.path.dirname(image))
    there = {folder: _by_small_ending(folder) for folder in folders}
    files: list[str | None] = []
    for file in expected:
        folder, name = os.path.split(file)
        actual = there[folder].get(name)
        files.append(os.path.join(folder, actual) if actual else None)
    used, orphans = set(files), []
    ending = os.path.splitext(expected[0])[1]
    for folder, names in there.items():
        left = [name for name in names.values() if os.path.join(folder, name) not in used]
        left = [name for name in left if name.lower().endswith(ending)]
        if left:
            pictured = {
                os.path.splitext(name)[0] for place in folders[folder] for name in _names(place) if is_image(name)
            }
            orphans += [os.path.join(folder, name) for name in left if os.path.splitext(name)[0] not in pictured]
    return files, sorted(orphans)


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
