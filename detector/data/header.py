"""What an image file says of itself before any pixel is decoded: its kind, size and channels, or why it is not read.

Training, validation and prediction ask here first, so that one file is read or refused by all of them alike. A file is
known by its content, and not by its name.
"""

import importlib.util
import os
from contextlib import nullcontext
from typing import BinaryIO, NamedTuple

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError, features

from detector.data import tiff
from detector.data.faults import DamagedError, RefusedError
from detector.data.orientation import orientation_in, upright_size

MOST_BYTES = 2**29  # of a decoded image: 178,956,970 pixels of 3 channels. A larger one is never decoded
Range = tuple[float, float]  # the values of a file that become 0 and 255

# Pillow's names of what is read, beside TIFF, HEIF and arrays.
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "DIB", "WEBP", "GIF", "PPM", "AVIF", "JPEG2000")
HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # brands
AVIF = (b"avif", b"avis")
DATA = ("L", "LA", "RGB", "RGBA", "I;16", "I;16B", "I;16L", "I", "F")  # Pillow's modes whose bands are what is stored
PNG_PLANES = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by the kind of its pixels
OTHERWISE = "save it as JPEG or PNG"


class Header(NamedTuple):
    """What the beginning of an image file tells of its first picture."""

    form: str  # Pillow's name of the format, or NPY
    height: int  # as it is stored, pixels
    width: int
    orientation: int  # EXIF, 1 to 8
    planes: int  # channels of a pixel, alpha among them; of a TIFF of several grey pages, those
    is_picture: bool  # grey or in colours, with or without alpha, which 1 and 3 channels can be made of
    bits: int = 8  # of a channel
    number: str = "uint"  # or int, float
    image: Image.Image | None = None  # Pillow's reader of it
    pages: tuple[tiff.Page, ...] = ()

    @property
    def upright(self) -> tuple[int, int]:
        """(height, width) after EXIF orientation, pixels."""
        return upright_size(self.height, self.width, self.orientation)


def read_header(
    path: str | os.PathLike[str] | BinaryIO, channels: int = 3, value_range: Range | None = None
) -> tuple[tuple[int, int] | None, str]:
    """((height, width) after EXIF orientation, "") of an image that can be read as so many channels; or None and why
    not, to be put after its name. Nothing is decoded. `path` may be an open file, which then must begin with the image.
    Raises MemoryError when there is no memory for it.
    """
    try:
        with open(path, "rb") if isinstance(path, str | os.PathLike) else nullcontext(path) as file:
            header = header_of(file)
            if reason := refusal(header, channels, value_range):
                return None, reason
            return header.upright, ""
    except FileNotFoundError:
        return None, "does not exist"
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"
    except RefusedError as refused:
        return None, str(refused)
    except DamagedError as damaged:
        return None, f"cannot be read ({damaged})"


def header_of(file: BinaryIO) -> Header:
    """The header of a file, whether or not it is read. RefusedError or DamagedError where that cannot be told."""
    beginning = file.read(32)
    file.seek(0)
    if not beginning:
        raise DamagedError("the file is empty")
    try:
        if beginning.startswith(b"\x93NUMPY"):
            return _of_array(file)
        if beginning.startswith(tiff.STARTS):
            return header_of_pages(tuple(tiff.pages_of(file)))
        return _of_pillow(file, beginning)
    except (RefusedError, DamagedError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise RefusedError(too_large(3)) from None
    except UnidentifiedImageError:
        raise _unknown(beginning) from None
    except Exception as error:  # a damaged header makes Pillow's readers raise nearly anything
        raise DamagedError(f"{type(error).__name__}: {error}") from None


def refusal(header: Header, channels: int, value_range: Range | None) -> str:
    """Why an image of this header is not read as so many channels; nothing where it is."""
    height, width = header.height, header.width
    if min(height, width) < 1:
        return f"is {width} x {height} pixels; {OTHERWISE}"
    if height * width * max(channels, 3) > MOST_BYTES:
        return f"is {width:,} x {height:,} pixels and {too_large(channels)}"
    if channels != header.planes and not (channels in (1, 3) and header.is_picture):
        return f"has {header.planes} channels and not {channels}: `channels: {header.planes}` in data.yaml reads it"
    if value_range is None and (header.number != "uint" or header.bits > 16):
        return (
            f"holds {header.number}{header.bits} numbers: `range: [low, high]` in data.yaml says which become black "
            "and white; or save uint8 or uint16"
        )
    return tiff.refusal(header.pages[0], channels) if header.pages else ""


def readers() -> tuple[object, ...]:
    """What it depends on here which files are read."""
    return PIL.__version__, _installed("pillow_heif"), _installed("tifffile")


def too_large(channels: int) -> str:
    """The limit, and what to do."""
    return f"has more than the {MOST_BYTES // max(channels, 3):,} pixels that are read; cut it into tiles"


def _of_array(file: BinaryIO) -> Header:
    """The header of a .npy file."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise RefusedError("is an array of structures; save (H, W) or (H, W, C) numbers")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if len(shape) not in (2, 3) or dtype.kind not in "uif":
        raise RefusedError(f"is an array of shape {shape} and type {dtype}; save (H, W) or (H, W, C) numbers")
    planes = shape[2] if len(shape) == 3 else 1
    if planes > shape[0]:
        raise RefusedError(f"is an array of shape {shape}; move the channels to the end by array.transpose(1, 2, 0)")
    number = {"u": "uint", "i": "int", "f": "float"}[dtype.kind]
    return Header("NPY", shape[0], shape[1], 1, planes, planes in (1, 3), 8 * dtype.itemsize, number)


def header_of_pages(pages: tuple[tiff.Page, ...]) -> Header:
    """The header of a TIFF that holds these pages."""
    first = pages[0]
    return Header(
        "TIFF",
        first.height,
        first.width,
        first.orientation,
        tiff.planes(pages),
        first.is_picture,
        first.bits,
        first.number,
        pages=pages,
    )


def _of_pillow(file: BinaryIO, beginning: bytes) -> Header:
    if _brand(beginning, HEIF) and _installed("pillow_heif"):
        from pillow_heif import HeifImageFile

        image = HeifImageFile(file)
    else:
        image = Image.open(file)
        if image.format not in FORMATS:
            raise RefusedError(f"is {image.format}; {OTHERWISE}")
    planes, bits = len(image.getbands()) if image.mode in DATA else 3, 8
    if image.format == "PNG":
        bits, planes = beginning[24], PNG_PLANES[beginning[25]]
    width, height = image.size
    orientation = orientation_in(image.info.get("exif", b""))
    return Header(image.format, height, width, orientation, planes, True, bits, image=image)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _brand(beginning: bytes, brands: tuple[bytes, ...]) -> bool:
    """Whether it is a file of boxes, as HEIF and AVIF are, and of one of these kinds."""
    return beginning[4:8] == b"ftyp" and beginning[8:12] in brands


def _unknown(beginning: bytes) -> Exception:
    """What a file is that Pillow does not know."""
    known = "avif" in features.modules and features.check_module("avif")
    if not known and (_brand(beginning, AVIF) or (_brand(beginning, HEIF) and b"avif" in beginning[16:])):
        return RefusedError(f"is AVIF: a newer Pillow reads it, `pip install -U pillow`; or {OTHERWISE}")
    if _brand(beginning, HEIF) and not _installed("pillow_heif"):
        return RefusedError(f"is HEIF: `pip install pillow-heif` reads it, or {OTHERWISE}")
    return DamagedError("it is no image, or damaged at its beginning")
