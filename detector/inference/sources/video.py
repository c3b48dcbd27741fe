"""Video files, decoded by PyAV.

OpenCV is here anyway and reads video, too, but gives up at the first damaged frame: of a file of 30 with one damaged
it gave 10, and of another none, where PyAV gives all that can be decoded and says of the others that they cannot. It
also has no encoder for H.264, which is what browsers and players open.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import DataError
from detector.inference.sources.frame import Frame, Origin, Reading, tell

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

# How the names of videos end, in any case. What a file is, its content says where it can.
VIDEOS = (
    ".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".asf", ".ts", ".mts", ".m2ts", ".flv",
    ".3gp", ".ogv", ".mjpeg", ".mjpg", ".h264", ".264", ".h265", ".hevc", ".y4m",
)  # fmt: skip
STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"jp2 ")
BEGINNINGS = (b"\x1aE\xdf\xa3", b"FLV\x01", b"\0\0\x01\xba", b"0&\xb2u\x8ef\xcf\x11", b"YUV4MPEG2")  # of video files
STILL_BEGINNINGS = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
BEGINNING = 16  # bytes
FRAMES_OF_JPEG = (".mjpeg", ".mjpg")  # which begin as a picture does
INSTALL = "pip install av"


def is_video(path: Path, beginning: bytes) -> bool:
    """Whether a file is a video: by its content, and where that does not tell by its name.

    `beginning` are its first BEGINNING bytes.
    """
    if beginning[4:8] == b"ftyp":
        return beginning[8:12] not in STILL_BRANDS
    if beginning.startswith(BEGINNINGS) or (beginning[:4] == b"RIFF" and beginning[8:11] == b"AVI"):
        return True
    ending = path.suffix.lower()
    still = beginning.startswith(STILL_BEGINNINGS) or beginning[8:12] == b"WEBP"
    return ending in VIDEOS and (not still or ending in FRAMES_OF_JPEG)


def library(name: str) -> Any:
    """PyAV. Raises DataError where it is not installed, for a source of that name."""
    try:
        return importlib.import_module("av")
    except ImportError:
        raise DataError(f"{name}: video is read and written by PyAV; `{INSTALL}`") from None


def read_video(path: Path, reading: Reading) -> Iterator[Frame]:
    """The frames of a video file that `reading` asks for, each decoded when it is asked for.

    Their times are those that the file gives, counted from its first frame, whatever its rate does. A frame that cannot
    be decoded is passed over; how many these were is told at the end. Raises DataError for a file that is no video or
    has no frame to look at.
    """
    av = library(str(path))
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a video ({_said(error)}); play it, or convert it again") from None
    with container:
        if not container.streams:
            raise DataError(f"{path}: a video that is cut off at its beginning or end; record or copy it again")
        if not container.streams.video:
            raise DataError(f"{path}: holds no pictures, only {_kinds(container)}; name a video")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        origin = _origin(path, stream, container, reading)
        yield from _frames(container, stream, origin, reading)


def _frames(container: InputContainer, stream: VideoStream, origin: Origin, reading: Reading) -> Iterator[Frame]:
    index = _sought(container, stream, reading.start, origin)
    given = decoded = broken = looked_at = 0
    ended = True
    for picture in pictures(container, stream):
        if picture is None:
            broken, index = broken + 1, index + 1
            continue
        time = _time(picture, stream, index)
        number, index, decoded = index, index + 1, decoded + 1
        if reading.stop is not None and time >= reading.stop:
            ended = False
            break
        if time < reading.start - 1e-6:
            continue
        if looked_at % reading.vid_stride == 0:
            given += 1
            yield Frame(pixels_of(picture, reading), origin, number, time)
        looked_at += 1
    if ended and "mp4" not in container.format.name:  # which counts frames, too, that are cut off its beginning
        broken += max(0, stream.frames - index)  # what is lost between frames is lost without a sign
    if broken:
        tell(reading, DataError(f"{origin.name}: {broken} of {broken + decoded} frames cannot be decoded"))
    if not given:
        if decoded:
            raise DataError(f"{origin.name}: no frame from second {reading.start:g} on; name an earlier start=")
        raise DataError(f"{origin.name}: a video without a frame that can be decoded; record or convert it again")


def pictures(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame | None]:
    """The frames of a stream as they are shown; None for each that cannot be decoded.

    A frame that is drawn from one that was lost looks whole to the decoder, and so here.
    """
    errors = library("").error
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except errors.FFmpegError:  # the file ends too early, or is damaged between its frames
            yield None
            return
        try:
            frames = packet.decode()
        except errors.EOFError:
            return
        except errors.FFmpegError:
            yield None
            continue
        for frame in frames:
            yield None if frame.is_corrupt else frame


def pixels_of(picture: VideoFrame, reading: Reading) -> NDArray[np.uint8]:
    """(H, W, C) uint8 of a frame, turned as the file says that it is shown."""
    from detector.data.decoding import in_channels
    from detector.data.faults import DamagedError

    rgb = picture.to_ndarray(format="rgb24")
    turned = np.rot90(rgb, picture.rotation // 90 % 4) if picture.rotation else rgb
    try:
        return np.ascontiguousarray(in_channels(turned, reading.channels, None))
    except DamagedError:
        raise DataError(
            f"a frame of a video has 3 channels, and the network takes {reading.channels}; give arrays of so many"
        ) from None


def _sought(container: InputContainer, stream: VideoStream, start: float, origin: Origin) -> int:
    """Go to the last frame before `start` from which can be decoded; the number of that frame."""
    errors = library("").error
    if start <= 0 or stream.time_base is None:
        return 0
    try:
        container.seek(round(start / stream.time_base) + (stream.start_time or 0), stream=stream, backward=True)
        first = next((frame for frame in pictures(container, stream) if frame is not None), None)
        if first is None or first.pts is None:
            raise ValueError
        container.seek(first.pts, stream=stream, backward=True)
        return _frames_before(first.pts, origin)
    except (errors.FFmpegError, ValueError):  # a stream of bytes without places: decoded from its beginning
        container.seek(0)
        return 0


def _frames_before(pts: int, origin: Origin) -> int:
    """How many frames are shown before one: counted in the file's packets, of which none is decoded."""
    av = library(origin.name)
    with av.open(str(origin.path)) as container:
        count = 0
        for packet in container.demux(container.streams.video[0]):
            if packet.dts is not None and packet.dts > pts:
                break
            count += packet.pts is not None and packet.pts < pts
        return count


def _time(picture: VideoFrame, stream: VideoStream, index: int) -> float:
    """Seconds since the first frame of the file; of a stream without times, by its rate."""
    if picture.pts is None or picture.time_base is None:
        return index / float(stream.guessed_rate or stream.base_rate or 25)
    first = stream.start_time or 0
    return max(0.0, float((picture.pts - first) * picture.time_base))


def _origin(path: Path, stream: VideoStream, container: InputContainer, reading: Reading) -> Origin:
    rate = float(stream.average_rate or stream.guessed_rate or 25)
    seconds = container.duration / 1_000_000 if container.duration else None
    length = stream.frames / rate if stream.frames else seconds
    count = None
    if length is not None:
        end = length if reading.stop is None else min(length, reading.stop)
        count = max(1, round((end - reading.start) * rate / reading.vid_stride))
    return Origin(str(path), "video", path, rate / reading.vid_stride, count)


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _kinds(container: InputContainer) -> str:
    return ", ".join(sorted({stream.type for stream in container.streams}))
