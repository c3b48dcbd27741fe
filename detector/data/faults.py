"""What can be wrong with the content of an image file, and OpenCV asked in a way that tells damage from want of memory.

Both are told to the user by whoever knows the file's name, see `image.decode` and `header.read_header`.
"""

import cv2
import numpy as np


class DamagedError(Exception):
    """The pixels cannot be had: `str` says why, as in 'it ends too early'."""


class RefusedError(Exception):
    """A whole file of a kind that is not read: `str` goes on after the file's name, and ends with what to do."""


def decoded_by_opencv(content: bytes, flags: int) -> np.ndarray | None:
    """What OpenCV decodes; None where it cannot. Raises MemoryError when there is no memory, as far as OpenCV tells."""
    try:
        return cv2.imdecode(np.frombuffer(content, dtype=np.uint8), flags)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(str(error)) from None
        return None
