"""Files that may lie elsewhere: local paths, and the URLs of fsspec (s3://..., gs://..., https://..., memory://...).

Nothing is kept open: a local file is opened for each read, and fsspec hands out its file systems by process and thread.
So all of this may be called in forked and spawned workers alike.
"""

import glob
import os
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar

from detector.errors import DataError

PAUSES = (0.5, 2.0, 8.0)  # seconds before another try of a read from elsewhere
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)  # another try gives no more
Value = TypeVar("Value")


def is_url(place: str) -> bool:
    return "://" in place


def base_name(place: str) -> str:
    """The last part of a path or URL."""
    return PurePosixPath(place).name if is_url(place) else os.path.basename(place)


def stamp(place: str) -> str:
    """What changes when a file does: its size, and its time of change or what its server tells of its content."""
    if not is_url(place):
        found = told(place, lambda: os.stat(place))
        return f"{found.st_size} {found.st_mtime_ns}"
    files, path = _files(place)
    info = told(place, lambda: files.info(path))
    tags = [str(info[key]) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created") if info.get(key)]
    return " ".join([str(info.get("size")), *tags])


def read_range(place: str, start: int, size: int) -> bytes:
    """`size` bytes of a file from `start` on. Raises DataError where there are not so many, or they cannot be read."""

    def read() -> bytes:
        if not is_url(place):
            with open(place, "rb", buffering=0) as file:
                file.seek(start)
                return _whole(file, size)
        files, path = _files(place)
        return files.cat_file(path, start=start, end=start + size) if size else b""

    content = told(place, read)
    if len(content) != size:
        raise DataError(
            f"{place}: ends after {len(content):,} of {size:,} bytes from byte {start:,} on; it is cut short, or has "
            "changed since it was first read: start again, and it is read anew"
        )
    return content


def opened(place: str) -> BinaryIO:
    """A file to read from its beginning on, which can seek. Raises DataError."""

    def open_() -> BinaryIO:
        if not is_url(place):
            return open(place, "rb")
        files, path = _files(place)
        return files.open(path, "rb")

    return told(place, open_)


def matching(pattern: str) -> list[str]:
    """The files that a pattern with *, ? or [...] stands for, sorted."""
    if not is_url(pattern):
        return sorted(glob.glob(pattern))
    files, path = _files(pattern)
    return sorted(files.unstrip_protocol(found) for found in told(pattern, lambda: files.glob(path)))


def _whole(file: Any, size: int) -> bytes:
    """`size` bytes of an unbuffered file, less at its end: the system may hand out fewer at once."""
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _files(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        import fsspec.core
    except ImportError:
        raise DataError(f"{url}: files elsewhere need fsspec: pip install 'detector[shards]'") from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"{url}: {error}") from None
    except ValueError as error:
        raise DataError(f"{url}: {error}; write a path, or a URL that fsspec knows") from None


def told(place: str, read: Callable[[], Value]) -> Value:
    """What `read` returns. Its failure is a DataError; one of a file elsewhere, which may pass, after a few tries."""
    for pause in (*(PAUSES if is_url(place) else ()), None):
        try:
            return read()
        except DataError:
            raise
        except Exception as error:  # of whatever library speaks with the server
            if isinstance(error, FileNotFoundError):
                if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
                    raise DataError(
                        f"{place}: does not exist; mend its name in the description, or put it there"
                    ) from None
                error = error.__cause__  # fsspec says so of a server that cannot be reached, too
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if pause is None or isinstance(error, FINAL):
                raise DataError(f"{place}: cannot be read ({reason}); see that it can be reached") from None
        time.sleep(pause)
    raise AssertionError
