"""TIFF files: their directories, and pixels by whichever library reads each kind of them right.

Of TIFF no reader takes all. Pillow cuts colours of 16 bits to 8 and knows no bands beyond four; OpenCV multiplies 8-bit
colours by their alpha, and what it makes of bands in planes of their own, or of 16-bit colours when it is asked for
RGB, is noise. `reader_of` gives each file to one that was seen to be right; all else takes tifffile, where it is
installed.
"""

import importlib.util
import io
import struct
from typing import BinaryIO, Literal, NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from detector.data.faults import DamagedError, RefusedError, decoded_by_opencv
from detector.data.orientation import TAG, checked

STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: of files beyond 4 GiB
MOST_PAGES, MOST_TAGS = 1024, 4096
SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # bytes of types; others: 1
GREY = WHITE_IS_ZERO, BLACK_IS_ZERO = 0, 1  # photometric interpretations
RGB = 2
CONVERTED = (3, 5, 6, 8)  # palette, CMYK, YCbCr and CIELAB, which become RGB
FILTERS = 32803, 34892  # of a camera's raw data
ASIDE = 0b101  # a page that is a smaller copy of another, or its mask
NUMBERS = {1: "uint", 2: "int", 3: "float"}
PILLOW_BITS = {"uint": (12, 16, 32), "int": (16, 32), "float": (32,)}
INSTALL = "pip install tifffile imagecodecs"


class Page(NamedTuple):
    """What the directory of a page says."""

    place: int  # in the file's chain of pages
    height: int  # as it is stored, pixels
    width: int
    orientation: int
    photometric: int
    samples: int  # of a pixel
    bits: int  # of a sample
    number: str  # uint, int or float
    contiguous: bool  # whether the samples of a pixel stand together
    extra: tuple[int, ...]  # what the samples beyond the colours are: 0 unknown, 1 and 2 alpha
    end: int  # bytes that a file with its pixels has at least

    @property
    def colours(self) -> int:
        """Channels of a pixel: those it becomes where it is converted, else its samples, alpha among them."""
        return 3 if self.photometric in CONVERTED else self.samples

    @property
    def is_picture(self) -> bool:
        """Whether it is grey or in colours, with or without alpha, and not bands of some other kind."""
        return self.samples <= (2 if self.photometric in GREY else 4)


def pages_of(file: BinaryIO) -> list[Page]:
    """The pages of a file but for smaller copies and masks. RefusedError or DamagedError where there is none."""
    beginning = file.read(16)
    if beginning.startswith(STARTS[3]):
        raise RefusedError("is a BigTIFF with the high byte first; save it with the low byte first, or as TIFF")
    directory = ImageFileDirectory_v2(beginning if beginning.startswith(STARTS[2]) else beginning[:8])
    found, seen, place = [], set(), 0
    while (here := directory.next) and here not in seen and place < MOST_PAGES:
        seen.add(here)
        try:
            end = _end_of(file, here, beginning)
            file.seek(here)
            directory.load(file)
            if not directory.get(254, 0) & ASIDE:
                found.append(_page(directory, place, end))
        except (KeyError, TypeError, ValueError, struct.error):
            if not found:
                raise
            break  # what follows the first page is damaged
        place += 1
    if not found:
        raise DamagedError("it has no page that is a whole picture")
    return found


def _end_of(file: BinaryIO, start: int, beginning: bytes) -> int:
    """Bytes that a file has at least in which a directory begins at `start`, with all that it points to."""
    order, large = "<" if beginning.startswith(b"II") else ">", beginning.startswith(STARTS[2])
    counter, entry, link = ("Q", "HHQ8s", 8) if large else ("H", "HHI4s", 4)
    file.seek(start)
    (count,) = struct.unpack(order + counter, file.read(struct.calcsize(order + counter)))
    size = struct.calcsize(order + entry)
    if count > MOST_TAGS:
        raise DamagedError("its directory is damaged")
    end = file.tell() + count * size + link
    for _, kind, number, value in struct.iter_unpack(order + entry, file.read(count * size)):
        length = SIZES.get(kind, 1) * number
        if length > link:
            end = max(end, int.from_bytes(value, "little" if order == "<" else "big") + length)
    return end


def _page(tags: ImageFileDirectory_v2, place: int, end: int) -> Page:
    bits, numbers = set(tags.get(258, (1,))), set(tags.get(339, (1,)))
    if tags.get(262) in FILTERS:
        raise RefusedError("holds the raw data of a camera; develop it to TIFF or JPEG")
    if len(bits) != 1 or len(numbers) != 1 or not numbers <= NUMBERS.keys():
        raise RefusedError(f"has samples of {sorted(bits)} bits and types {sorted(numbers)}; save it with one for all")
    starts, counts = (_numbers(tags.get(strip, tags.get(tile, ()))) for strip, tile in ((273, 324), (279, 325)))
    return Page(
        place=place,
        height=tags[257],
        width=tags[256],
        orientation=checked(tags.get(TAG, 1)),
        photometric=tags.get(262, BLACK_IS_ZERO),
        samples=tags.get(277, 1),
        bits=bits.pop(),
        number=NUMBERS[numbers.pop()],
        contiguous=tags.get(284, 1) == 1,
        extra=_numbers(tags.get(338, ())),
        end=max([end, *(start + count for start, count in zip(starts, counts, strict=False))]),
    )


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def planes(pages: list[Page]) -> int:
    """Channels that a file has for who asks for more than grey or colours: its samples, or else its pages."""
    first = pages[0]
    grey = first.samples == 1 and first.photometric in GREY
    return len(pages) if grey and all(page[1:8] == first[1:8] for page in pages) else first.colours


def reader_of(page: Page, channels: int) -> Literal["opencv", "pillow", "tifffile"]:
    """Which library reads a page right, for so many channels."""
    colours, known = page.photometric == RGB, channels in (1, 3)
    if page.samples == 1 and (page.bits <= 8 or (page.contiguous and page.bits in PILLOW_BITS[page.number])):
        return "pillow"
    if page.number != "uint" or page.bits not in (8, 16):
        return "tifffile"
    if page.bits == 16:
        return "opencv" if colours and page.samples in (3, 4) and page.contiguous and not page.place else "tifffile"
    if page.photometric in CONVERTED or (colours and page.samples == 3):
        return "pillow"
    if page.photometric in GREY:
        return "pillow" if page.samples == 2 and known and page.contiguous else "tifffile"
    if page.samples == 4 and page.contiguous and not page.place:
        return "pillow" if known else {(0,): "opencv", (2,): "pillow"}.get(page.extra, "tifffile")
    return "tifffile"


def refusal(page: Page, channels: int) -> str:
    """What is missing to read a page; nothing where all is there."""
    if reader_of(page, channels) != "tifffile" or importlib.util.find_spec("tifffile"):
        return ""
    layout = "together" if page.contiguous else "in planes of their own"
    return f"is a TIFF of {page.samples} samples of {page.bits} bits, {layout}; `{INSTALL}` reads it"


def read(content: bytes, pages: list[Page], channels: int) -> tuple[np.ndarray | Image.Image, int]:
    """The first page, or all where they are the channels; and the orientation that is still to be applied.

    (H, W) or (H, W, K) with colours as RGB, or Pillow's image. Raises RefusedError or DamagedError.
    """
    first = pages[0]
    if max(page.end for page in pages[: len(pages) if channels == planes(pages) else 1]) > len(content):
        raise DamagedError("its end is missing")
    if channels in (1, 3) or len(pages) == 1 or first.samples > 1:
        return _read_page(content, first, channels)
    each = [_read_page(content, page, 1) for page in pages]
    return np.stack([np.asarray(pixels) for pixels, _ in each], axis=2), each[0][1]


def _read_page(content: bytes, page: Page, channels: int) -> tuple[np.ndarray | Image.Image, int]:
    reader = reader_of(page, channels)
    if reader == "opencv":
        pixels = decoded_by_opencv(content, cv2.IMREAD_UNCHANGED)
        if pixels is None:
            raise DamagedError("its end is missing or damaged")
        return pixels[..., [2, 1, 0, 3][: page.samples]], 1  # it turns a TIFF upright whatever it is asked for
    pixels, orientation = _by_pillow(content, page) if reader == "pillow" else _by_tifffile(content, page)
    if page.photometric == WHITE_IS_ZERO and page.number == "uint" and isinstance(pixels, np.ndarray):
        pixels = 2**page.bits - 1 - pixels
    return pixels, orientation


def _by_pillow(content: bytes, page: Page) -> tuple[np.ndarray | Image.Image, int]:
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        if page.bits <= 8:
            raise DamagedError("it is damaged at its beginning") from None
        return _by_tifffile(content, page)  # samples of more bits are read in one of the orders of bytes alone
    image.seek(page.place)
    image.load()
    left = checked(image.tag_v2.get(TAG, 1))  # releases turn it themselves, and take the tag away, or do neither
    return (np.asarray(image) if page.bits > 8 else image), left  # up to 8 bits Pillow makes 0 black


def _by_tifffile(content: bytes, page: Page) -> tuple[np.ndarray, int]:
    try:
        from tifffile import TiffFile

        with TiffFile(io.BytesIO(content)) as file:
            pixels = file.pages[page.place].asarray()
    except (ImportError, KeyError, ValueError) as error:
        if isinstance(error, ImportError) or "imagecodecs" in str(error):
            raise RefusedError(f"is a TIFF that needs more to be read: `{INSTALL}` ({error})") from None
        raise
    return (pixels if page.contiguous or pixels.ndim == 2 else np.moveaxis(pixels, 0, 2)), page.orientation
