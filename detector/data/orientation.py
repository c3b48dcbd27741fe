"""Which way up a picture is: the EXIF orientation, read and applied in one place, so that it is applied once.

1 is upright; 2, 4, 5 and 7 are mirrored, 3, 6 and 8 turned, and 5 to 8 have height and width swapped.
"""

import numpy as np
from PIL import Image

TAG = 274
SWAPPED = (5, 6, 7, 8)


def checked(value: object) -> int:
    """An orientation as it was found, 1 where it means nothing."""
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def orientation_in(exif: bytes) -> int:
    """The orientation that EXIF data tell. Damaged data are passed over, as decoders do."""
    try:
        found = Image.Exif()
        found.load(exif)
        return checked(found.get(TAG, 1))
    except MemoryError:
        raise
    except Exception:  # damage makes Pillow's reader raise nearly anything
        return 1


def upright_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """(height, width) once the orientation is applied."""
    return (width, height) if orientation in SWAPPED else (height, width)


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels, rows and columns first, turned and mirrored as the orientation says."""
    if orientation in SWAPPED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
