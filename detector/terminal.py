"""What is printed arrives: on a terminal of any encoding, in a pipe, in a notebook, or nowhere.

A character that a stream's encoding lacks is written as an escape, \\u043a, as Python's own error messages do it.
"""

import os
import sys
from contextlib import suppress
from typing import TextIO


def tolerate() -> None:
    """Make this process's stdout and stderr take any text: for the command line, which owns them."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            with suppress(ValueError):  # closed already
                stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Send on what is still held back, so that an error of it comes while somebody can act on it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def leave_broken() -> None:
    """Give up those of stdout and stderr whose reader has gone, so that leaving the program meets no second error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # nobody reads it any more, or the disk it goes to is full
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once, on stdout unless a stream is given; whoever owns the stream finds it as it was."""
    write(f"{text}\n", sys.stdout if stream is None else stream)


def write(text: str, stream: TextIO | None) -> None:
    """Write text at once. None, which is what Python has for a program without a console, takes it and does nothing."""
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a bar can be drawn on the stream."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # an object that only writes, or a closed file
        return False
