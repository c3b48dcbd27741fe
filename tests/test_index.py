"""The data-set description, YOLO labels and the packed index."""

import io
import os
import tempfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from detector.data.description import load_description
from detector.data.formats.yolo import label_path, parse_labels
from detector.data.image import DamagedImageError, letterbox, letterbox_geometry, read_image
from detector.data.reading import build_index
from detector.errors import DataError

NAMES = "names: {0: cat, 1: dog}\n"
SPLITS = "train: images/train\nval: images/val\n"


def write_image(path: Path, width: int = 20, height: int = 10, orientation: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[274] = orientation
    Image.new("RGB", (width, height), (200, 10, 30)).save(path, exif=exif)


def write_label(image: Path, text: str) -> None:
    label = label_path(image)
    label.parent.mkdir(parents=True, exist_ok=True)
    label.write_text(text)


def make_set(root: Path, label: str = "0 .5 .5 .5 .5\n", description: str = SPLITS + NAMES) -> Path:
    for split in ("train", "val"):
        for number in range(2):
            image = root / "images" / split / f"{number}.png"
            write_image(image)
            write_label(image, label)
    path = root / "data.yaml"
    path.write_text(description)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SPLITS, "'names' is missing"),
        ("val: images/val\n" + NAMES, "'train' is missing"),
        ("train: images/train\nval:\n" + NAMES, "'val' is missing"),
        (SPLITS + "names: {0: cat, 2: dog}\n", "none with the number 1"),
        (SPLITS + "names: {a: cat}\n", "the key 'a'"),
        (SPLITS + "names: []\n", "names is"),
        (SPLITS + "names: [cat, no]\n", "class 1 is False.*quotes"),
        (SPLITS + NAMES + "nc: 3\n", "nc is 3 but names has 2"),
        (SPLITS + NAMES + "path: 3\n", "path is 3"),
        ("train: [3]\nval: images/val\n" + NAMES, "train holds 3"),
        ("train: {\n", "not valid YAML"),
        ("- a\n", "holds list"),
    ],
)
def test_wrong_description_is_named(tmp_path, text, message):
    path = tmp_path / "data.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as error:
        load_description(path)
    assert str(path) in str(error.value)


def test_missing_description_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_description(tmp_path / "absent.yaml")


def test_description_reads_names_in_order_and_ignores_download(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text("path: set\ndownload: import os\nnc: 2\nnames: {1: dog, 0: cat}\ntest:\n" + SPLITS)
    description = load_description(path)
    assert description.names == ("cat", "dog")
    assert description.root == tmp_path / "set"
    assert description.splits == {s: [tmp_path / "set" / "images" / s] for s in ("train", "val")}
    assert description.generate is None


@pytest.mark.parametrize("form", ["folder", "list file", "list with ./", "absolute list", "list of folders", "mixed"])
def test_every_form_of_a_split_finds_the_same_images(tmp_path, form):
    path = make_set(tmp_path)
    write_image(tmp_path / "images" / "train" / "deep" / "2.JPG")
    images = sorted((tmp_path / "images" / "train").rglob("*.*"))
    images = [image for image in images if image.is_file()]
    relative = [image.relative_to(tmp_path).as_posix() for image in images]
    entry = {
        "folder": "images/train",
        "list file": "lists/train.txt",
        "list with ./": "train.txt",
        "absolute list": "train.txt",
        "list of folders": "[images/train, images/train/deep]",
        "mixed": "[images/train/deep, train.txt]",
    }[form]
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("\n".join(f"../{name}" for name in relative))
    lines = [str(image) for image in images] if form == "absolute list" else [f"./{name}" for name in relative]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n\n")
    path.write_text(f"train: {entry}\nval: images/val\n" + NAMES)
    index = build_index(load_description(path), "train")
    assert [index.path(i).resolve() for i in range(len(index))] == sorted(images, key=str)
    assert ("more than once" in "".join(index.warnings)) == (form in ("list of folders", "mixed"))


def test_labels_lie_in_place_of_the_last_images_folder():
    assert label_path(Path("/images/set/images/a/images.jpg")) == Path("/images/set/labels/a/images.txt")
    assert label_path(Path("/set/a.b.png")) == Path("/set/a.b.txt")
    assert label_path(Path("/set/images")) == Path("/set/images.txt")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2 .5 .5 .1 .1", "class 2 is outside 0..1"),
        ("-1 .5 .5 .1 .1", "class -1 is outside"),
        ("0.5 .5 .5 .1 .1", "class 0.5 is not a whole number"),
        ("cat .5 .5 .1 .1", "class 'cat' is not a number"),
        ("0 .5 nan .1 .1", "y 'nan' is not a number"),
        ("0 1.37 .5 .1 .1", r"x 1.37 is outside 0..1 \(fractions of the image's width; divide pixels by it\)"),
        ("0 .5 .5 .1 40", "height 40 is outside 0..1"),
        ("0 .5 .5 .1", "has 4 columns"),
        ("0 .5 .5 .1 .1 .9", "has 6 columns"),
        ("0 .5 .5 .1 .1 .9 .9 .9", "has 8 columns"),
        ("0 .5 .5 .1 .1 .9 1.5", "y 1.5 is outside"),
        ("0", "has 1 columns"),
    ],
)
def test_wrong_label_is_named_with_file_and_line(tmp_path, row, message):
    path = make_set(tmp_path, f"0 .5 .5 .5 .5\n\n{row}\n")
    with pytest.raises(DataError, match=message) as error:
        build_index(load_description(path), "train")
    first, *places = str(error.value).splitlines()
    assert first == "2 labels break a rule:"
    assert [place[: place.index(":3: ")] for place in places] == [
        str(tmp_path / "labels" / "train" / f"{number}.txt") for number in range(2)
    ]


def test_one_wrong_label_is_the_whole_message(tmp_path):
    path = make_set(tmp_path)
    (tmp_path / "labels" / "train" / "1.txt").write_text("0 .5 .5 .1")
    with pytest.raises(DataError, match=r"\A.*1\.txt:1: has 4 columns.*\Z"):
        build_index(load_description(path), "train")


@pytest.fixture
def many_wrong_labels(tmp_path, monkeypatch) -> Path:
    """A data set of which every row is wrong, 24 in all, with a byte in a path that is no UTF-8."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    root = tmp_path / os.fsdecode(b"set\xff")
    return make_set(root, "".join(f"{number + 2} .5 .5 .1 .1\n" for number in range(12)))


def test_many_wrong_labels_are_all_written_to_a_file_and_the_first_ten_shown(tmp_path, many_wrong_labels):
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(DataError) as error:
        build_index(load_description(many_wrong_labels), "train")
    first, *shown, last = str(error.value).splitlines()
    assert first == "24 labels break a rule:"
    assert len(shown) == 10
    assert last.startswith("and 14 more; all of them are listed in ")
    new = sorted({*tmp_path.rglob("*")} - {*before})
    assert last.endswith(str(new[0]))
    assert [path.parent for path in new] == [tmp_path / "temporary"]
    written = os.fsdecode(new[0].read_bytes()).splitlines()
    assert written[:10] == shown
    labels = many_wrong_labels.parent / "labels" / "train"
    assert [line[: line.index(": ")] for line in written] == [
        f"{labels / f'{image}.txt'}:{row}" for image in range(2) for row in range(1, 13)
    ]


@pytest.mark.parametrize("place", ["a file", "missing"])
def test_wrong_labels_are_told_where_no_file_can_be_written(tmp_path, many_wrong_labels, monkeypatch, place):
    folder = tmp_path / "nowhere"
    if place == "a file":
        folder.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(DataError, match="and 14 more; their list cannot be written") as error:
        build_index(load_description(many_wrong_labels), "train")
    assert len(str(error.value).splitlines()) == 12


def test_only_the_main_rank_writes_the_file(tmp_path, many_wrong_labels, monkeypatch):
    monkeypatch.setattr("detector.data.reading.is_main", lambda: False)
    with pytest.raises(DataError, match="24 labels break a rule"):
        build_index(load_description(many_wrong_labels), "train")
    assert not list((tmp_path / "temporary").iterdir())


def test_label_that_is_not_text_is_named(tmp_path):
    path = make_set(tmp_path)
    (tmp_path / "labels" / "train" / "1.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match=r"1\.txt: cannot be read as text"):
        build_index(load_description(path), "train")


def test_flat_repeated_and_clipped_boxes_are_counted(tmp_path):
    rows = ["0 .5 .5 .5 .5", "0 .5 .5 .5 .5", "1 .5 .5 0 .5", "1 .5 .5 .5 -.1", "1 1.0005 .5 .2 .2", "0 .9 .5 .4 .2"]
    index = build_index(load_description(make_set(tmp_path, "\n".join(rows))), "train")
    boxes = [[5, 2.5, 15, 7.5], [18.01, 4, 20, 6], [14, 4, 20, 6]]
    assert index.boxes_xyxy(0) == pytest.approx(np.array(boxes))
    assert index.labels(0).tolist() == [0, 1, 0]
    text = "\n".join(index.warnings)
    assert "4 boxes without width" in text
    assert "2 rows that repeat" in text
    assert "4 boxes reach outside" in text
    assert f"{tmp_path / 'labels' / 'train' / '0.txt'}:3" in text


def test_polygon_becomes_its_bounding_box():
    parsed = parse_labels("1 .1 .2 .5 .3 .2 .8 .4 .4", "a.txt", 2)
    assert parsed.boxes_xywh == pytest.approx(np.array([[0.3, 0.5, 0.4, 0.6]]))
    outside = parse_labels("1 .1 .2 1.0008 .3 .2 .8", "a.txt", 2)
    assert outside.boxes_xywh == pytest.approx(np.array([[0.55, 0.5, 0.9, 0.6]]))
    assert [(finding.kind, finding.place) for finding in outside.findings] == [("clipped box", "a.txt:1")]


def test_rounding_of_the_last_written_decimal_is_not_worth_a_warning():
    parsed = parse_labels("0 0.91725 0.5 0.16555 1.0\n0 0.917 0.5 0.168 1.0", "a.txt", 1)
    assert [(finding.kind, finding.place) for finding in parsed.findings] == [("clipped box", "a.txt:2")]
    right = parsed.boxes_xywh[:, 0] + parsed.boxes_xywh[:, 2] / 2
    assert right == pytest.approx((1, 1), abs=1e-12)


def test_unreadable_images_are_counted_and_left_out(tmp_path):
    path = make_set(tmp_path)
    folder = tmp_path / "images" / "train"
    (folder / "empty.jpg").touch()
    (folder / "text.png").write_text("not an image")
    (folder / "notes.txt").write_text("no image by name")
    index = build_index(load_description(path), "train")
    assert len(index) == 2
    assert len(index.warnings) == 1
    assert index.warnings[0].startswith("2 unreadable images were left out")
    assert "empty.jpg: cannot be read (the file is empty)" in index.warnings[0]
    path.write_text("train: list.txt\nval: images/val\n" + NAMES)
    (tmp_path / "list.txt").write_text("images/train/0.png\nimages/train/gone.png\n")
    assert "gone.png: does not exist" in build_index(load_description(path), "train").warnings[0]


def test_missing_label_file_is_a_background_image(tmp_path):
    path = make_set(tmp_path)
    (tmp_path / "labels" / "train" / "0.txt").unlink()
    (tmp_path / "labels" / "train" / "1.txt").write_text("0 .5 .5 .5 .5")
    index = build_index(load_description(path), "train")
    assert index.boxes_xyxy(0).shape == (0, 4)
    assert len(index.labels(0)) == 0
    assert len(index.labels(1)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no labels", r"none of the 2 images has a label file; looked for .*labels.train.0\.txt"),
        ("no images", "holds no images"),
        ("no folder", "does not exist"),
        ("empty list", "lists no images"),
        ("one image", "is an image"),
        ("all unreadable", "none of its images can be read"),
    ],
)
def test_split_that_cannot_be_used_stops_with_its_reason(tmp_path, change, message):
    path, entry = make_set(tmp_path), "images/train"
    images = sorted((tmp_path / "images" / "train").iterdir())
    if change == "no labels":
        for file in (tmp_path / "labels" / "train").iterdir():
            file.unlink()
    elif change == "no images":
        for file in images:
            file.unlink()
    elif change == "all unreadable":
        for file in images:
            file.write_bytes(b"")
    elif change == "empty list":
        entry = "list.txt"
        (tmp_path / "list.txt").write_text("\n")
    else:
        entry = "images/train/0.png" if change == "one image" else "images/elsewhere"
    path.write_text(f"train: {entry}\nval: images/val\n" + NAMES)
    with pytest.raises(DataError, match=message):
        build_index(load_description(path), "train")


def test_split_that_is_not_described_is_named(tmp_path):
    with pytest.raises(DataError, match="'test' is missing"):
        build_index(load_description(make_set(tmp_path)), "test")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_of_headers_are_those_of_decoded_images(tmp_path, suffix, orientation):
    path = make_set(tmp_path)
    image = tmp_path / "images" / "train" / f"turned.{suffix}"
    write_image(image, 30, 16, orientation)
    index = build_index(load_description(path), "train")
    assert index.path(2) == image
    assert (index.heights[2], index.widths[2]) == read_image(image).shape[:2]


def test_packed_arrays_equal_a_slow_parse(tmp_path):
    random = np.random.default_rng(0)
    expected = {}
    for number in range(30):
        image = tmp_path / "images" / "train" / f"{number}ü.png"
        write_image(image, *random.integers(5, 60, 2).tolist())
        rows = []
        for _ in range(random.integers(0, 6)):
            size = random.uniform(0.05, 0.4, 2)
            rows.append((int(random.integers(2)), *random.uniform(size / 2, 1 - size / 2), *size))
        write_label(image, "\n".join(" ".join(map(repr, map(float, row))) for row in rows))
        expected[image] = rows
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/train\n" + NAMES)
    index = build_index(load_description(tmp_path / "data.yaml"), "train")
    assert [index.path(i) for i in range(30)] == sorted(expected)
    for i in range(30):
        rows, size = expected[index.path(i)], Image.open(index.path(i)).size
        assert (index.widths[i], index.heights[i]) == size
        assert index.labels(i).tolist() == [row[0] for row in rows]
        boxes = [
            [(x - w / 2) * size[0], (y - h / 2) * size[1], (x + w / 2) * size[0], (y + h / 2) * size[1]]
            for _, x, y, w, h in rows
        ]
        assert index.boxes_xyxy(i) == pytest.approx(np.array(boxes).reshape(-1, 4), abs=1e-9)
    assert index.boxes_xywh.dtype == np.float64
    assert index.heights.dtype == np.int32


def test_image_that_is_not_there_is_named_and_not_called_damaged(tmp_path):
    with pytest.raises(DataError, match=r"a\.png: cannot be read") as error:
        read_image(tmp_path / "a.png")
    assert not isinstance(error.value, DamagedImageError)


def encoded(form: str) -> bytes:
    """A picture in a file of this form."""
    random = np.random.default_rng(0)
    picture = Image.fromarray(
        np.kron(random.integers(0, 256, (9, 12, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
    )
    options = {
        "progressive": {"format": "JPEG", "progressive": True},
        "restarts": {"format": "JPEG", "restart_marker_rows": 1},
        "thumbnail": {"format": "JPEG", "exif": b"Exif\0\0" + encoded("jpeg") if form == "thumbnail" else b""},
        "MPO": {"format": "MPO", "save_all": True, "append_images": [picture]},
    }
    out = io.BytesIO()
    picture.save(out, **options.get(form, {"format": form.upper()}))
    return out.getvalue()


@pytest.mark.parametrize("form", ["jpeg", "progressive", "restarts", "thumbnail", "png", "bmp", "tiff", "webp", "gif"])
@pytest.mark.parametrize("filled", [False, True])
def test_image_that_is_cut_short_is_damaged(tmp_path, form, filled):
    """Wherever it is cut, and where its length is right but zeros follow, which a copy that broke off leaves behind."""
    content, path = encoded(form), tmp_path / "a.img"
    path.write_bytes(content)
    assert read_image(path).shape == (72, 96, 3)
    if filled and form in ("bmp", "tiff", "webp"):
        pytest.skip("zeros are as good as other pixels to this format")
    last = len(content) - (20 if filled else 2)  # zeros in place of a PNG's end alone leave all its pixels
    for cut in np.linspace(0, last, 40).astype(int).tolist():
        path.write_bytes(content[:cut] + bytes(len(content) - cut if filled else 0))
        with pytest.raises(DamagedImageError, match=r"a\.img: cannot be decoded \(.+\); replace it"):
            read_image(path)


def test_an_image_is_whole_whatever_follows_it(tmp_path):
    content, path = encoded("jpeg"), tmp_path / "a.jpg"
    path.write_bytes(content)
    expected = read_image(path)
    two = encoded("MPO")  # two pictures, of which the first is decoded
    for whole in (content + b"junk", content + bytes(100), two, two[: len(two) * 3 // 4]):
        path.write_bytes(whole)
        assert np.array_equal(read_image(path), expected)


@pytest.mark.parametrize("place", ["imdecode", "inside a decoder"])
def test_want_of_memory_is_no_damage(tmp_path, monkeypatch, place):
    path = tmp_path / "a.png"
    path.write_bytes(encoded("png"))

    def fails(*arguments):
        error = cv2.error("Insufficient memory")
        error.code = cv2.Error.StsNoMem
        if place == "imdecode":
            raise error  # inside a decoder OpenCV catches it itself, and returns None

    def fails_too(*arguments):
        raise MemoryError

    monkeypatch.setattr(cv2, "imdecode", fails)
    monkeypatch.setattr(Image, "open", fails_too)
    with pytest.raises(MemoryError):
        read_image(path)


def test_images_are_read_as_rgb(tmp_path):
    write_image(tmp_path / "ü.png")
    assert read_image(tmp_path / "ü.png")[0, 0].tolist() == [200, 10, 30]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 400), st.integers(1, 400), st.sampled_from([64, 96, 160]), st.sampled_from([32, 64]), st.booleans()
)
def test_letterbox_is_tight_and_centred_with_its_long_side_as_asked(height, width, imgsz, stride, rect):
    image = np.zeros((height, width, 3), dtype=np.uint8)
    out, mapping = letterbox(image, imgsz, stride, rect)
    inside = np.argwhere((out == 0).all(axis=2))
    (top, left), (bottom, right) = inside.min(axis=0), inside.max(axis=0) + 1
    assert np.all(out[:top] == 114)
    assert np.all(out[:, right:] == 114)
    ratio = imgsz / max(height, width)
    assert (bottom - top, right - left) == (max(1, round(height * ratio)), max(1, round(width * ratio)))
    assert max(bottom - top, right - left) == imgsz
    assert 0 <= out.shape[0] - bottom - top <= 1
    assert 0 <= out.shape[1] - right - left <= 1
    if rect:
        assert out.shape[0] % stride == out.shape[1] % stride == 0
        assert out.shape[0] - (bottom - top) < stride
        assert out.shape[1] - (right - left) < stride
    else:
        assert out.shape[:2] == (imgsz, imgsz)
    assert letterbox_geometry(height, width, imgsz, stride, rect)[0] == out.shape[:2]
    corner = np.array((width, height)) * (mapping.ratio_x, mapping.ratio_y) + (mapping.left, mapping.top)
    assert corner == pytest.approx((right, bottom))
    assert (mapping.height, mapping.width) == (height, width)


def test_letterbox_puts_a_marked_pixel_where_its_mapping_says():
    image = np.zeros((90, 150, 3), dtype=np.uint8)
    image[60:66, 90:99] = 255
    out, mapping = letterbox(image, 50)
    rows, columns = np.nonzero(out[..., 0] > 200)
    expected = [
        90 * mapping.ratio_x + mapping.left,
        60 * mapping.ratio_y + mapping.top,
        99 * mapping.ratio_x + mapping.left,
        66 * mapping.ratio_y + mapping.top,
    ]
    assert [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] == pytest.approx(expected)


def test_reading_a_list_changes_nothing_on_disk(tmp_path):
    path = make_set(tmp_path)
    before = sorted(os.walk(tmp_path))
    build_index(load_description(path), "train")
    assert sorted(os.walk(tmp_path)) == before
