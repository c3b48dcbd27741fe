"""A tar file of samples, as WebDataset writes them: `000001.jpg` and `000001.txt` are one.

A name ends at the first dot after its folder; what follows is the kind of the file. What lies where is found in one
pass, with the labels and the sizes of the images, and kept in a file, so that each image is one read afterwards.
"""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from detector.data import storage
from detector.data.header import Range, read_header, readers
from detector.errors import DataError
from detector.files import ARRAY, IMAGES, replaced, spelt_here

VERSION = 1  # of what is kept: another one reads the shard anew
BLOCK = 512  # bytes of a tar file's header; members begin at multiples of it
MARK = ".tar:"  # between a shard and one of its members, in the place of an image
LABELS = "txt", "json"  # kinds of labels; of a sample that has both the first, for JSON often says other things, too
Header = Callable[[BinaryIO], tuple[tuple[int, int] | None, str]]  # see header.read_header
Found = tuple[int, int, tuple[int, int] | None, str]  # first byte, bytes, size in pixels or why it has none


class Sample(NamedTuple):
    """An image of a shard and its label."""

    image: str  # the member's name
    start: int  # its first byte in the shard
    bytes: int
    size: tuple[int, int] | None  # height, width in pixels, after EXIF orientation; None when it cannot be read
    reason: str  # why not
    label: str  # the member's name; empty: there is none
    text: bytes  # its content


def member_place(shard: str, member: str) -> str:
    """What a member is called in messages, and in an index."""
    return f"{shard}:{member}"


def member_of(place: str) -> str:
    """The member of a place in a shard; a path as it is."""
    return place[place.index(MARK) + len(MARK) :] if MARK in place else place


def content(place: str, start: int, size: int) -> bytes:
    """The bytes of the member with this place."""
    return storage.read_range(place[: place.index(MARK) + len(MARK) - 1], start, size)


def samples_of(
    shard: str, folder: Path, beside: bool, channels: int = 3, value_range: Range | None = None
) -> list[Sample]:
    """The images of a shard in their order in it, from what was kept of it or by reading it; see `header.read_header`.

    What is kept lies beside the shard where that is local, wished (`beside`) and can be written to, else in `folder`.
    Raises DataError where the shard cannot be read or is no tar file of samples.
    """
    read_by = VERSION, readers(), channels, value_range
    key = hashlib.sha256(json.dumps([read_by, storage.stamp(shard)]).encode()).hexdigest()
    name = storage.base_name(shard)
    whole_name = hashlib.sha256(shard.encode("utf-8", "surrogateescape")).hexdigest()
    places = [folder / f".{name}.{whole_name[:16]}.index"]
    if beside and not storage.is_url(shard):
        places.insert(0, Path(shard).with_name(f".{name}.index"))
    for place in places:
        if (kept := _load(place, key)) is not None:
            return kept
    samples = read_shard(shard, partial(read_header, channels=channels, value_range=value_range))
    for place in places:
        with suppress(OSError):
            _save(place, key, samples)
            break
    return samples


def read_shard(shard: str, header: Header = read_header) -> list[Sample]:
    """The images of a shard, in one pass over it. Of members of one name the last counts, as for tar itself."""
    images, labels = storage.told(shard, lambda: _members(shard, header))
    if not images:
        raise DataError(
            f"{shard}: holds no images; its samples are files such as 000001.jpg and 000001.txt, whose name ends at "
            "the first dot"
        )
    for names in images.values():  # an array beside an image is something else, here as in a folder
        arrays = [name for name in names if name.lower().endswith(ARRAY)]
        for name in arrays if len(arrays) < len(names) else ():
            del names[name]
    if several := next((names for names in images.values() if len(names) > 1), None):
        raise DataError(f"{shard}: {' and '.join(several)} are images of one sample; give each a name of its own")
    samples = []
    for stem, [(name, found)] in ((stem, members.items()) for stem, members in images.items()):
        mine = labels.get(stem, {})
        samples.append(Sample(name, *found, *next((mine[kind] for kind in LABELS if kind in mine), ("", b""))))
    return samples


def _members(shard: str, header: Header) -> tuple[dict[str, dict[str, Found]], dict[str, dict[str, tuple[str, bytes]]]]:
    """Of each sample its images by their names, and its labels by their kinds: name and content."""
    images: dict[str, dict[str, Found]] = {}
    labels: dict[str, dict[str, tuple[str, bytes]]] = {}
    with storage.opened(shard) as file:
        size, end = file.seek(0, io.SEEK_END), 0
        file.seek(0)
        with _tar(shard, file) as tar:
            for member in tar:
                name = spelt_here(member.name)
                stem, kind = _parts(name)
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                if member.offset_data + member.size > size:
                    raise DataError(f"{member_place(shard, name)}: the shard ends inside it; copy it again")
                if not member.isreg() or member.issparse():
                    continue
                if f".{kind}" in IMAGES:
                    found = header(_content(shard, tar, member))
                    images.setdefault(stem, {})[name] = (member.offset_data, member.size, *found)
                elif kind in LABELS:
                    labels.setdefault(stem, {})[kind] = name, tar.extractfile(member).read()
        _check_end(shard, file, end)
    return images, labels


def _content(shard: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    """A member as a file; from elsewhere it is read at once, so that a server's failure is not taken for an image's."""
    file = tar.extractfile(member)
    return io.BytesIO(file.read()) if storage.is_url(shard) else file


def _parts(member: str) -> tuple[str, str]:
    """The name of a sample, with its folder, and the kind of the file, without which it is no part of a sample."""
    folder, name = os.path.split(member)
    stem, _, kind = name.partition(".")
    return f"{folder}/{stem}", kind.lower() if stem else ""


def _tar(shard: str, file: BinaryIO) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except tarfile.TarError as error:
        packed = file.seek(0) or file.read(4)
        if packed.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
            raise DataError(
                f"{shard}: is compressed, and no image in it can be read alone; unpack it to a plain tar file"
            ) from None
        raise DataError(f"{shard}: is no tar file ({error})") from None


def _check_end(shard: str, file: BinaryIO, end: int) -> None:
    """Raise DataError where the shard goes on after its last member that could be read: what follows would be lost."""
    file.seek(end)
    if file.read(BLOCK).strip(b"\0"):
        raise DataError(f"{shard}: is damaged at byte {end:,}, and what follows cannot be read; copy it again")


# --- what is kept


def _save(path: Path, key: str, samples: list[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    spans = [(one.start, one.bytes, *(one.size or (0, 0)), len(one.text)) for one in samples]
    names = [text for one in samples for text in (one.image, one.reason, one.label)]
    with replaced(path) as place, open(place, "wb") as file:
        np.savez(
            file,
            key=np.frombuffer(key.encode(), dtype=np.uint8),
            spans=np.array(spans, dtype=np.int64).reshape(-1, 5),
            names=np.frombuffer(b"\0".join(map(os.fsencode, names)), dtype=np.uint8),
            texts=np.frombuffer(b"".join(one.text for one in samples), dtype=np.uint8),
        )


def _load(path: Path, key: str) -> list[Sample] | None:
    """What was kept with this key; None where there is nothing, or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if arrays["key"].tobytes() != key.encode():
                return None
            spans, texts = arrays["spans"].tolist(), arrays["texts"].tobytes()
            names = [os.fsdecode(name) for name in arrays["names"].tobytes().split(b"\0")]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    samples, read = [], 0
    for number, (start, size, height, width, length) in enumerate(spans):
        image, reason, label = names[3 * number : 3 * number + 3]
        pixels = (height, width) if height else None
        samples.append(Sample(image, start, size, pixels, reason, label, texts[read : read + length]))
        read += length
    return samples
