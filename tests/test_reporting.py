"""Pictures, plots, tables and progress: they exist, can be read and say what they were given."""

import csv
import io
import math
import os
import re
import subprocess
import sys
import threading

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from test_coco import random_set

from detector.drawing import class_colour, draw_boxes, grid, label_picture, save_image
from detector.errors import DataError
from detector.evaluation.coco import build_ground_truth
from detector.evaluation.curves import ConfusionMatrix, compute_curves
from detector.evaluation.evaluate import judge
from detector.fonts import drawable, font
from detector.model.selection import Detections
from detector.reporting.plots import DPI, plot_confusion, plot_f1, plot_history, plot_pr
from detector.reporting.progress import Bar, Pace, Progress, clock, process_memory, reading_bar
from detector.reporting.samples import training_batch_image, validation_image
from detector.reporting.table import format_class_table, write_csv


def grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 128, dtype=np.uint8)


def read(path) -> np.ndarray:
    image = cv2.imdecode(np.fromfile(path, dtype=np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return image[..., ::-1]


def test_box_is_drawn_where_it_is_in_the_colour_of_its_class():
    image = grey(600, 800)
    drawn = draw_boxes(image, [[100, 200, 300, 400]], [3], ("a", "b", "c", "d"))
    assert drawn.shape == image.shape
    assert drawn.dtype == np.uint8
    assert (image == 128).all()  # the input is left alone
    for y, x in ((300, 100), (300, 299), (399, 200)):
        assert tuple(drawn[y, x]) == class_colour(3)
    assert (drawn[210:390, 110:290] == 128).all()
    assert (drawn[:160] == 128).all()
    assert (drawn[:, :95] == 128).all()
    assert (drawn[160:200, 100:130] != 128).any()  # the label above the box


def test_boxes_and_labels_are_those_that_pillow_draws_alone():
    image = np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    boxes = np.array([[50.6, 60.2, 160.9, 140.4], [300, 200.7, 302.1, 380], [420.5, 300, 799.9, 599.9]])
    names, scores = ("straße", "猫" if drawable("猫") else "Ёлка", "x"), [0.912, 0.5, 0.07]
    drawn = draw_boxes(image, boxes, [0, 1, 7], [*names[:2], *"abcde", names[2]], scores)
    canvas = Image.fromarray(image)
    pen = ImageDraw.Draw(canvas)
    line, size = 2, 17  # of the pen, in a picture of this size
    for (left, top, right, bottom), c in zip(boxes.tolist(), (0, 1, 7), strict=True):
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=class_colour(c), width=line)
    for (left, top, _, _), c, name, score in zip(boxes.tolist(), (0, 1, 7), names, scores, strict=True):
        text = f"{name} {score:.2f}"
        text_font = font(size, text)
        width, height = math.ceil(pen.textlength(text, font=text_font) + size * 0.6), math.ceil(size * 1.35)
        x, y = int(left), int(top - height)
        pen.rounded_rectangle((x, y, x + width - 1, y + height - 1), radius=height // 5, fill=class_colour(c))
        ink = (20, 20, 20) if np.dot(class_colour(c), (0.299, 0.587, 0.114)) > 150 else (255, 255, 255)
        pen.text((x + width / 2, y + height / 2), text, fill=ink, font=text_font, anchor="mm")
    assert np.array_equal(drawn, np.asarray(canvas))


def test_a_label_is_rendered_once_and_a_font_loaded_once_a_size():
    label_picture.cache_clear()
    for _ in range(3):
        draw_boxes(grey(600, 800), [[100, 200, 300, 400], [400, 200, 600, 400]], [0, 0], ("dog",), [0.5, 0.25])
    assert label_picture.cache_info().misses == 2
    assert font(17, "dog 0.5") is font(17, "dog 0.25") is font(17, "Größe")


def test_boxes_that_are_partly_or_wholly_outside_are_drawn_as_far_as_they_are_seen():
    boxes = np.array([[-1e9, -50, 1e9, 30], [700, 500, 900, 700], [-90, -90, -20, -20], [790, 590, 800, 600]])
    drawn = draw_boxes(grey(600, 800), boxes, [0, 1, 2, 3], "abcd")
    assert (drawn[28:30, 200:] == class_colour(0)).all()
    assert (drawn[520:, 700:702] == class_colour(1)).all()
    assert (drawn[590, 790:] == class_colour(3)).all()
    assert not (drawn == class_colour(2)).all(axis=2)[100:500].any()
    wide = draw_boxes(grey(20, 600), [[0, 0, 600, 20]], [0], ("a name that is wider than the picture " * 3,))
    assert wide.shape == (20, 600, 3)


def test_small_images_are_enlarged_and_boxes_with_them():
    drawn = draw_boxes(grey(100, 200), [[50, 25, 150, 75]], [0], ("a",))
    assert drawn.shape == (300, 600, 3)
    assert tuple(drawn[150, 150]) == tuple(drawn[150, 449]) == class_colour(0)
    assert draw_boxes(grey(100, 200), np.zeros((0, 4)), [], ("a",), long_side=400).shape == (200, 400, 3)


def test_labels_beyond_ascii_and_at_the_border_are_drawn():
    boxes = [[-20, -20, 640, 480], [0, 0, 5, 5], [630, 470, 640, 480]]
    plain = draw_boxes(grey(480, 640), boxes, [0, 1, 1], ("", ""))
    named = draw_boxes(grey(480, 640), boxes, [0, 1, 1], ("naïve Größe", "Ёлка"), scores=[0.5, 0.4, 0.3])
    assert named.shape == plain.shape
    assert (named != plain).any()


def test_colours_of_classes_differ():
    assert len({class_colour(c) for c in range(200)}) == 200


def test_grid_puts_images_in_order_with_titles():
    images = [np.full((20, 30, 3), 10 * i, dtype=np.uint8) for i in range(1, 6)]
    page = grid(images, columns=2, gap=4)
    assert page.shape == (3 * 24 + 4, 2 * 34 + 4, 3)
    for i in range(5):
        assert tuple(page[4 + 24 * (i // 2) + 10, 4 + 34 * (i % 2) + 15]) == (10 * (i + 1),) * 3
    with_titles = grid(images, columns=2, titles=["a rather long title that cannot fit"] * 5)
    assert with_titles.shape[0] > page.shape[0]


@pytest.mark.parametrize("name", ["a.png", "bild größer 图.jpg"])
def test_saved_image_can_be_read_at_any_path(tmp_path, name):
    image = grey(40, 60)
    image[:, :30] = (200, 30, 30)
    save_image(tmp_path / "new folder" / name, image)
    assert np.abs(read(tmp_path / "new folder" / name).astype(int) - image).mean() < 3


def test_unknown_kind_of_picture_is_an_error_that_says_so(tmp_path):
    with pytest.raises(DataError, match=r"\.bmpp.*use \.jpg or \.png"):
        save_image(tmp_path / "a.bmpp", grey(4, 4))


def test_training_page_shows_each_box_on_its_own_image():
    images = torch.full((5, 64, 64, 3), 128, dtype=torch.uint8)
    boxes, classes, index = torch.tensor([[8.0, 8, 56, 56]] * 2), torch.tensor([0, 1]), torch.tensor([1, 4])
    page = training_batch_image(images, boxes, classes, index, ("a", "b"), max_images=4)
    blank = training_batch_image(images, boxes[:0], classes[:0], index[:0], ("a", "b"), max_images=4)
    assert page.shape == blank.shape
    rows, columns = np.nonzero((page != blank).any(axis=2))
    assert rows.max() < page.shape[0] // 2
    assert columns.min() > page.shape[1] // 2


def test_validation_page_has_truth_left_and_confident_detections_right():
    found = Detections(torch.tensor([[5.0, 5, 30, 30], [9, 9, 20, 20]]), torch.tensor([0.9, 0.1]), torch.tensor([0, 0]))
    page = validation_image([grey(40, 60), grey(60, 40)], [[[5, 5, 30, 30]], []], [[0], []], [found, found], ("a",))
    confident = [found.above(0.25)] * 2
    same = validation_image([grey(40, 60), grey(60, 40)], [[[5, 5, 30, 30]], []], [[0], []], confident, ("a",))
    assert np.array_equal(page, same)
    other = validation_image([grey(40, 60), grey(60, 40)], [[], []], [[], []], confident, ("a",))
    columns = np.nonzero((page != other).any(axis=(0, 2)))[0]
    assert len(columns)
    assert columns.max() < page.shape[1] // 2


def history(epochs: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for epoch in range(epochs):
        row = {
            "epoch": epoch,
            "box": 3 / (epoch + 2),
            "cls": 2 / (epoch + 2),
            "dfl": 1.0,
            "lr": 0.01 * (1 - epoch / 60),
        }
        if epoch % 2 == 0:
            row |= {"mAP50": 1 - 0.9**epoch, "mAP50-95": (1 - 0.9**epoch) * rng.uniform(0.4, 0.6)}
        rows.append(row)
    return rows


def test_history_plot(tmp_path):
    plot_history(history(60), tmp_path / "a.png")
    plot_history(history(60, seed=1), tmp_path / "b.png")
    first, second = read(tmp_path / "a.png"), read(tmp_path / "b.png")
    assert first.shape == second.shape == (round(3.9 * DPI), round(12 * DPI), 3)
    assert (first != second).any()


def test_history_plot_of_the_first_epoch_and_of_odd_values(tmp_path):
    plot_history([{"epoch": 0, "box": 1.0, "mAP50": "", "mAP50-95": float("nan"), "lr": "0.01"}], tmp_path / "a.png")
    assert read(tmp_path / "a.png").std() > 0


@pytest.mark.parametrize("nc", [1, 3, pytest.param(80, marks=pytest.mark.long)])
def test_curve_and_confusion_plots(tmp_path, nc):
    names = [f"class {c}" for c in range(nc)]
    pictures = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        truth, detections, _ = random_set(seed, nc=nc + 1)
        curves = compute_curves(truth, detections, nc + 1)
        confusion = ConfusionMatrix(rng.integers(0, 50, (nc + 1, nc + 1)), 0.25, 0.45)
        plot_pr(curves, [*names, "none"], tmp_path / f"pr{seed}.png")
        plot_f1(curves, [*names, "none"], tmp_path / f"f1{seed}.png")
        plot_confusion(confusion, names, tmp_path / f"confusion{seed}.png")
        pictures.append([read(tmp_path / f"{kind}{seed}.png") for kind in ("pr", "f1", "confusion")])
    for first, second in zip(*pictures, strict=True):
        assert first.shape == second.shape
        assert min(first.shape[:2]) > 500
        assert (first != second).any()


def test_matplotlib_is_loaded_by_the_first_plot_and_pyplot_never(tmp_path):
    code = (
        "import sys, detector.reporting.plots as plots; print('matplotlib' in sys.modules);"
        "plots.plot_history([{'epoch': 0, 'box': 1.0}], sys.argv[1]);"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]


def test_csv_has_all_keys_in_stable_order_and_six_digits(tmp_path):
    path = tmp_path / "sub" / "metrics.csv"
    write_csv(
        path, [{"epoch": 0, "box": 1.23456789, "note": "a, b"}, {"epoch": 1, "mAP50": 1e-9, "box": np.float32(2)}]
    )
    with path.open(newline="") as file:
        assert file.readline() == "epoch,box,note,mAP50\n"
        file.seek(0)
        rows = list(csv.DictReader(file))
    assert rows[0] == {"epoch": "0", "box": "1.23457", "note": "a, b", "mAP50": ""}
    assert rows[1] == {"epoch": "1", "box": "2", "note": "", "mAP50": "1e-09"}


def test_csv_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    write_csv(path, [{"epoch": 0}])

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_csv(path, [{"epoch": 1}])
    assert path.read_text() == "epoch\n0\n"
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_class_table_says_the_numbers_of_the_evaluation():
    truth = build_ground_truth(
        [100, 100], [100, 100], [[[0, 0, 50, 50]], [[0, 0, 20, 20], [50, 50, 90, 90]]], [[0], [0, 1]]
    )
    right = Detections(torch.tensor([[0.0, 0, 50, 50]]), torch.tensor([0.9]), torch.tensor([0]))
    wrong = Detections(torch.tensor([[70.0, 0, 90, 20]]), torch.tensor([0.8]), torch.tensor([0]))
    evaluation = judge(truth, [right, wrong], ("dog", "a longer name", "absent"))
    lines = format_class_table(evaluation, ("dog", "a longer name", "absent")).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[2].split()[:3] == ["all", "2", "3"]
    assert lines[3].split() == ["dog", "2", "2", "1.000", "0.500", "0.505", "0.505"]
    assert lines[4].split() == ["a", "longer", "name", "1", "1", "0.000", "0.000", "0.000", "0.000"]
    assert lines[5].split() == ["absent", "0", "0", "-", "-", "-", "-"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_epoch(stream, memory=3 * 2**30):
    with Progress(2, 60, images=205, start=5, stream=stream) as progress:
        for done in (69, 133, 205):
            progress.update(done, {"box": 1.5, "cls": 2.25, "dfl": 0.75}, 0.01, 4, memory)


def test_log_file_gets_one_plain_line_per_epoch():
    stream = io.StringIO()
    run_epoch(stream)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "\r" not in text
    assert "\x1b" not in text
    for part in ("epoch 3/60", "205/205", "box 1.500 cls 2.250 dfl 0.750", "lr 1.00e-02", "acc 4", "img/s", "3.00 GiB"):
        assert part in text
    assert re.search(r"run \d+:\d\d left", text)


def test_terminal_gets_a_bar():
    stream = Terminal()
    run_epoch(stream)
    last = stream.getvalue().split("\r")[-1]
    assert "epoch 3/60" in last
    assert "205/205" in last
    assert "box 1.500" in last
    assert "eta" in last


def test_remaining_time_counts_this_epoch_and_those_to_come(monkeypatch):
    now = iter([0.0, 10.0])
    monkeypatch.setattr("detector.reporting.progress.time.perf_counter", lambda: next(now))
    stream = io.StringIO()
    progress = Progress(1, 4, images=200, start=100, stream=stream)
    progress.update(150, {"box": 1.0}, 0.01, 1, 0)  # 50 images in 10 s: 5 img/s; 50 + 2 * 200 images are left
    progress.close()
    progress.close()
    assert "5.0 img/s" in stream.getvalue()
    assert "run 1:30 left" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_remaining_time_goes_by_the_epoch_before_once_there_is_one(monkeypatch):
    """Epochs of 200 images at 0.1 s and 5 s beside: after 50 images of the third of 4, in which all is slow."""
    now = iter([0.0, 10.0])
    monkeypatch.setattr("detector.reporting.progress.time.perf_counter", lambda: next(now))
    pace, stream = Pace(), io.StringIO()
    pace.take(200, 20.0, 5.0)
    progress = Progress(2, 4, images=200, stream=stream, pace=pace)
    progress.update(50, {"box": 1.0}, 0.01, 1, 0)
    progress.close()
    assert "run 0:50 left" in stream.getvalue()  # 350 images, two validations and the last


def test_share_of_the_time_that_was_waited_for_data(monkeypatch):
    now = iter([0.0, 2.0, 5.0, 12.0])
    monkeypatch.setattr("detector.reporting.progress.time.perf_counter", lambda: next(now))
    stream = io.StringIO()
    with Progress(0, 1, images=10, stream=stream) as progress:
        with progress.waiting():
            pass
        progress.update(10, {"box": 1.0}, 0.01, 1, 0)
    assert "waited 25%" in stream.getvalue()


def test_clock():
    assert [clock(s) for s in (7.4, 750, 10925, 183725)] == ["0:07", "12:30", "3:02:05", "2d 3:02:05"]


def test_memory_of_this_process_is_in_bytes():
    assert 10 * 2**20 < process_memory() < 2**40


def test_bars_start_no_thread(monkeypatch):
    """With a thread beside it a process cannot fork its loaders."""
    monkeypatch.setattr(Bar, "monitor", None)
    before = threading.enumerate()
    for stream in (Terminal(), io.StringIO()):
        show = reading_bar("train", stream)
        show(1, 2)
        show(2, 2)
        with Progress(0, 1, 2, stream=stream) as progress:
            progress.update(2, {"box": 1.0}, 0.01, 1)
    assert threading.enumerate() == before
