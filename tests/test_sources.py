"""Whatever a user points at becomes the images that it shows, in order, or an error that says what to do."""

import io
import re
import threading
import time
import weakref
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from sighted import picture, sighted, write_video

from detector.errors import ConfigError, DataError
from detector.inference.ahead import read_ahead
from detector.inference.detector import check_reading
from detector.inference.sources import Reading, find_sources, read_sources
from detector.inference.sources.find import Camera, Stream
from detector.inference.sources.live import ATTEMPTS, WAITS, DroppedError, EndedError, camera_images, reconnecting
from detector.inference.sources.video import BEGINNING, is_video

av = pytest.importorskip("av")


def frames(source, recursive=False, **reading):
    return list(read_sources(find_sources(source, recursive), Reading(**reading)))


def images(source, **reading):
    return [frame.image for frame in frames(source, **reading)]


def place(image):
    """Where the bar of `sighted.picture` begins, and so its number."""
    return int(np.flatnonzero(image[24].max(axis=1) > 160)[0])


def numbers(found):
    return [round(place(frame.image) / 2) for frame in found]


def save(path, image=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture() if image is None else image).save(path)
    return path


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_folder_gives_images_and_videos_by_name_and_those_below_when_asked(tmp_path):
    for name in ("b.png", "a.png", "sub/c.png", "sub/deep/d.png", ".hidden/e.png", ".f.png"):
        save(tmp_path / name)
    write_video(tmp_path / "aa.mp4", [picture(i) for i in range(3)])
    (tmp_path / "notes.md").write_text("no image")
    found = [str(path.relative_to(tmp_path)) for path in find_sources(tmp_path)]
    assert found == ["a.png", "aa.mp4", "b.png"]
    below = [str(path.relative_to(tmp_path)) for path in find_sources(str(tmp_path), recursive=True)]
    assert below == [*found, "sub/c.png", "sub/deep/d.png"]
    (tmp_path / "above").mkdir()
    save(tmp_path / "above" / "below" / "a.png")
    with pytest.raises(DataError, match="no image there, nor a video; recursive=true"):
        list(find_sources(tmp_path / "above"))


def test_lists_of_lists_generators_and_text_files_are_gone_through_in_order(tmp_path):
    paths = [save(tmp_path / f"{i}.png", picture(i)) for i in range(5)]
    (tmp_path / "some.txt").write_text("\ufeff3.png\n\n 4.png \n", encoding="utf-8")
    mixed = [paths[0], [str(paths[1]), (path for path in [paths[2]])], tmp_path / "some.txt"]
    assert numbers(frames(iter(mixed))) == [0, 1, 2, 3, 4]
    assert numbers(frames(str(tmp_path / "[2-4].png"))) == [2, 3, 4]
    save(tmp_path / "[x].png", picture(9))
    assert numbers(frames(str(tmp_path / "[x].png"))) == [9]


def test_stdin_is_an_image_or_a_list_of_paths(tmp_path, monkeypatch):
    def piped(content):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return frames("-")

    path = save(tmp_path / "a.png", picture(7))
    for content in (path.read_bytes(), f"{path}\n{path}\n".encode()):
        assert numbers(piped(content)) == [7] * (2 if b"\n/" in content else 1)
    for content, told in (
        (b"", "nothing came"),
        (b" \n", "nothing came"),
        (b"\xff\xd8\0\0", "stdin: cannot be decoded"),
    ):
        with pytest.raises(DataError, match=told):
            piped(content)


def test_addresses_cameras_and_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(find_sources(["0", 1, "rtsp://cam/1", "http://cam/live.m3u8"])) == [
        Camera(0), Camera(1), Stream("rtsp://cam/1"), Stream("http://cam/live.m3u8"),
    ]  # fmt: skip
    for address, told in (
        ("https://here.org/a.jpg?size=2", "curl -O https://here.org/a.jpg"),
        ("ftp://here.org/a.mp4", "'ftp' is not read; rtsp"),
        ("none.jpg", "no image there; name an image, a video, a folder or a glob"),
    ):
        with pytest.raises(DataError, match=told.replace("?", r"\?")):
            list(find_sources(address))
    (tmp_path / "0").write_bytes(save(tmp_path / "x.png").read_bytes())
    assert list(find_sources("0")) == [Path("0")]  # a file of that name is meant


def test_a_pattern_is_one_video_of_numbered_images(tmp_path):
    for number in (2, 10, 3, 1, 100):
        save(tmp_path / f"img_{number:02d}.png", picture(number % 20))
    for name in (
        "img_7.png",
        "img_007.png",
        "img_04.jpg",
        "img_xx.png",
        "aimg_05.png",
    ):  # as printf writes none of them
        save(tmp_path / name)
    found = frames(str(tmp_path / "img_%02d.png"))
    assert [frame.index for frame in found] == [1, 2, 3, 10, 100]
    assert numbers(found) == [1, 2, 3, 10, 0]
    assert [frame.time for frame in found] == pytest.approx([0, 1 / 25, 2 / 25, 9 / 25, 99 / 25])
    assert {(frame.origin.kind, frame.origin.count, frame.origin.title) for frame in found} == {("video", 5, "img")}
    assert len({id(frame.origin) for frame in found}) == 1
    assert [frame.index for frame in frames(str(tmp_path / "img_%d.png"))] == [7, 10, 100]
    assert [frame.index for frame in frames(str(tmp_path / "img_%02d.png"), vid_stride=2)] == [1, 3, 100]
    assert [frame.index for frame in frames(str(tmp_path / "img_%02d.png"), start=0.05, stop=3)] == [3, 10]
    (tmp_path / "all.txt").write_text("img_%03d.png\n")
    assert [frame.index for frame in frames(str(tmp_path / "all.txt"))] == [7, 100]


def test_opencv_takes_the_frames_of_a_pattern_in_the_same_order(tmp_path):
    for number in range(12):
        save(tmp_path / f"{number}.png", picture(number))
    pattern = str(tmp_path / "%d.png")
    capture = cv2.VideoCapture(pattern, cv2.CAP_IMAGES)
    theirs = [image[:, :, ::-1] for done, image in iter(capture.read, (False, None)) if done]
    assert [frame.origin.title for frame in frames(pattern)] == [tmp_path.name] * 12
    assert np.array_equal(theirs, images(pattern))


@pytest.mark.filterwarnings("ignore:b01.png")
def test_a_pattern_that_names_nothing_says_why_and_a_file_of_that_name_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "f0001.png")
    (tmp_path / "b01.png").write_bytes(b"")
    for name, told in (
        ("a%04d.png", "a%04d.png: no image of such a name, nor a file; %04d stands for the number of an image"),
        ("f%d.png", "f0001.png is there, which %d writes f1.png"),
        ("f%d_%d.png", "has 2 places for a number"),
        ("none/f%d.png", "its folder cannot be read"),
        ("b%02d.png", "none of its 1 images can be read"),
        ("a%20dog.png", "no image there; name an image"),
    ):
        with pytest.raises(DataError, match=re.escape(told)):
            frames(name)
    with pytest.raises(DataError, match="no image from second 5 on"):
        frames("f%04d.png", start=5)
    with pytest.raises(DataError, match="an image is not fetched from the network"):
        frames("https://here.org/f%04d.png")
    save(tmp_path / "b02.png", picture(5))
    with pytest.warns(UserWarning, match="b01.png"):
        assert numbers(frames("b%02d.png")) == [5]
    save(tmp_path / "f%d.png", picture(3))
    assert numbers(frames("f%d.png")) == [3]


def test_naming_images_opens_none_and_reading_opens_each_once(tmp_path, monkeypatch):
    for number in range(20):
        save(tmp_path / f"{number:02d}.png")
    opened = []
    monkeypatch.setattr("io.open", Counted(opened, io.open))
    monkeypatch.setattr("builtins.open", Counted(opened, open))
    for source in (tmp_path, str(tmp_path / "*.png"), str(tmp_path / "%02d.png")):
        items = list(find_sources(source))
        assert opened == []
        assert len(list(read_sources(items, Reading()))) == 20
        assert sorted(opened) == sorted(str(path) for path in tmp_path.iterdir())
        opened.clear()


class Counted:
    """A function that opens files, and says which."""

    def __init__(self, opened, function):
        self._opened, self._function = opened, function

    def __call__(self, file, *more, **words):
        self._opened.append(str(file))
        return self._function(file, *more, **words)


# --- what is in memory -----------------------------------------------------------------------------------------------

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
ALPHA = np.dstack((RGB, RGB[..., 0]))


@pytest.mark.parametrize(
    ("given", "channels", "saved"),
    [
        (RGB, 3, RGB),
        (RGB[..., 0], 3, RGB[..., 0]),
        (RGB[..., :1], 3, RGB[..., 0]),
        (ALPHA, 3, ALPHA),
        (RGB, 1, RGB),
        (ALPHA, 1, ALPHA),
        (RGB[..., 0], 1, RGB[..., 0]),
        (RGB[..., 0].astype(np.uint16) * 15, 3, RGB[..., 0].astype(np.uint16) * 15),
        (RGB[:1, :1], 3, RGB[:1, :1]),
    ],
    ids=lambda value: f"{value.shape}{value.dtype}" if isinstance(value, np.ndarray) else str(value),
)
def test_an_array_a_pil_image_and_a_file_of_the_same_values_are_one_image(tmp_path, given, channels, saved):
    Image.fromarray(saved).save(tmp_path / "a.png")
    (file,) = images(tmp_path / "a.png", channels=channels)
    (array,) = images(given, channels=channels)
    assert file.dtype == array.dtype == np.uint8
    assert file.shape[2] == channels
    (pillow,) = images(Image.open(tmp_path / "a.png"), channels=channels)
    made_grey = channels == 1 and given.ndim == 3  # which libraries round each in its way
    assert np.abs(file.astype(int) - array).max() <= made_grey
    assert np.abs(file.astype(int) - pillow).max() <= made_grey


def test_orders_of_colours_and_tensors():
    assert np.array_equal(images(RGB[:, :, ::-1], order="bgr")[0], RGB)
    bgra = ALPHA[:, :, [2, 1, 0, 3]]
    assert np.array_equal(images(bgra, order="bgr")[0], RGB)
    tensor = torch.from_numpy(RGB).permute(2, 0, 1)
    for given in (tensor, tensor.float() / 255, tensor.double().div(255).requires_grad_(), tensor[None]):
        assert np.array_equal(images(given)[0], RGB)
    assert len(images(torch.stack([tensor, tensor]))) == 2
    assert np.array_equal(images(tensor.flip(0), order="bgr")[0], RGB)
    assert np.array_equal(images(tensor[:1])[0], np.repeat(RGB[..., :1], 3, axis=2))


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(3, 4, 4) - 2.1, "go from -2.1 to -2.1: divide by 255, or undo"),
        (torch.ones(3, 4, 4) * 255, "go from 255 to 255: divide by 255"),
        (torch.full((3, 4, 4), float("nan")), "nan"),
        (torch.zeros(8, 8, 3), r"tensor.permute\(2, 0, 1\)"),
        (torch.zeros(2, 8, 8, 3), r"tensor.permute\(0, 3, 1, 2\)"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"tensor.to\(torch.uint8\)"),
        (torch.zeros(3, 0, 4), r"tensors are \(C, H, W\)"),
        (torch.zeros(4), r"tensors are \(C, H, W\)"),
    ],
)
def test_a_tensor_that_is_no_image_is_told_how_it_becomes_one(tensor, told):
    with pytest.raises(DataError, match=told):
        images(tensor)


def test_a_pil_image_is_turned_as_its_file_says_and_stays_as_it_was(tmp_path):
    image = Image.fromarray(RGB)
    exif = image.getexif()
    exif[274] = 6
    image.save(tmp_path / "a.png", exif=exif)
    opened = Image.open(tmp_path / "a.png")
    assert np.array_equal(images(opened)[0], np.rot90(RGB, -1))
    assert opened.size == (8, 6)
    palette = Image.fromarray(RGB).quantize(4)
    palette.info["transparency"] = 0
    images(palette)
    assert palette.info["transparency"] == 0


def test_each_page_of_a_tiff_is_an_image_and_a_damaged_one_takes_nothing_from_those_before(tmp_path):
    pages = [Image.fromarray(picture(i, 48 + i)) for i in range(3)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    found = frames(tmp_path / "a.tif")
    assert numbers(found) == [0, 1, 2]
    assert [frame.image.shape[0] for frame in found] == [48, 49, 50]
    assert [frame.index for frame in found] == [0, 1, 2]
    assert {frame.origin.kind for frame in found} == {"pages"}
    pages[0].save(tmp_path / "one.tif")
    assert frames(tmp_path / "one.tif")[0].index is None
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "cut.tif").write_bytes(content[: len(content) * 2 // 3 + 300])
    told = []
    kept = frames(tmp_path / "cut.tif", left_out=told.append)
    assert numbers(kept) == list(range(len(kept)))
    assert 0 < len(kept) < 3


def test_one_pixel_and_forty_thousand_are_looked_at(tmp_path):
    model = sighted()
    wide = np.zeros((30, 40_000, 3), np.uint8)
    wide[:, 20_000:25_000] = 255
    one, long = model.predict([np.full((1, 1, 3), 255, np.uint8), wide])
    assert np.allclose(one.boxes, [[0, 0, 1, 1]])
    assert abs(long.boxes[0, 0] - 20_000) < 1000
    assert long.size == (30, 40_000)


# --- video -----------------------------------------------------------------------------------------------------------


def test_frames_come_with_their_own_times(tmp_path):
    times = [0, 0.04, 0.1, 0.5, 0.51, 2.0, 2.1]
    path = write_video(tmp_path / "a.mp4", [picture(i) for i in range(7)], times=times)
    found = frames(path)
    assert numbers(found) == list(range(7))
    assert [frame.index for frame in found] == list(range(7))
    assert np.allclose([frame.time for frame in found], times, atol=1e-3)
    shifted = write_video(tmp_path / "b.mp4", [picture(i) for i in range(7)], times=[time + 3 for time in times])
    assert np.allclose([frame.time for frame in frames(shifted)], times, atol=1e-3)
    assert found[0].origin is found[-1].origin
    assert found[0].origin.path == path


@pytest.mark.parametrize("bframes", ["0", "3"])
def test_stride_start_and_stop_choose_what_decoding_all_would_give(tmp_path, bframes):
    path = write_video(tmp_path / "a.mp4", [picture(i % 24) for i in range(80)], options={"g": "12", "bf": bframes})
    everything = frames(path)
    assert len(everything) == 80
    for stride, start, stop in ((3, 0, None), (1, 1.0, 1.5), (2, 1.73, None), (7, 0.5, 2.2), (1, 2.6, 9)):
        chosen = [one for one in everything if one.time >= start and (stop is None or one.time < stop)][::stride]
        found = frames(path, vid_stride=stride, start=start, stop=stop)
        assert [one.index for one in found] == [one.index for one in chosen]
        assert [one.time for one in found] == [one.time for one in chosen]
        assert numbers(found) == numbers(chosen)
    with pytest.raises(DataError, match="no frame from second 5 on; name an earlier start="):
        frames(path, start=5)


def test_a_rotation_is_applied_once_and_as_opencv_does(tmp_path):
    path = write_video(tmp_path / "a.mp4", [picture(5)] * 3)
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    upright = frames(path)[0].image
    for quarters, values in ((1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (3, (0, -1, 1, 0))):
        a, b, c, d = ((value << 16).to_bytes(4, "big", signed=True) for value in values)
        zero = bytes(4)
        content[matrix : matrix + 36] = b"".join((a, b, zero, c, d, zero, zero, zero, (1 << 30).to_bytes(4, "big")))
        turned = tmp_path / f"{quarters}.mp4"
        turned.write_bytes(content)
        image = frames(turned)[0].image
        assert np.array_equal(image, np.rot90(upright, -quarters))
        theirs = cv2.VideoCapture(str(turned)).read()[1][:, :, ::-1]
        assert np.abs(image.astype(int) - theirs).mean() < 4


def damage(path, source, start, count=60):
    content = bytearray(source.read_bytes())
    at = int(len(content) * start)
    content[at : at + count] = bytes(i * 37 % 256 for i in range(count))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("codec", "ending"), [("mjpeg", "avi"), ("libx264", "mp4")])
def test_a_broken_frame_is_counted_and_left_out_and_the_others_are_read(tmp_path, codec, ending):
    whole = write_video(tmp_path / f"a.{ending}", [picture(i % 24) for i in range(30)], codec)
    broken = damage(tmp_path / f"b.{ending}", whole, 0.5 if codec == "mjpeg" else 0.3)
    told = []
    found = frames(broken, left_out=told.append)
    assert 20 <= len(found) < 30
    assert f"{30 - len(found)} of 30 frames cannot be decoded" in str(told[0])
    with pytest.warns(UserWarning, match="of 30 frames cannot be decoded"):
        assert len(frames(broken)) == len(found)


def test_what_is_no_video_and_a_video_without_frames_are_told(tmp_path):
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty.mp4").write_bytes(b"")
    whole = write_video(tmp_path / "a.mp4", [picture(i) for i in range(5)]).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        sound = container.add_stream("aac", rate=8000, layout="mono")
        block = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        block.sample_rate = 8000
        container.mux(sound.encode(block))
        container.mux(sound.encode())
    for name, told in (
        ("noise.mp4", "cannot be read as a video"),
        ("empty.mp4", "cannot be read as a video|the file is empty"),
        ("cut.mp4", "cut off at its beginning or end; record or copy it again"),
        ("sound.mp4", "holds no pictures, only audio"),
    ):
        with pytest.raises(DataError, match=told):
            frames(tmp_path / name)


def test_a_video_is_known_by_its_content(tmp_path):
    video = write_video(tmp_path / "a.mp4", [picture()])
    (tmp_path / "a.jpg").write_bytes(video.read_bytes())
    (tmp_path / "b.mp4").write_bytes(save(tmp_path / "b.png").read_bytes())
    avi = write_video(tmp_path / "c.avi", [picture()], "mjpeg")
    (tmp_path / "noending").write_bytes(avi.read_bytes())
    for name, expected in (("a.jpg", True), ("noending", True), ("b.mp4", False)):
        assert is_video(tmp_path / name, (tmp_path / name).read_bytes()[:BEGINNING]) == expected
    assert numbers(frames([tmp_path / "a.jpg", tmp_path / "b.mp4", tmp_path / "noending"])) == [0, 0, 0]


def test_a_grey_network_takes_videos_and_one_of_many_channels_refuses_them(tmp_path):
    path = write_video(tmp_path / "a.mp4", [picture()])
    assert frames(path, channels=1)[0].image.shape == (48, 64, 1)
    with pytest.raises(DataError, match="has 3 channels, and the network takes 5"):
        frames(path, channels=5)


def test_without_pyav_a_video_is_refused_with_what_installs_it(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", [picture()])
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(DataError, match=r"a.mp4: video is read and written by PyAV; `pip install av`"):
        frames(path)


@pytest.mark.parametrize("frames_of_video", [800, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_memory_stays_flat_over_a_long_video(tmp_path, frames_of_video):
    still = [picture(i, 32, 32) for i in range(8)]
    path = write_video(tmp_path / "a.mp4", (still[i % 8] for i in range(frames_of_video)), "mpeg4")
    alive = most = count = 0

    def gone():
        nonlocal alive
        alive -= 1

    for result in sighted(32).stream(path):
        count, alive = count + 1, alive + 1
        weakref.finalize(result.image, gone)
        most = max(most, alive)
    assert count == frames_of_video
    assert most <= 16 + 1  # of one batch


def test_no_more_is_read_ahead_than_two_batches():
    made = 0

    def endless():
        nonlocal made
        while True:
            made += 1
            yield picture(made)

    results = sighted().stream(endless(), batch=4)
    for _ in range(8):
        next(results)
    time.sleep(0.2)
    assert made <= 8 + 4 + 4 + 2
    results.close()
    before = made
    time.sleep(0.1)
    assert made <= before + 1


# --- cameras and streams ---------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when somebody waits, and a little with every look."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds

    def __call__(self):
        self.now += 0.1
        return self.now


def connection(*runs):
    """A source that gives, at each attempt, as many images as the next of `runs` says, and is dropped then."""
    left = iter(runs)

    def attempt():
        count = next(left, 0)
        if count is None:
            raise EndedError
        for i in range(count):
            yield picture(i)
        raise DroppedError("no answer")

    return attempt


def test_a_dropped_stream_is_connected_again_with_growing_waits():
    clock, told = Clock(), []
    reading = Reading(left_out=told.append)
    found = list(reconnecting(connection(2, 0, 0, 1, 1, None), "cam", reading, clock.wait, clock))
    assert [frame.index for frame in found] == [0, 1, 2, 3]
    assert clock.waits == [1, 2, 4, 1, 1]
    assert [frame.time for frame in found] == pytest.approx([0, 0.1, 7.2, 8.3])
    assert len(told) == 5
    assert "cam: dropped (no answer); connecting again in 4 s" in str(told[2])
    assert {frame.origin.kind for frame in found} == {"live"}


def test_a_stream_that_stays_away_is_given_up_and_one_that_was_never_there_at_once():
    clock = Clock()
    found = []
    with pytest.raises(DataError, match=f"{ATTEMPTS} attempts to connect again gave no image"):
        found.extend(reconnecting(connection(3), "cam", Reading(), clock.wait, clock))
    assert clock.waits == [*WAITS, *[WAITS[-1]] * (ATTEMPTS - len(WAITS))]
    clock = Clock()
    with pytest.raises(DataError, match=r"cam: gives no image .no answer.; look whether it is there"):
        list(reconnecting(connection(0), "cam", Reading(), clock.wait, clock))
    assert not clock.waits


def test_stride_and_stop_of_a_stream():
    clock = Clock()
    found = list(reconnecting(connection(100), "cam", Reading(vid_stride=3, stop=1.05), clock.wait, clock))
    assert [frame.index for frame in found] == [0, 3, 6, 9]


def test_a_camera_gives_rgb_and_is_released(monkeypatch):
    class Capture:
        released = 0

        def __init__(self, number):
            self.left = 2 if number == 0 else 0

        def isOpened(self):  # noqa: N802
            return self.left > 0

        def read(self):
            self.left -= 1
            return self.left >= 0, RGB[:, :, ::-1].copy()

        def release(self):
            Capture.released += 1

    monkeypatch.setattr("cv2.VideoCapture", Capture)
    given = camera_images(0, Reading())
    assert np.array_equal(next(given), RGB)
    next(given)
    with pytest.raises(DroppedError, match="it stopped"):
        next(given)
    with pytest.raises(DataError, match=r"camera 3: gives no image .it cannot be opened."):
        frames("3")
    assert Capture.released == 2


def test_an_http_stream_of_video_is_read_and_a_single_image_is_not(tmp_path):
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    write_video(tmp_path / "a.mp4", [picture(i) for i in range(6)])
    (tmp_path / "image").write_bytes(save(tmp_path / "x.jpg").read_bytes())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert numbers(frames(f"{address}/a.mp4")) == list(range(6))
        with pytest.raises(DataError, match="an image is not fetched from the network"):
            frames(f"{address}/image")
        with pytest.raises(DataError, match="gives no image"):
            frames(f"{address}/none.mp4")
    finally:
        server.shutdown()


# --- reading ahead ---------------------------------------------------------------------------------------------------


def test_order_stays_and_errors_come_in_their_place():
    def items():
        yield from range(5)
        raise ValueError("the sixth")

    given = read_ahead(items(), 2)
    assert [next(given) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="the sixth"):
        next(given)


def test_leaving_early_closes_what_is_read_and_ends_the_thread():
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    given = read_ahead(items(), 2)
    next(given)
    given.close()
    assert closed.wait(2)
    assert not [thread for thread in threading.enumerate() if thread.name == "reading ahead"]


def test_of_what_is_live_the_newest_is_looked_at():
    done = threading.Event()

    def items():
        yield from range(50)
        done.set()

    given = read_ahead(items(), 2, newest=lambda item: True)
    seen = [next(given)]
    assert done.wait(2)
    time.sleep(0.05)
    seen += given
    assert seen[-1] == 49
    assert len(seen) <= 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("vid_stride", value) for value in (0, -1, 1.5, True, None)),
        *(("start", value) for value in (-1, float("nan"), float("inf"), None, "2")),
        *(("stop", value) for value in (0, -1, float("nan"), "2")),
        *(("order", value) for value in ("gbr", None)),
        *(("tile", value) for value in (0, 31, 64.5, True)),
        *(("overlap", value) for value in (-0.1, 0.95, 1, float("nan"), "0.2")),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(name, value):
    right = {"vid_stride": 1, "start": 0.0, "stop": None, "order": "rgb", "tile": 64, "overlap": 0.2}
    check_reading(**right)
    check_reading(**{**right, "tile": None, "overlap": None})
    with pytest.raises(ConfigError, match=f"{name}="):
        check_reading(**{**right, name: value})
