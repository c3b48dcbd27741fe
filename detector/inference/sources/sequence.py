"""Numbered images that are the frames of one video: frames/img%04d.png, as OpenCV and ffmpeg name them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from detector.errors import DataError
from detector.inference.sources.frame import Frame, Origin, Reading, tell

PLACE = re.compile(r"%(?:0(\d+))?d")  # of the number in a name; %20 and %20d of an address are none
RATE = 25.0  # images a second, as ffmpeg takes it where nothing tells


@dataclass(frozen=True)
class ImageSequence:
    """The images that a pattern names, in the order of their numbers."""

    pattern: Path
    numbers: tuple[int, ...]

    def path(self, number: int) -> Path:
        """Of the image with a number."""
        return self.pattern.with_name(PLACE.sub(lambda place: _written(number, place), self.pattern.name))

    @property
    def title(self) -> str:
        """The name without the number, or that of the folder: what files of results are called."""
        return PLACE.sub("", self.pattern.stem).strip(" _-.") or self.pattern.resolve().parent.name or "images"


def is_pattern(name: str) -> bool:
    """Whether a text names numbered images."""
    return PLACE.search(Path(name).name) is not None


def find_sequence(name: str) -> ImageSequence:
    """The images that a pattern names. Raises DataError where there is none, or the pattern is none."""
    pattern = Path(name)
    places = list(PLACE.finditer(pattern.name))
    if len(places) != 1:
        raise DataError(f"{name}: has {len(places)} places for a number; a sequence of images has one, as img%04d.png")
    place = places[0]
    before, after = pattern.name[: place.start()], pattern.name[place.end() :]
    shape = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    try:
        there = sorted(os.listdir(pattern.parent))
    except OSError as error:
        raise DataError(f"{name}: its folder cannot be read ({error.strerror}); name another") from None
    digits = [match[1] for entry in there if (match := shape.fullmatch(entry))]
    numbers = sorted(int(one) for one in digits if one == _written(int(one), place))
    if numbers:
        return ImageSequence(pattern, tuple(numbers))
    if digits:
        wanted = f"{before}{_written(int(digits[0]), place)}{after}"
        raise DataError(
            f"{name}: no image of such a name; {before}{digits[0]}{after} is there, which {place[0]} writes {wanted}: "
            "write %04d for numbers of four digits, %d for those without zeros before them"
        )
    raise DataError(f"{name}: no image of such a name, nor a file; {place[0]} stands for the number of an image")


def read_sequence(sequence: ImageSequence, reading: Reading) -> Iterator[Frame]:
    """The frames that `reading` asks for, with the numbers of their names and times from the first one on, at RATE.

    A number that is missing is a time without a frame. An image that cannot be read is told and left out, as of a
    video. Raises DataError where no image is left.
    """
    from detector.data.image import read_image

    first = sequence.numbers[0]
    timed = [(number, (number - first) / RATE) for number in sequence.numbers]
    wanted = [one for one in timed if one[1] >= reading.start and (reading.stop is None or one[1] < reading.stop)]
    wanted = wanted[:: reading.vid_stride]
    name = str(sequence.pattern)
    origin = Origin(name, "video", sequence.pattern, RATE / reading.vid_stride, len(wanted), sequence.title)
    given = 0
    for number, time in wanted:
        try:
            image = read_image(sequence.path(number), reading.channels, None, reading.value_range)
        except DataError as error:
            tell(reading, error)
            continue
        given += 1
        yield Frame(image, origin, number, time)
    if not wanted:
        raise DataError(f"{name}: no image from second {reading.start:g} on; name an earlier start=")
    if not given:
        raise DataError(f"{name}: none of its {len(wanted)} images can be read")


def _written(number: int, place: re.Match[str]) -> str:
    """A number as C's printf writes it in its place."""
    return f"{number:0{place[1] or 1}d}"
