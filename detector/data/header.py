"""Reads the size of an image from its header, without decoding it."""

import os

from PIL import Image

FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")  # Pillow's names of what OpenCV decodes, too
ORIENTATION = 274  # the EXIF tag; 5 to 8 swap height and width


def read_header(path: str | os.PathLike[str]) -> tuple[tuple[int, int] | None, str]:
    """(height, width) after EXIF orientation; or None and the reason."""
    try:
        if os.stat(path).st_size == 0:
            return None, "is empty"
        with Image.open(path) as image:
            if image.format not in FORMATS:
                return None, f"is {image.format}; save it as JPEG or PNG"
            width, height = image.size
            orientation = 1
            if image.format == "TIFF":  # Pillow releases differ in whether `size` is turned already
                width, height = image.tag_v2[256], image.tag_v2[257]
            if image.format != "PNG" or "exif" in image.info:  # else Pillow would decode a PNG in search of EXIF
                orientation = _orientation(image)
    except FileNotFoundError:
        return None, "does not exist"
    except Exception as error:  # a damaged header makes Pillow's readers raise nearly anything
        return None, f"cannot be read ({type(error).__name__}: {error})"
    if min(height, width) < 1:
        return None, f"is {width} x {height} pixels"
    return ((width, height) if orientation in (5, 6, 7, 8) else (height, width)), ""


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF is ignored by decoders, too
        return 1
