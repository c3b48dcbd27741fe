"""Checkpoints: plain tensors and plain data, written atomically, read without running code.

A file is a dictionary with `format`, `ema` (the averaged weights, an fp32 state dict), what rebuilds the network
(`description`, `names`, `imgsz`) and where it comes from (`settings`, `epoch`, `metrics`, `versions`); `last.pt` also
holds `model`, the weights that train, and the rest of `TrainState`.
"""

import hashlib
import os
import pickle
import platform
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

import detector
from detector import public_file
from detector.errors import CheckpointError
from detector.files import replaced, unfinished

FORMAT = 2  # 2: what a run must keep has grown; weights are read from 1, too
SEAL = b"sha256:"
SEALED = len(SEAL) + 64  # bytes of the seal at a file's end


def copied(value: Any) -> Any:
    """A checkpoint's contents as they are now: every tensor in them is copied, into the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(one) for one in value)
    return value


def write(path: Path, contents: dict[str, Any], keep_previous: bool = False) -> None:
    """Write a checkpoint so that `path` is at every moment the old file or the new one, whole.

    keep_previous: the old file stays, as NAME.prev.pt. Raises OSError, and leaves both as they were, where the disk is
    full.
    """
    with replaced(path) as beside:
        with open(beside, "wb") as file:
            sealing = Sealing(file)
            try:
                torch.save({"format": FORMAT, "versions": versions(), **contents}, sealing)
            except RuntimeError:
                if sealing.error is None:
                    raise
                raise sealing.error from None
            sealing.seal()
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            set_aside(path)
    if os.name == "posix":  # the rename itself must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def previous_of(path: Path) -> Path:
    return path.with_suffix(f".prev{path.suffix}")


def set_aside(path: Path) -> None:
    """Make the file also NAME.prev.pt, without a moment at which `path` is missing."""
    link = unfinished(previous_of(path))
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, link)
    os.replace(link, previous_of(path))
    link.unlink(missing_ok=True)  # still there where both were the same file already: then `replace` does nothing


class Sealing:
    """A file that a zip file is written to, and at last its SHA-256: as the comment, where readers expect anything."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None  # torch tells what went wrong in words of its own
        self._file, self._digest, self._end = file, hashlib.sha256(), b""

    def write(self, data: bytes) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        if len(data) < 2:
            data = self._end + data
        else:
            self._digest.update(self._end)
        view = memoryview(data)
        self._digest.update(view[:-2])
        self._end = bytes(view[-2:])  # at the file's end: the length of the comment, which is empty
        return written

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        """Write the comment; nothing more must come."""
        comment = SEAL + self._digest.hexdigest().encode()
        self._file.seek(-2, os.SEEK_END)
        self._file.write(struct.pack("<H", len(comment)) + comment)


def check_seal(path: Path) -> None:
    """Raise CheckpointError where a file is not what was sealed; a file without a seal is let pass."""
    data = path.read_bytes()
    start = data.rfind(SEAL, -SEALED)
    if start >= 0 and data[start + len(SEAL) :] != hashlib.sha256(data[: start - 2]).hexdigest().encode():
        raise CheckpointError(f"{path}: damaged: its contents are not those that were written")


def not_finite(contents: dict[str, Any]) -> str | None:
    """The name of a tensor in a checkpoint's contents that has values which are not finite; None where all are."""
    tensors = {name: value for name, value in _tensors(contents, "") if value.is_floating_point()}
    norms = torch._foreach_norm(list(tensors.values())) if tensors else []
    # Norms are fast, but that of enormous finite numbers overflows.
    suspects = [name for name, norm in zip(tensors, norms, strict=True) if not norm.isfinite()]
    return next((name for name in suspects if not tensors[name].isfinite().all()), None)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors(one, f"{name}.{key}" if name else str(key))


def versions() -> dict[str, str]:
    return {"detector": detector.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def read(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, on the CPU; a public one's are told in the same words, and have an `origin`.

    Raises CheckpointError for any other file.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder, not a checkpoint file")
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint file; name one that is here, nothing is downloaded")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one: it is no zip file")
    check_seal(path)
    try:
        with public_file.alone:
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # more than plain tensors and data
        return {"format": FORMAT, **public_file.read(path)}
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one ({str(error).splitlines()[0]})") from None
    if isinstance(saved, dict) and saved and all(isinstance(value, Tensor) for value in saved.values()):
        raise CheckpointError(
            f"{path}: bare weights, which do not say of what network; name the checkpoint they are from"
        )
    if not isinstance(saved, dict) or "format" not in saved:
        raise CheckpointError(f"{path}: not a checkpoint of this trainer: it has no 'format'")
    if saved["format"] > FORMAT:
        raise CheckpointError(
            f"{path}: format {saved['format']} is newer than this version reads ({FORMAT}); update detector"
        )
    return saved


def weights_in(path: Path) -> Path:
    """The checkpoint to use: a file itself, or a run folder's weights/best.pt."""
    return path / "weights" / "best.pt" if path.is_dir() else path


def read_latest(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """`read`; where the file is damaged or gone, what it was before (NAME.prev.pt), and this is said."""
    try:
        return read(path)
    except CheckpointError as error:
        if not previous_of(path).exists():
            raise
        saved = read(previous_of(path))
        say(f"warning: {error}; going on from {previous_of(path)}")
        return saved
