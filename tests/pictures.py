"""Image files of many kinds, written with Pillow or byte by byte, for tests of how they are read."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

ORIENTATION = 274


def blocks(height: int = 30, width: int = 40, channels: int = 3, seed: int = 0, most: int = 256) -> np.ndarray:
    """(H, W, C) uint8 blocks of 5 x 5 pixels, so that lossy formats keep them."""
    random = np.random.default_rng(seed)
    small = random.integers(0, most, (height // 5, width // 5, channels), dtype=np.uint8)
    return np.kron(small, np.ones((5, 5, 1), np.uint8))


def saved(image: Image.Image, form: str, **options) -> bytes:
    out = io.BytesIO()
    image.copy().save(out, form, **options)  # Pillow leaves settings of a format on what it saved
    return out.getvalue()


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def png(values: np.ndarray, kind: int) -> bytes:
    """A PNG of 16 bits: (H, W) or (H, W, C) uint16 of a kind of pixels (0 grey, 2 RGB, 4 and 6 with alpha)."""
    height, width = values.shape[:2]
    rows = values.astype(">u2").reshape(height, -1)
    data = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(values: np.ndarray, photometric: int = 1, planar: int = 1, orientation: int = 1, subfile: int = 0) -> bytes:
    """A TIFF of one page without compression: (H, W, C) numbers, one after the other or in planes."""
    return tiff_of_pages([values], photometric, planar, orientation, [subfile])


def tiff_of_pages(pages, photometric: int = 1, planar: int = 1, orientation: int = 1, subfiles=None) -> bytes:
    """A TIFF of several such pages."""
    file = bytearray(b"II*\0\0\0\0\0")
    link = 4
    for values, subfile in zip(pages, subfiles or [0] * len(pages), strict=True):
        height, width, channels = values.shape
        data = np.ascontiguousarray(values if planar == 1 else values.transpose(2, 0, 1)).tobytes()
        start = len(file)
        file += data
        strips = 1 if planar == 1 else channels
        each = len(data) // strips
        number = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
        extra = channels - (3 if photometric == 2 else 1)
        tags = [
            (254, "I", [subfile]), (256, "I", [width]), (257, "I", [height]),
            (258, "H", [8 * values.itemsize] * channels), (259, "H", [1]), (262, "H", [photometric]),
            (273, "I", [start + i * each for i in range(strips)]), (274, "H", [orientation]), (277, "H", [channels]),
            (278, "I", [height]), (279, "I", [each] * strips), (284, "H", [planar]),
            *([(338, "H", [0] * extra)] if extra > 0 else []), (339, "H", [number] * channels),
        ]  # fmt: skip
        entries = b""
        for tag, kind, numbers in tags:
            packed = struct.pack(f"<{len(numbers)}{kind}", *numbers)
            if len(packed) > 4:
                place = struct.pack("<I", len(file))
                file += packed + bytes(len(packed) % 2)
                packed = place
            entries += struct.pack("<HHI", tag, {"H": 3, "I": 4}[kind], len(numbers)) + packed.ljust(4, b"\0")
        file += bytes(len(file) % 2)
        struct.pack_into("<I", file, link, len(file))
        file += struct.pack("<H", len(tags)) + entries + bytes(4)
        link = len(file) - 4
    return bytes(file)


def array(values: np.ndarray) -> bytes:
    """A .npy file."""
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()
