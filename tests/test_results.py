"""Results: their forms for other programs, and the files that `detector predict` leaves."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from scenes import TINY
from sighted import picture, sighted, write_video

from detector import checkpoint_file, drawing, fonts
from detector.cli import main
from detector.errors import ConfigError, OutputError
from detector.inference.ahead import Behind
from detector.inference.results import Result
from detector.inference.sources import Origin
from detector.model.network import load_description, network_from_description
from detector.reporting.looking import EVERY, Looking
from detector.reporting.result_files import Names, ResultFiles, Wanted, file_name, label_text
from detector.reporting.video_file import VideoFile

ALL = Wanted(save_txt=True, save_json=True, save_csv=True, save_crop=True)


def found(name="a.png", boxes=((10, 20, 30, 24), (0, 0, 5, 9)), folder=Path("photos"), **more):
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    path = folder / name
    more.setdefault("origin", Origin(str(path), "image", path))
    scores = np.linspace(0.9, 0.5, len(boxes)).astype(np.float32)
    classes = np.arange(len(boxes)) % 2
    return Result(boxes, scores, classes, ("wide", "high"), path, picture(), **more)


def written(tmp_path, results, wanted=ALL):
    def create():
        (tmp_path / "out").mkdir(exist_ok=True)
        return tmp_path / "out"

    files = ResultFiles(create, wanted)
    for result in results:
        (tmp_path / "photos").mkdir(exist_ok=True)
        files.keep(result)
    files.close()
    return sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())


# --- forms -----------------------------------------------------------------------------------------------------------


def test_boxes_in_all_forms_are_the_same_boxes():
    result = found()
    assert result.size == (48, 64)
    assert np.array_equal(result.boxes_xyxy, [[10, 20, 30, 24], [0, 0, 5, 9]])
    assert np.array_equal(result.boxes_xywh, [[20, 22, 20, 4], [2.5, 4.5, 5, 9]])
    assert np.allclose(result.boxes_xyxyn * [64, 48, 64, 48], result.boxes)
    assert np.allclose(result.boxes_xywhn[0], [20 / 64, 22 / 48, 20 / 64, 4 / 48])
    assert result.class_names == ["wide", "high"]
    assert (result.frame, result.time, result.track_ids) == (None, None, None)


def test_json_and_dicts_hold_plain_numbers():
    result = found(frame=3, time=0.1, track_ids=np.array([7, -1]))
    read = json.loads(result.to_json())
    assert read["detections"] == result.to_dicts()
    assert read["detections"][0] == {
        "class": 0, "name": "wide", "score": 0.9, "x1": 10, "y1": 20, "x2": 30, "y2": 24, "track": 7,
    }  # fmt: skip
    assert {key: read[key] for key in ("path", "frame", "time", "height", "width")} == {
        "path": str(Path("photos/a.png")), "frame": 3, "time": 0.1, "height": 48, "width": 64,
    }  # fmt: skip
    assert json.loads(found(boxes=()).to_json())["detections"] == []


def test_supervision_and_pandas_get_the_same_detections(monkeypatch):
    result = found(track_ids=np.array([7, -1]))
    supervision = pytest.importorskip("supervision")
    theirs = result.to_supervision()
    assert isinstance(theirs, supervision.Detections)
    assert np.array_equal(theirs.xyxy, result.boxes)
    assert theirs.tracker_id.tolist() == [7, -1]
    assert list(theirs["class_name"]) == ["wide", "high"]
    assert len(found(boxes=()).to_supervision()) == 0
    for name, make in (("pandas", result.to_pandas), ("supervision", result.to_supervision)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"pip install {name}"):
            make()


def test_crops_are_the_pixels_of_the_boxes():
    image = picture()
    crops = list(found(boxes=((10, 20, 30, 24), (63.5, 47.5, 64, 48), (3.2, 3.2, 3.4, 3.3))).crops())
    assert np.array_equal(crops[0], image[20:24, 10:30])
    assert [crop.shape for crop in crops] == [(4, 20, 3), (1, 1, 3), (1, 1, 3)]


def test_a_result_draws_itself_and_leaves_its_image_alone():
    result = found()
    before = result.image.copy()
    drawn = result.plot()
    assert drawn.dtype == np.uint8
    assert drawn.shape[2] == 3
    assert np.array_equal(result.image, before)
    others = np.abs(drawn.astype(int) - found(boxes=()).plot()).sum(axis=2) > 0
    factor = drawn.shape[0] // 48
    assert others[20 * factor, 15 * factor]
    assert not others[40 * factor, 50 * factor]


def test_boxes_of_a_video_are_where_its_bars_are(tmp_path):
    path = write_video(tmp_path / "a.mp4", [picture(i) for i in range(20)], times=[i * i / 100 for i in range(20)])
    results = sighted().predict(path)
    for i, result in enumerate(results):
        assert result.path == path
        assert result.frame == i
        assert result.time == pytest.approx(i * i / 100, abs=1e-3)
        assert np.allclose(result.boxes, [[2 * i, 20, 2 * i + 16, 28]], atol=1.01)


# --- files -----------------------------------------------------------------------------------------------------------


def test_all_files_of_images(tmp_path):
    photos = tmp_path / "photos"
    results = [found("a.png", folder=photos), found("b.png", (), folder=photos)]
    assert written(tmp_path, results) == [
        "a.jpg", "b.jpg", "crops/high/a_2.jpg", "crops/wide/a_1.jpg", "detections.csv", "detections.json",
        "labels/a.txt", "labels/b.txt",
    ]  # fmt: skip
    lines = (tmp_path / "out/labels/a.txt").read_text().splitlines()
    assert [float(value) for value in lines[0].split()] == pytest.approx(
        [0, 20 / 64, 22 / 48, 20 / 64, 4 / 48, 0.9], abs=1e-5
    )
    rows = list(csv.DictReader((tmp_path / "out/detections.csv").open(encoding="utf-8")))
    assert [row["name"] for row in rows] == ["wide", "high"]
    assert rows[0]["image"] == str(photos / "a.png")
    assert [float(rows[0][side]) for side in ("x1", "y1", "x2", "y2")] == [10, 20, 30, 24]
    assert json.loads((tmp_path / "out/detections.json").read_text())[0] == {
        "image_id": "a", "category_id": 0, "bbox": [10, 20, 20, 4], "score": 0.9,
    }  # fmt: skip
    assert Image.open(tmp_path / "out/crops/wide/a_1.jpg").size == (20, 4)


def test_pycocotools_reads_the_json(tmp_path, capsys):
    coco = pytest.importorskip("pycocotools.coco")
    written(tmp_path, [found(folder=tmp_path / "photos")], Wanted(save=False, save_json=True))
    truth = coco.COCO()
    truth.dataset = {"images": [{"id": "a"}], "categories": [{"id": 0}, {"id": 1}], "annotations": []}
    truth.createIndex()
    assert len(truth.loadRes(str(tmp_path / "out/detections.json")).anns) == 2


def test_an_annotated_video_has_the_frames_times_and_boxes_of_the_results(tmp_path):
    av = pytest.importorskip("av")
    times = [0, 0.04, 0.1, 0.5, 0.51, 2.0]
    (tmp_path / "photos").mkdir()
    path = write_video(tmp_path / "photos" / "a.mp4", [picture(i) for i in range(6)], times=times)
    results = sighted().predict(path)
    assert written(tmp_path, results, Wanted(save_txt=True)) == ["a.mp4", *(f"labels/a_{i:06d}.txt" for i in range(6))]
    with av.open(str(tmp_path / "out" / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        shown = [(float(frame.time), frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
    assert np.allclose([time for time, _ in shown], times, atol=2e-3)
    for result, (_, image) in zip(results, shown, strict=True):
        plot = result.plot()
        image = image[: plot.shape[0], : plot.shape[1]]
        assert image.shape == plot.shape
        assert np.abs(image.astype(int) - plot).mean() < 6


def test_an_even_rate_stays_and_a_stride_keeps_the_speed(tmp_path):
    (tmp_path / "photos").mkdir()
    path = write_video(tmp_path / "photos" / "a.mp4", [picture(i % 20) for i in range(50)], rate=25)
    for stride, rate in ((1, 25), (5, 5)):
        written(tmp_path, sighted().stream(path, vid_stride=stride), Wanted())
        video = cv2.VideoCapture(str(tmp_path / "out" / "a.mp4"))
        assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(rate, rel=0.1)
        assert video.get(cv2.CAP_PROP_FRAME_COUNT) == 50 / stride


def test_names_never_collide():
    names = Names()
    given = [
        names.of(Origin(name, kind, Path(name) if "." in name and "://" not in name else None))
        for name, kind in (
            ("x/a.jpg", "image"), ("y/A.png", "image"), ("z/a.jpg", "image"), ("x/a_2.jpg", "image"),
            ("v/clip.mp4", "video"), ("v/clip_000003.jpg", "image"), ("v/clip_03.jpg", "image"),
            ("rtsp://cam:80/1?x", "live"), ("camera 0", "live"), ("stdin", "image"),
        )
    ]  # fmt: skip
    assert given == [
        "a", "A_2", "a_3", "a_2_2", "clip", "clip_000003_2", "clip_03", "rtsp_cam_80_1_x", "camera_0", "stdin",
    ]  # fmt: skip
    assert file_name("a/b: c?") == "a_b_ c_"
    assert file_name("..") == "_"
    assert file_name("猫") == "猫"


def test_a_second_call_leaves_no_labels_and_tables_of_the_first(tmp_path):
    (tmp_path / "photos").mkdir()
    path = write_video(tmp_path / "photos" / "a.mp4", [picture(i) for i in range(5)])
    written(tmp_path, sighted().stream(path), ALL)
    assert written(tmp_path, sighted().stream(path, stop=0.05), Wanted(save_txt=True)) == [
        "a.mp4", *[f"crops/wide/a_{i:06d}_1.jpg" for i in range(5)], "labels/a_000000.txt", "labels/a_000001.txt",
    ]  # fmt: skip


def test_a_full_disk_is_told_with_its_place(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("detector.reporting.result_files.save_image", full)
    with pytest.raises(OutputError, match="out: cannot be written: No space left on device; make room"):
        written(tmp_path, [found(folder=tmp_path / "photos")])


def test_tracks_are_in_labels_tables_and_pictures(tmp_path):
    result = found(track_ids=np.array([4, -1]), folder=tmp_path / "photos")
    assert [line.split()[-1] for line in label_text(result).splitlines()] == ["4", "-1"]
    written(tmp_path, [result])
    assert json.loads((tmp_path / "out/detections.json").read_text())[0]["track_id"] == 4
    assert "track" in (tmp_path / "out/detections.csv").read_text().splitlines()[0]
    assert not np.array_equal(result.plot(), found().plot())


# --- names in pictures -----------------------------------------------------------------------------------------------


def test_letters_of_many_scripts_are_drawn_and_others_as_numbers(monkeypatch):
    monkeypatch.setattr(fonts, "_of_system", lambda: ())
    fonts.font_file.cache_clear()
    try:
        assert drawing.undrawable(["dog", "собака", "σκύλος", "chien ü", "猫", "강아지"]) == ["猫", "강아지"]
        image = np.zeros((600, 600, 3), np.uint8)
        by_number = drawing.draw_boxes(image, [[100, 300, 500, 500]], [1], ["dog", "1"])
        assert np.array_equal(drawing.draw_boxes(image, [[100, 300, 500, 500]], [1], ["dog", "猫"]), by_number)
    finally:
        fonts.font_file.cache_clear()


def test_a_font_of_the_system_is_taken_for_letters_that_ours_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(fonts, "_of_system", lambda: ("few.ttf", "many.ttf"))
    monkeypatch.setattr(fonts, "letters_of", lambda file: frozenset(map(ord, {"many.ttf": "猫a 1."}.get(file, "abc"))))
    fonts.font_file.cache_clear()
    try:
        assert fonts.font_file("猫 1.a") == "many.ttf"
        assert fonts.font_file("a\ufe0fb\u200dc") == str(fonts._own())
        assert fonts.font_file("犬") is None
    finally:
        fonts.font_file.cache_clear()


# --- threads ---------------------------------------------------------------------------------------------------------


def test_work_behind_is_in_order_and_done_when_the_context_ends_also_after_an_error():
    done = []

    def put_all(work, count):
        with Behind(work, 3) as behind:
            for item in range(count):
                behind.put(item)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put_all(lambda item: (time.sleep(0.001), done.append(item)), 20)
    assert done == list(range(20))


def test_an_error_of_the_work_behind_comes_to_the_caller():
    def fail(item):
        raise OutputError(f"item {item}")

    def put_all(count):
        with Behind(fail, 2) as behind:
            for item in range(count):
                behind.put(item)
                time.sleep(0.001)

    for count in (1, 1000):  # told at the end, and on the way
        with pytest.raises(OutputError, match="item 0"):
            put_all(count)
    assert not [thread for thread in threading.enumerate() if thread.name == "writing behind"]


# --- what is told ----------------------------------------------------------------------------------------------------


class Written(list):
    def write(self, text):
        self.append(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def test_an_image_has_a_line_and_a_video_one_now_and_then():
    now, out = [0.0], Written()
    origin = Origin("a.mp4", "video", Path("a.mp4"), 30, 400)
    with Looking(None, out, Written(), now=lambda: now[0]) as looking:
        looking.tell(found())
        for i in range(400):
            now[0] += EVERY / 100
            looking.tell(found("a.mp4", origin=origin, frame=i, time=i / 30))
    lines = "".join(out).splitlines()
    assert lines[0] == f"{Path('photos/a.png')}: 1 wide, 1 high"
    assert lines[-1] == "a.mp4: 800 objects in 400 frames, 10.0 frames/s"
    assert re.match(r"a\.mp4: 10\d frames of about 400, at 0:03, 1\d\.\d frames/s", lines[1])
    assert len(lines) in (5, 6)


def test_a_bar_is_drawn_on_a_terminal_alone():
    class Terminal(Written):
        def isatty(self):
            return True

    def monitors():
        return [thread for thread in threading.enumerate() if thread.name.startswith("tqdm")]

    bar, before = Terminal(), monitors()  # a library of another test may have one
    with Looking(2, Written(), bar) as looking:
        looking.tell(found())
        looking.tell(found("b.png"))
    assert "/2" in "".join(bar)
    assert "images" in "".join(bar)
    assert monitors() == before


def test_each_video_has_a_bar_of_its_own_and_images_are_counted_among_all_sources():
    class Terminal(Written):
        def isatty(self):
            return True

    bar = Terminal()
    videos = [Origin(f"{name}.mp4", "video", Path(f"{name}.mp4"), 30, count) for name, count in (("a", 3), ("b", 5))]
    pages = Origin("c.tif", "pages", Path("c.tif"))
    with Looking(5, Written(), bar) as looking:
        looking.tell(found())
        for origin in videos:
            for i in range(origin.count):
                looking.tell(found(origin=origin, frame=i))
        for i in range(9):
            looking.tell(found(origin=pages, frame=i))
        looking.tell(found("z.png"))
        looking._bar.refresh()
    shown = [re.findall(r"(\d+)/(\d+) (\w+)", text) for text in bar]
    assert {total for match in shown for _, total, kind in match if kind == "frames"} == {"3", "5"}
    assert {total for match in shown for _, total, kind in match if kind == "images"} == {"5"}
    assert [match for match in shown if match][-1] == [("5", "5", "images")]
    assert looking.images == 1 + 8 + 9 + 1


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    network = network_from_description({**load_description(TINY), "nc": 2})
    path = tmp_path_factory.mktemp("weights") / "best.pt"
    names = ["square", "猫"]
    checkpoint_file.write(
        path, {"ema": network.state_dict(), "description": network.description, "names": names, "imgsz": 64}
    )
    return path


def run(*words):
    return main(["predict", *map(str, words)])


def test_the_command_on_a_video_and_images(tmp_path, weights, capsys):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    write_video(tmp_path / "in" / "a.mp4", [picture(i) for i in range(7)])
    Image.fromarray(picture()).save(tmp_path / "in" / "a.png")
    Image.fromarray(picture()).save(tmp_path / "in" / "sub" / "b.png")
    place = [f"project={tmp_path}", "device=cpu", "conf=0"]
    assert run(weights, tmp_path / "in", *place, "recursive=true", "vid_stride=3", "max_det=2", "save_txt=true") == 0
    shown = capsys.readouterr()
    assert f"{tmp_path / 'in' / 'a.mp4'}: 6 objects in 3 frames" in shown.out
    assert "10 objects in 5 images; pictures in" in shown.out
    if fonts.font_file("猫") is None:
        assert shown.err.count("no font here has the letters of 猫; pictures show their numbers") == 1
    folder = tmp_path / "predict"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    frames = [f"labels/a_00000{i}.txt" for i in (0, 3, 6)]
    assert names == sorted(["a.mp4", "a_2.jpg", "b.jpg", *frames, "labels/a_2.txt", "labels/b.txt"])
    assert run(weights, tmp_path / "in", *place, "save=false", "name=none") == 0
    assert not (tmp_path / "none").exists()
    assert run(weights, tmp_path / "in" / "a.png", *place, "tile=32", "overlap=0.5", "name=tiles") == 0
    assert (tmp_path / "tiles" / "a.jpg").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show=true"], "show=true: there is no display here"),
        (["start=3", "stop=2"], "stop=2.0: should be a number of seconds after start=3.0"),
        (["track=botsort"], "not here: bytetrack"),
        (["vid_stride=0"], "vid_stride"),
        (["save_cropp=true"], "Did you mean 'save_crop'?"),
        (["stride=2"], "The setting here is 'vid_stride'."),
    ],
)
def test_the_command_refuses_with_what_to_do(tmp_path, weights, monkeypatch, capsys, words, told):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert run(weights, tmp_path, f"project={tmp_path}", *words) == 2
    assert told in capsys.readouterr().err


def test_numbered_images_become_one_video(tmp_path, weights, capsys):
    av = pytest.importorskip("av")
    (tmp_path / "in").mkdir()
    for number in (1, 2, 5):
        Image.fromarray(picture(number)).save(tmp_path / "in" / f"img_{number:04d}.png")
    place = [f"project={tmp_path}", "device=cpu", "conf=0", "max_det=1", "save_txt=true"]
    assert run(weights, tmp_path / "in" / "img_%04d.png", *place) == 0
    assert "3 objects in 3 frames" in capsys.readouterr().out
    files = sorted(str(file.relative_to(tmp_path / "predict")) for file in (tmp_path / "predict").rglob("*.*"))
    assert files == ["img.mp4", *(f"labels/img_00000{number}.txt" for number in (1, 2, 5))]
    with av.open(str(tmp_path / "predict" / "img.mp4")) as container:
        assert [frame.time for frame in container.decode(video=0)] == pytest.approx([0, 0.04, 0.16], abs=0.001)
    assert run(weights, tmp_path / "in" / "im_%04d.png", *place) == 2
    assert "no image of such a name" in capsys.readouterr().err


def test_a_single_source_that_cannot_be_read_is_the_error(tmp_path, weights, capsys):
    (tmp_path / "a.mp4").write_bytes(b"")
    assert run(weights, tmp_path / "a.mp4", f"project={tmp_path}") == 2
    error = capsys.readouterr().err
    assert "a.mp4: " in error
    assert "none of the images" not in error
    assert error.count("\n") <= 2
    assert run(weights, "77", f"project={tmp_path}") == 2
    error = capsys.readouterr().err
    assert "DataError: camera 77: gives no image (it cannot be opened)" in error
    assert "none of the images" not in error
    assert not (tmp_path / "predict").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stop_in_the_middle_leaves_what_was_found_whole(tmp_path, weights, number):
    av = pytest.importorskip("av")
    path = write_video(tmp_path / "a.mp4", (picture(i % 20) for i in range(4000)), "mpeg4")
    words = [
        weights,
        path,
        f"project={tmp_path}",
        "device=cpu",
        "save_csv=true",
        "save_json=true",
        "conf=0.0",
        "max_det=3",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "detector", "predict", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's `&` has it ignored
    )
    began = time.monotonic()
    while not (tmp_path / "predict" / ".a.mp4.unfinished").exists() and time.monotonic() - began < 120:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert b"stopped by" in error
    assert b"Traceback" not in error
    with av.open(str(tmp_path / "predict" / "a.mp4")) as container:
        frames = sum(1 for _ in container.decode(video=0))
    rows = list(csv.DictReader((tmp_path / "predict" / "detections.csv").open(encoding="utf-8")))
    assert 0 < frames < 4000
    assert [int(row["frame"]) for row in rows] == [i for i in range(frames) for _ in range(3)]
    assert len(json.loads((tmp_path / "predict" / "detections.json").read_text())) == len(rows)
    assert not list((tmp_path / "predict").glob(".*"))


def test_a_path_and_an_image_come_by_stdin(tmp_path, weights, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(picture()).save(tmp_path / "a.png")
    for content, name in ((b"a.png\n", "a.jpg"), ((tmp_path / "a.png").read_bytes(), "stdin.jpg")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert run(weights, "-", f"project={tmp_path}", "device=cpu", "conf=0", f"name=from_{name}") == 0
        assert (tmp_path / f"from_{name}" / name).exists()


def test_frames_of_odd_sides_and_of_another_size_fit_into_a_video(tmp_path):
    av = pytest.importorskip("av")
    video = VideoFile(tmp_path / "a.mp4", 29.97)
    for size in ((33, 47), (33, 47), (70, 80)):
        video.write(np.full((*size, 3), 200, np.uint8), None)
    assert not (tmp_path / "a.mp4").exists()
    video.close()
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = list(container.decode(video=0))
    assert [(frame.height, frame.width) for frame in frames] == [(34, 48)] * 3
    assert np.allclose([frame.time for frame in frames], np.arange(3) / 29.97, atol=1e-4)


# --- tracking --------------------------------------------------------------------------------------------------------


def test_objects_keep_their_numbers_through_a_video(tmp_path):
    pytest.importorskip("trackers")

    def scene(i):
        image = np.full((64, 96, 3), 30, np.uint8)
        image[10:22, 2 + i : 26 + i] = 250  # moves to the right
        if i != 10:  # is away for one frame
            image[40:60, 70 - i : 80 - i] = 250  # and to the left
        return image

    path = write_video(tmp_path / "a.mp4", [scene(i) for i in range(30)], options={"crf": "5"})
    results = sighted(96).predict([path, path], track="bytetrack")
    assert len(results) == 60
    for run_of in (results[:30], results[30:]):
        ids = {0: set(), 1: set()}
        for result in run_of[3:]:
            for label, track in zip(result.classes.tolist(), result.track_ids.tolist(), strict=True):
                ids[label].add(track)
        assert all(len(one) == 1 for one in ids.values())
        assert -1 not in ids[0] | ids[1]
        assert not ids[0] & ids[1]
    assert results[29].to_dicts()[0]["track"] >= 0


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install trackers"):
        sighted().stream(picture(), track="bytetrack")
    with pytest.raises(ConfigError, match="should be 'bytetrack'"):
        sighted().stream(picture(), track="sort")


def test_of_boxes_below_conf_those_stay_that_continue_a_track():
    pytest.importorskip("trackers")
    from detector.inference.tracking import tracked

    def result(score, boxes=((10, 10, 40, 40),)):
        boxes = np.array(boxes, np.float32)
        return Result(boxes, np.full(len(boxes), score, np.float32), np.zeros(len(boxes), int), ("a",), None, picture())

    given = [result(0.9), result(0.9), result(0.15), result(0.15, ((200, 200, 220, 220),))]
    assert [len(one) for one in tracked(iter(given), 0.5)] == [1, 1, 1, 0]
