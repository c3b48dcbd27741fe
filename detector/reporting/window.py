"""Results in a window, for who sits before the machine."""

from __future__ import annotations

import os
import sys

import cv2
import numpy as np
from numpy.typing import NDArray

from detector.errors import ConfigError

TITLE = "detector predict"
CLOSING = (27, ord("q"))  # keys: escape, q


class Window:
    """A window that shows one picture after the other. Raises ConfigError where there is no display to show it on."""

    def __init__(self) -> None:
        unix = sys.platform not in ("win32", "darwin")
        if unix and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise ConfigError(
                "show=true: there is no display here (DISPLAY is not set); look at the files that are saved"
            )
        try:
            cv2.namedWindow(TITLE, cv2.WINDOW_NORMAL)
        except cv2.error:
            raise ConfigError(
                "show=true: this OpenCV has no windows; `pip install opencv-python` in place of opencv-python-headless"
            ) from None

    def show(self, rgb: NDArray[np.uint8]) -> bool:
        """Show a picture; whether the window is still wanted: q, escape and closing it end that."""
        cv2.imshow(TITLE, np.ascontiguousarray(rgb[:, :, ::-1]))
        return cv2.waitKey(1) & 0xFF not in CLOSING and cv2.getWindowProperty(TITLE, cv2.WND_PROP_VISIBLE) >= 1

    def close(self) -> None:
        cv2.destroyWindow(TITLE)
