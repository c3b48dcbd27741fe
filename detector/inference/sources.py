"""What there is to look at: files, folders, globs, lists of paths and arrays."""

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from detector.errors import DataError
from detector.files import images_among

Source = str | Path | NDArray[np.uint8]


def find_images(sources: Source | Iterable[Source]) -> Iterator[Path | NDArray[np.uint8]]:
    """Single images of a file, folder, glob, text file of paths, array, or a list of those.

    Paths in a text file are relative to it. Raises DataError where nothing is found.
    """
    if isinstance(sources, np.ndarray):
        yield sources
    elif isinstance(sources, str | Path):
        path = Path(sources)
        if path.is_dir():
            files = sorted(path / name for name in images_among(os.listdir(path)))
        elif path.suffix.lower() == ".txt" and path.exists():
            lines = (line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
            files = [path.parent / line for line in lines if line]
        elif path.exists():
            files = [path]
        else:
            files = sorted(Path(name) for name in glob.glob(str(sources), recursive=True))
        if not files:
            raise DataError(f"{sources}: no image there; name an image, a folder of images or a glob in quotes")
        yield from files
    elif (
        isinstance(sources, Iterable)
        and not isinstance(sources, bytes | bytearray | memoryview)
        and not shaped(sources)
    ):
        for source in sources:
            yield from find_images(source)
    else:
        raise DataError(
            f"a {type(sources).__name__} is no source: give a path, a glob, an (H, W, 3) uint8 RGB array of numpy "
            "(np.asarray(image)), or a list of those"
        )


def shaped(source: object) -> bool:
    """Whether it is a tensor of some library, whose rows are no images."""
    return hasattr(source, "shape")
