"""Cameras, by OpenCV, and streams over the network, by PyAV: images without an end, and what is done when they stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from detector.errors import DataError
from detector.inference.sources.find import Camera, Stream
from detector.inference.sources.frame import Frame, Origin, Reading
from detector.inference.sources.video import library, pictures, pixels_of

WAITS = (1, 2, 4, 8, 16, 30)  # seconds before each attempt to connect again; then the last one
ATTEMPTS = 10  # in a row
TIMEOUT = 10.0  # seconds that a stream may be silent

Images = Callable[[], Iterator[NDArray[np.uint8]]]


class DroppedError(DataError):
    """A camera or a stream that gives no more images for now."""


class EndedError(Exception):
    """A stream whose end is not a failure: it said before how long it is."""


def read_live(source: Camera | Stream, reading: Reading) -> Iterator[Frame]:
    """The images of a camera or a stream, as they come; see `reconnecting`."""
    if isinstance(source, Camera):
        return reconnecting(lambda: camera_images(source.number, reading), f"camera {source.number}", reading)
    return reconnecting(lambda: stream_images(source.address, reading), source.address, reading)


def reconnecting(
    images: Images,
    name: str,
    reading: Reading,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Frame]:
    """Frames of what `images` gives, which is called again, after growing waits, whenever it ends or is dropped.

    Times are seconds since the first image, by this machine's clock. Each drop is told to `reading.left_out`. Raises
    DataError where nothing comes at the first attempt, and after ATTEMPTS in a row that gave no image.
    """
    origin = Origin(name, "live")
    began: float | None = None
    index = failures = 0
    while True:
        try:
            for image in images():
                now = clock()
                began = now if began is None else began
                failures = 0
                if reading.stop is not None and now - began >= reading.stop:
                    return
                if now - began >= reading.start and index % reading.vid_stride == 0:
                    yield Frame(image, origin, index, now - began)
                index += 1
            reason = "it ended"
        except EndedError:
            return
        except DroppedError as error:
            reason = str(error)
        if began is None:
            raise DataError(f"{name}: gives no image ({reason}); look whether it is there and free")
        failures += 1
        if failures > ATTEMPTS:
            raise DataError(f"{name}: dropped ({reason}), and {ATTEMPTS} attempts to connect again gave no image")
        seconds = WAITS[min(failures, len(WAITS)) - 1]
        if reading.left_out is not None:
            reading.left_out(DroppedError(f"{name}: dropped ({reason}); connecting again in {seconds} s"))
        wait(seconds)


def camera_images(number: int, reading: Reading) -> Iterator[NDArray[np.uint8]]:
    """The images of a camera. Raises DroppedError where it cannot be opened or stops."""
    import cv2

    from detector.inference.sources.arrays import image_of_array

    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # pages about what it tried
    try:
        capture = cv2.VideoCapture(number)
    finally:
        cv2.utils.logging.setLogLevel(level)
    try:
        if not capture.isOpened():
            raise DroppedError("it cannot be opened")
        while True:
            done, bgr = capture.read()
            if not done:
                raise DroppedError("it stopped")
            yield image_of_array(bgr[:, :, ::-1], Reading(reading.channels))
    finally:
        capture.release()


def stream_images(address: str, reading: Reading) -> Iterator[NDArray[np.uint8]]:
    """The images of a stream. Raises DroppedError where it fails, EndedError at the end of one of known length."""
    av = library(address)
    options = {"rtsp_transport": "tcp"} if address.lower().startswith("rtsp") else {}
    try:
        container = av.open(address, options=options, timeout=TIMEOUT)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DroppedError(getattr(error, "strerror", None) or str(error)) from None
    with container:
        if not container.streams.video:
            raise DroppedError("it holds no pictures")
        if container.format.name.endswith("_pipe") or container.format.name == "image2":
            raise DataError(f"{address}: an image is not fetched from the network; save it and name the file")
        stream = container.streams.video[0]
        for picture in pictures(container, stream):
            if picture is not None:
                yield pixels_of(picture, reading)
        if container.duration:
            raise EndedError
