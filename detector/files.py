"""Files: images by their names, and results that are at every moment the old ones or the new ones, whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from detector.errors import OutputError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")  # how the names of images end
UNFINISHED = ".unfinished"  # how the names of files end that are being written


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
