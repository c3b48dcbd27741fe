"""Files: images by their names, and results that are at every moment the old ones or the new ones, whole."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from detector.errors import OutputError

# How the names of images end, in any case. What a file is, its content says.
IMAGES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".bmp", ".dib", ".webp", ".tif", ".tiff", ".gif",
    ".avif", ".heic", ".heif", ".hif", ".jp2", ".j2k", ".pbm", ".pgm", ".ppm", ".pnm", ".npy",
)  # fmt: skip
ARRAY = ".npy"
UNFINISHED = ".unfinished"  # how the names of files end that are being written


def images_among(names: Iterable[str]) -> list[str]:
    """Those names of a folder's files that are images; hidden files are not.

    Nor is an array beside an image of the same name: other trainers keep decoded images so.
    """
    found = [name for name in names if name.lower().endswith(IMAGES) and not name.startswith(".")]
    pictures = {os.path.splitext(name)[0] for name in found if not name.lower().endswith(ARRAY)}
    return [name for name in found if not (name.lower().endswith(ARRAY) and os.path.splitext(name)[0] in pictures)]


def spelt_here(name: str) -> str:
    """The name of a file as this process's locale spells it: where that has not its letters, by escapes of its UTF-8.

    Names that come from a YAML file or a checkpoint, and not from the system, need this.
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return os.fsdecode(name.encode("utf-8", "surrogateescape"))
    return name


def unfinished(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}{UNFINISHED}")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A context that gives the place to write to; the file there takes the place of `path` when it is left.

    An error leaves the old file as it was, and no other. There is to be one writer of a file at a time.
    """
    beside = unfinished(path)
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def writing(place: Path, remedy: str = "make room, or choose another project=") -> Iterator[None]:
    """A context that writes results; a system's refusal is told as OutputError, with the place and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or place
        raise OutputError(f"{where}: cannot be written: {error.strerror or error}; {remedy}") from None


def remove_unfinished(folder: Path) -> None:
    """Remove what writes that were killed left in a folder and below it."""
    for file in folder.rglob(f".*{UNFINISHED}"):
        file.unlink(missing_ok=True)
