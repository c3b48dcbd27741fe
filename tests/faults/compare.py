"""What a run leaves, and where two runs differ. Files are read by torch and zipfile, not by the code under test."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FINISHED = ("weights/last.pt", "weights/last.prev.pt", "weights/best.pt", "metrics.csv")  # once there, never lost
MAY_DIFFER = {"settings", "versions"}  # entries of a checkpoint: the run's name and folder are in its settings


class BrokenPromiseError(Exception):
    """A promise that was not kept."""


@dataclass(frozen=True)
class Outcome:
    """What a run that ended left."""

    last: dict[str, Any]
    best: dict[str, Any]
    metrics: bytes  # of metrics.csv
    files: frozenset[str]  # all of them, relative to the folder


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def outcome_of(folder: Path) -> Outcome:
    """Raises BrokenPromiseError where a file is missing."""
    missing = [name for name in FINISHED if not (folder / name).exists()]
    if missing:
        raise BrokenPromiseError(f"{folder}: the run ended without {', '.join(missing)}")
    files = frozenset(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    last, best = (load(folder / "weights" / name) for name in ("last.pt", "best.pt"))
    return Outcome(last, best, (folder / "metrics.csv").read_bytes(), files)


def assert_same(expected: Outcome, found: Outcome) -> None:
    """Raises BrokenPromiseError where two runs differ in anything but their names: to the bit, and to the byte."""
    for name in ("last", "best"):
        differences = list(differing(getattr(expected, name), getattr(found, name), f"{name}.pt"))
        if differences:
            raise BrokenPromiseError(f"{len(differences)} differences, the first: {differences[0]}")
    if expected.metrics != found.metrics:
        raise BrokenPromiseError(f"metrics.csv is\n{found.metrics.decode()}and should be\n{expected.metrics.decode()}")


def differing(one: Any, other: Any, place: str) -> list[str]:
    """The places in which two values of plain data and tensors differ; NaN equals NaN."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        keys = one.keys() - MAY_DIFFER if place.endswith(".pt") else one.keys()
        return [found for key in sorted(keys, key=str) for found in differing(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [found for i in range(len(one)) for found in differing(one[i], other[i], f"{place}[{i}]")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
        return [] if same else [f"{place}: tensors of {tuple(one.shape)} and {tuple(other.shape)}"]
    same = type(one) is type(other) and (one == other or (one != one and other != other))
    return [] if same else [f"{place}: {one!r:.100} and {other!r:.100}"]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of the finished files that are there."""
    return {name: (folder / name).stat().st_size for name in FINISHED if (folder / name).exists()}


def bytes_lost(folder: Path, before: dict[str, int], expected: Outcome) -> int:
    """Bytes of finished files that were there `before` and are gone, and of those that are there and not whole."""
    now = sizes_of(folder)
    gone = sum(size for name, size in before.items() if name not in now)
    return gone + sum(size for name, size in now.items() if not whole(folder / name, expected))


def whole(path: Path, expected: Outcome) -> bool:
    """Whether a checkpoint's every part has its CRC; whether metrics.csv is full lines of the expected one."""
    if path.suffix == ".csv":
        data = path.read_bytes()
        return data.endswith(b"\n") and expected.metrics.startswith(data)
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except zipfile.BadZipFile:
        return False


def position_of(last: Path) -> tuple[int, int]:
    """(epochs, images of the next one) that last.pt holds; (0, 0) where there is none yet."""
    if not last.exists():
        return 0, 0
    saved = load(last)
    return saved["epoch"], saved["done"]


def leftovers(folder: Path, expected: Outcome) -> list[str]:
    """Files that the run which was not killed does not have."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and str(path.relative_to(folder)) not in expected.files
    )
