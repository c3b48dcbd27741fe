"""From the content of an image file to pixels: one way for each kind of file, the same for whoever asks.

JPEG, PNG and WEBP, which most data sets are of, are decoded by OpenCV, which is faster; TIFF as `tiff.py` says; all
else by Pillow. EXIF orientation is applied here, once. A picture whose end is missing is damaged, in every format,
though some decoders fill in what is not there; what follows the first picture of a file (frames, pages, other bytes)
does not count.
"""

import io
from collections.abc import Iterator
from functools import lru_cache

import cv2
import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from detector.data import tiff
from detector.data.faults import DamagedError, RefusedError, decoded_by_opencv
from detector.data.header import Header, Range, header_of, header_of_pages, refusal
from detector.data.orientation import upright

DEPTHS = (8, 10, 12, 14, 16)  # bits of cameras
BOXED = ("AVIF", "HEIF", "JPEG2000")  # formats whose files are a row of boxes with their lengths
BOXES = (b"ftyp", b"meta", b"mdat", b"moov", b"free", b"skip", b"uuid", b"jP  ", b"jp2h", b"jp2c", b"xml ", b"uinf")

# Of a JPEG: what its markers, after a byte 0xff, mean.
START, END, SCAN = b"\xff\xd8", b"\xff\xd9", 0xDA
WITHOUT_LENGTH = (0x00, 0x01, *range(0xD0, 0xD9))
PNG_END = b"IEND\xaeB`\x82"  # with its checksum
GIF_EXTENSION = 0x21
CODESTREAM = b"\xff\x4f\xff\x51"  # how JPEG 2000's pixels begin
CODESTREAM_BITS = 40  # where the bits of a channel stand, from the second of those markers


def pixels_of(content: bytes, channels: int = 3, value_range: Range | None = None) -> np.ndarray:
    """(H, W, channels) uint8, upright. Raises RefusedError, DamagedError and, without memory for it, MemoryError."""
    return _pixels(content, header_of(io.BytesIO(content)), channels, value_range)


def pages_of(content: bytes, channels: int = 3, value_range: Range | None = None) -> Iterator[np.ndarray]:
    """`pixels_of` each picture of a TIFF that is a page of its own, not a part of the first one."""
    for page in header_of(io.BytesIO(content)).pages:
        yield _pixels(content, header_of_pages((page,)), channels, value_range)


def _pixels(content: bytes, header: Header, channels: int, value_range: Range | None) -> np.ndarray:
    """The pixels of the picture that the header tells of."""
    if reason := refusal(header, channels, value_range):
        raise RefusedError(reason)
    if not is_whole(content, header):
        raise DamagedError("its end is missing")
    try:
        stored, orientation = _stored(content, header, channels)
        pixels = upright(in_channels(stored, channels, value_range), orientation)
    except (RefusedError, DamagedError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes readers raise nearly anything
        raise DamagedError(str(error) or type(error).__name__) from None
    if pixels.shape[:2] != header.upright:
        (height, width), (told_height, told_width) = pixels.shape[:2], header.upright
        raise DamagedError(f"it decodes to {width} x {height} pixels, and its header says {told_width} x {told_height}")
    return pixels


def _stored(content: bytes, header: Header, channels: int) -> tuple[np.ndarray, int]:
    """The first picture in its own number type, (H, W) or (H, W, K), and the orientation still to be applied."""
    if header.form == "NPY":
        return np.load(io.BytesIO(content), allow_pickle=False), 1
    if header.form == "TIFF":
        picture, orientation = tiff.read(content, list(header.pages), channels)
        return (picture if isinstance(picture, np.ndarray) else from_pillow(picture, channels)), orientation
    fast = header.form in ("JPEG", "MPO") or (header.form in ("PNG", "WEBP") and not header.image.is_animated)
    if fast and header.bits <= 8 and channels in (1, 3):
        colours = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
        return _from_opencv(content, colours | cv2.IMREAD_IGNORE_ORIENTATION), header.orientation
    if (deep := _deep(content, header)) is not None:
        return deep, header.orientation
    return from_pillow(header.image, channels), header.orientation


def _deep(content: bytes, header: Header) -> np.ndarray | None:
    """The uint16 values of a picture whose channels have more than 8 bits, which Pillow cuts or scales; else None."""
    if header.form == "JPEG2000":
        sizes = content.find(CODESTREAM) + 2
        deep = content[sizes + CODESTREAM_BITS] & 0x7F >= 8
    else:
        deep = header.form == "PPM" or header.bits == 16
    if not deep:
        return None
    pixels = _from_opencv(content, cv2.IMREAD_UNCHANGED)
    if pixels.dtype != np.uint16:
        return None
    if pixels.ndim == 2:
        return pixels
    return pixels[..., [2, 3]] if header.planes == 2 else pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]


def _from_opencv(content: bytes, flags: int) -> np.ndarray:
    pixels = decoded_by_opencv(content, flags)
    if pixels is None:
        raise DamagedError(complaint(content))
    return pixels


def from_pillow(image: Image.Image, channels: int) -> np.ndarray:
    """Grey, RGB, or the bands as they are; alpha and transparent colours of a palette are passed over."""
    image.load()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return np.asarray(image)
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
    image.info.pop("transparency", None)
    return np.asarray(image.convert({1: "L", 3: "RGB"}.get(channels, image.mode)))


def in_channels(stored: np.ndarray, channels: int, value_range: Range | None) -> np.ndarray:
    """(H, W, channels) uint8 of (H, W) or (H, W, K) values: alpha left out, grey repeated, colours made grey."""
    values = stored if stored.ndim == 3 else stored[..., None]
    if channels in (1, 3) and values.shape[2] != channels:
        values = values[..., : {2: 1, 4: 3}.get(values.shape[2], values.shape[2])]
    pixels = scaled(values, value_range)
    if (pixels.shape[2], channels) == (1, 3):
        pixels = np.repeat(pixels, 3, axis=2)
    elif (pixels.shape[2], channels) == (3, 1):
        pixels = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)[..., None]
    if pixels.shape[2] != channels:
        raise DamagedError(f"it decodes to {pixels.shape[2]} channels, not {channels}")
    return pixels


def scaled(values: np.ndarray, value_range: Range | None) -> np.ndarray:
    """uint8 of values of any type: those of `value_range` from 0 to 255, what lies outside cut off; uint8 stays.

    Without a range the white of uint16 is the largest value that the smallest of DEPTHS bits holds in which all of the
    picture's values fit, so that a 12-bit camera's 4095 is white in a 16-bit file.
    """
    if values.dtype == np.uint8:
        return values
    if value_range is None:
        most = int(values.max())
        value_range = 0, next(2**bits - 1 for bits in DEPTHS if most < 2**bits)
    if values.dtype == np.uint16:
        return _table(*value_range)[values]
    low, high = value_range
    levels = np.rint((values.astype(np.float64) - low) * (255 / (high - low)))
    return np.nan_to_num(levels.clip(0, 255)).astype(np.uint8)  # what is no number becomes 0


@lru_cache(maxsize=8)
def _table(low: float, high: float) -> np.ndarray:
    """(65536,) uint8 that each uint16 value becomes."""
    return np.rint((np.arange(2**16) - low) * (255 / (high - low))).clip(0, 255).astype(np.uint8)


def is_whole(content: bytes, header: Header) -> bool:
    """Whether a file goes on to the end of its picture, as far as its own marks tell; TIFF is looked at by its pages.

    Without this, decoders fail in some releases, and in others return what memory held in place of the missing rows.
    """
    if header.form in ("JPEG", "MPO"):
        return has_end(content)
    if header.form == "PNG":
        return content.rfind(PNG_END) >= 0
    if header.form == "WEBP":
        return len(content) >= 8 + int.from_bytes(content[4:8], "little")
    if header.form == "BMP":
        return all(
            tile[0] != "raw" or tile[2] + tile[3][1] * header.height <= len(content) for tile in header.image.tile
        )
    if header.form == "GIF":
        return _gif_is_whole(content)
    if header.form in BOXED:
        return _boxes_are_whole(content, header)
    return True


def has_end(content: bytes) -> bool:
    """Whether a JPEG's pixels are followed by its end marker.

    The markers before the pixels are walked through because a thumbnail among them has an end of its own.
    """
    position = len(START)
    while 0 <= (position := content.find(b"\xff", position)) < len(content) - 3:
        marker = content[position + 1]
        if marker == SCAN:
            return content.rfind(END, position) >= 0
        if marker == 0xFF:
            position += 1
        elif marker in WITHOUT_LENGTH:
            position += 2
        else:
            position += 2 + int.from_bytes(content[position + 2 : position + 4], "big")
    return False


def _gif_is_whole(content: bytes) -> bool:
    """Whether the blocks of a GIF's first picture are all there, and what comes after them begins."""

    def skipped(position: int) -> int:
        """After a row of blocks with their lengths, the last of which is 0."""
        while position < len(content) and content[position]:
            position += 1 + content[position]
        return position + 1

    def after_colours(flags: int, position: int) -> int:
        return position + (3 * 2 ** (1 + content[flags] % 8) if content[flags] & 0x80 else 0)

    position = after_colours(10, 13)
    while position + 10 < len(content) and content[position] == GIF_EXTENSION:
        position = skipped(position + 2)
    if position + 10 >= len(content):
        return False
    return skipped(after_colours(position + 9, position + 10) + 1) < len(content)


def _boxes_are_whole(content: bytes, header: Header) -> bool:
    """Whether all boxes of a file lie in it; JPEG 2000 has an end marker, too, and may come without boxes."""
    if header.form == "JPEG2000" and content.rfind(END) < content.find(CODESTREAM):
        return False
    if content.startswith(CODESTREAM):
        return True
    position = 0
    while position + 8 <= len(content):
        length = int.from_bytes(content[position : position + 4], "big")
        if length == 1:
            length = int.from_bytes(content[position + 8 : position + 16], "big")
        if length == 0:  # to the end, wherever that is
            return True
        if length < 8 or content[position + 4 : position + 8] not in BOXES:
            break  # something was appended
        position += length
    return position <= len(content)


def complaint(content: bytes) -> str:
    """What a second decoder says of a file that the first could not decode.

    OpenCV tells a failed allocation inside a decoder as it tells damage. Pillow does not: it raises MemoryError.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
    except MemoryError:
        raise
    except UnidentifiedImageError:
        return "it is no image, or damaged at its beginning"
    except Exception as error:  # a damaged file makes Pillow's readers raise nearly anything
        return str(error)
    return "its end is missing or damaged"
