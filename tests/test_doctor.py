"""The doctor of a data set: each fault is found once, at its place; what is well has none; three printers, one list."""

import io
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from PIL import Image

from detector.cli import main
from detector.config.settings import Settings
from detector.data.counts import CELLS, box_sides, count
from detector.data.description import load_description
from detector.data.doctor import examine
from detector.data.duplicates import nearest
from detector.data.findings import KINDS
from detector.data.index import Index
from detector.data.pixels import difference_hash
from detector.data.reading import Reading, build_index
from detector.errors import DataError
from detector.reporting.data_page import page, worst_images
from detector.reporting.data_report import as_json, lines_of
from detector.run.build import read_indices

NAMES = ["cat", "dog", "bird", "fish", "Fish ", "ghost"]


def picture(seed, height=64, width=96):
    """An image unlike all others: coarse noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


class DataSet:
    """A data set that is being written: each image has its own seed unless another's is given."""

    def __init__(self, root, names=NAMES):
        self.root, self.seed = root, 0
        root.mkdir(exist_ok=True)
        self.write("data.yaml", f"train: images/train\nval: images/val\nnames: {json.dumps(names)}\n")

    def write(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def add(self, name, labels="0 .5 .5 .4 .4\n", seed=None, content=None, **how):
        """An image and its labels, for example `train/a.jpg`."""
        self.seed += 1
        if content is None:
            file = io.BytesIO()
            Image.fromarray(picture(self.seed if seed is None else seed)).save(
                file, "JPEG" if name.endswith("jpg") else "PNG", **how
            )
            content = file.getvalue()
        self.write(f"images/{name}", content)
        if labels is not None:
            self.write(f"labels/{name.rpartition('.')[0]}.txt", labels)
        return self

    @property
    def yaml(self):
        return str(self.root / "data.yaml")

    def findings(self, **how):
        """{kind: [places, from the data set's folder]}"""
        description = load_description(self.yaml)
        found = defaultdict(list)
        for _, finding in examine(description, list(description.splits), **how).findings:
            found[finding.kind].append(finding.place.removeprefix(f"{description.root}/"))
        return dict(found)


def sound(root, names=("cat", "dog")):
    """A data set in which nothing is wrong."""
    data = DataSet(root, list(names))
    for split, images in (("train", 6), ("val", 3)):
        for i in range(images):
            data.add(f"{split}/{i}.jpg", f"{i % 2} .5 .5 .4 .4\n{(i + 1) % 2} .2 .2 .1 .15\n")
    return data


@pytest.fixture(scope="module")
def ill(tmp_path_factory):
    """A data set with one of each fault."""
    data = DataSet(tmp_path_factory.mktemp("ill") / "set")
    data.write(
        "data.yaml",
        "train: [images/train, again.txt]\nval: images/val\ntest: images/test\nnames: " + json.dumps(NAMES) + "\n",
    )
    data.add("train/well.jpg").add("train/listed.jpg").write("again.txt", "images/train/listed.jpg\n")
    data.add("train/bad.jpg", "0 .5 .5 .4 .4\n1 .5 1.4 .2 .2\n").add("train/nameless.jpg", "\n9 .5 .5 .3 .3\n")
    data.add("train/binary.jpg", b"\xff\xfe\x00").write("labels/train/lost.txt", "0 .5 .5 .1 .1\n")
    data.add("train/empty.jpg", content=b"")
    data.add("train/boxes.jpg", "0 .2 .2 .1 .1\n0 .2 .2 .1 .1\n0 .6 .6 .2 0\n0 -.0005 .5 .0005 .1\n1 .95 .95 .2 .2\n")
    data.add("train/tiny.jpg", "0 .5 .5 .002 .4\n")
    data.add("train/twins.jpg", "0 .5 .5 .4 .4\n0 .501 .5 .4 .4\n1 .2 .2 .2 .2\n0 .2 .2 .199 .2\n")
    data.add("train/bare.jpg", None).add("train/background.jpg", "")
    data.add("train/cut.jpg", content=jpeg(99)[:-300])
    exif = Image.Exif()
    exif[274] = 6
    data.add("train/turned.jpg", exif=exif)
    data.add("train/first.png", seed=500).add("train/second.png", seed=500)
    data.add("train/third.png", "0 .4 .4 .2 .2\n", seed=500)
    data.add("train/sharp.jpg", seed=600, quality=95).add("train/soft.jpg", seed=600, quality=40)
    data.add("train/known.png", seed=700).add("val/known.png", seed=700)
    data.add("train/scene.jpg", seed=800, quality=95).add("val/scene.jpg", seed=800, quality=40)
    data.add("train/bird.jpg", "2 .5 .5 .3 .3\n").add("val/dog.jpg", "1 .5 .5 .3 .3\n")
    data.add("val/fish.jpg", "3 .5 .5 .3 .3\n4 .3 .3 .1 .1\n3 .8 .8 .1 .1\n")
    data.add("train/fish.jpg", "4 .5 .5 .3 .3\n")
    return data


def jpeg(seed):
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, "JPEG")
    return file.getvalue()


EXPECTED = {
    "bad row": ["labels/train/bad.txt:2", "labels/train/nameless.txt:2"],
    "bad file": ["labels/train/binary.txt"],
    "nameless class": ["data.yaml"],
    "unreadable image": ["images/train/empty.jpg"],
    "listed twice": ["images/train/listed.jpg"],
    "no picture": ["labels/train/lost.txt"],
    "repeated box": ["labels/train/boxes.txt:2"],
    "flat box": ["labels/train/boxes.txt:3"],
    "outside box": ["labels/train/boxes.txt:4"],
    "clipped box": ["labels/train/boxes.txt:5"],
    "no test": ["data.yaml"],
    "untrained class": ["data.yaml"],
    "damaged image": ["images/train/cut.jpg"],
    "leaked image": ["images/val/known.png"],
    "leaked scene": ["images/val/scene.jpg"],
    "contradiction": ["images/train/third.png"],
    "same image": ["images/train/second.png", "images/train/third.png"],
    "same scene": ["images/train/soft.jpg"],
    "no label": ["images/train/bare.jpg"],
    "turned image": ["images/train/turned.jpg"],
    "tiny box": ["labels/train/tiny.txt:1"],
    "doubled box": ["labels/train/twins.txt:2"],
    "two classes": ["labels/train/twins.txt:4"],
    "unmeasured class": ["data.yaml"],
    "empty class": ["data.yaml"],
    "alike names": ["data.yaml"],
}


def test_each_fault_is_found_once_at_its_place(ill):
    assert ill.findings() == EXPECTED


def test_the_texts_name_what_is_meant(ill):
    description = load_description(ill.yaml)
    texts = {finding.kind: str(finding) for _, finding in examine(description, ["train", "val"]).findings}
    for kind, part in {
        "nameless class": "labels of class 9: 1; `names` ends at 5",
        "untrained class": "class 3 (fish): none in train, 2 in val",
        "unmeasured class": "class 2 (bird): 1 in train, none in val",
        "empty class": "class 5 (ghost)",
        "alike names": "'fish' and 'Fish '",
        "leaked image": f"is the same file as train: {ill.root}/images/train/known.png",
        "leaked scene": f"looks like train: {ill.root}/images/train/scene.jpg",
        "tiny box": "1.3 x 170.7 pixels at imgsz 640",
        "two classes": "lies on that of line 3",
        "turned image": "orientation 6",
    }.items():
        assert part in texts[kind], kind


def test_without_the_pixels_the_others_are_found(ill):
    decoded = {"damaged image", "leaked image", "leaked scene", "contradiction", "same image", "same scene"}
    left = {kind: places for kind, places in EXPECTED.items() if kind not in decoded | {"turned image"}}
    assert ill.findings(pixels=False) == left


def test_a_sound_set_has_no_findings(tmp_path):
    assert sound(tmp_path / "set").findings() == {}


def test_every_kind_is_told_in_words():
    assert all(kind.severity in ("error", "warning", "note") and kind.told for kind in KINDS.values())


# --- whole splits ----------------------------------------------------------------------------------------------------


def test_labels_in_pixels_are_told_as_such(tmp_path):
    data = sound(tmp_path / "set")
    for i in range(6):
        data.write(f"labels/train/{i}.txt", f"{i % 2} 48 32 20 10\n")
    found = data.findings()
    assert found["in pixels"] == ["labels/train/0.txt:1"]
    assert len(found["bad row"]) == 6


def test_one_row_in_pixels_is_a_bad_row_and_no_more(tmp_path):
    data = sound(tmp_path / "set").add("train/x.jpg", "0 48 32 20 10\n")
    assert data.findings() == {"bad row": ["labels/train/x.txt:1"]}


def test_corners_in_place_of_centre_and_size_are_told_as_such(tmp_path):
    data = DataSet(tmp_path / "set", ["a"])
    random = np.random.default_rng(0)
    for i in range(30):
        low, side = random.uniform(0.05, 0.7, 2), random.uniform(0.1, 0.25, 2)
        data.add(f"train/{i}.png", "0 " + " ".join(f"{value:.4f}" for value in (*low, *(low + side))) + "\n")
    data.add("val/0.png")
    found = data.findings()
    assert len(found["as corners"]) == 1
    assert found["as corners"][0] in found["clipped box"]


def test_large_objects_in_the_middle_are_no_corners(tmp_path):
    data = DataSet(tmp_path / "set", ["a"])
    for i in range(30):
        data.add(f"train/{i}.png", f"0 .5 .5 {0.8 + i / 200} {0.9 + i / 400}\n")
    data.add("val/0.png")
    assert data.findings() == {}


def test_classes_counted_from_one(tmp_path):
    data = DataSet(tmp_path / "set", ["a", "b", "c"])
    for split in ("train", "val"):
        for i in range(6):
            data.add(f"{split}/{i}.png", f"{1 + i % 3} .5 .5 .4 .4\n")
    found = data.findings()
    assert found["ids from 1"] == ["data.yaml"]
    assert found["nameless class"] == ["data.yaml"]
    assert len(found["bad row"]) == 4


def test_a_first_class_that_is_used_somewhere_counts_from_zero(tmp_path):
    data = DataSet(tmp_path / "set", ["a", "b", "c"])
    data.add("train/0.png", "1 .5 .5 .4 .4\n3 .2 .2 .1 .1\n0 .7 .7 1.5 .1\n2 .5 .5 .1 .1\n")
    data.add("val/0.png", "1 .5 .5 .4 .4\n2 .1 .1 .1 .1\n")
    assert "ids from 1" not in data.findings()


def test_too_few_label_files_are_an_error_as_in_training(tmp_path):
    data = sound(tmp_path / "set")
    for i in range(4):
        (data.root / f"labels/train/{i}.txt").unlink()
    found = data.findings()
    assert found["missing labels"] == ["data.yaml"]
    assert len(found["no label"]) == 4
    assert "missing labels" not in data.findings(reading=Reading(max_missing_labels=0.7))


def test_a_split_that_is_not_there_is_an_error_and_the_others_are_looked_at(tmp_path):
    data = sound(tmp_path / "set")
    data.write("data.yaml", "train: images/train\nval: images/nowhere\nnames: [cat, dog]\n")
    assert data.findings() == {"bad split": ["data.yaml"]}
    data.write("data.yaml", "train: images/nowhere\nval: images/nothing\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match="nowhere does not exist"):
        data.findings()


def test_a_coco_set(tmp_path):
    data = DataSet(tmp_path / "set")
    for split in ("train", "val"):
        for name in ("a", "b"):
            data.add(f"{split}/{name}.png", None)
        image = {"width": 96, "height": 64}
        content = {
            "images": [{"id": 7, "file_name": "a.png", **image}, {"id": 9, "file_name": "b.png", **image}],
            "annotations": [{"id": 3, "image_id": 7, "category_id": 5, "bbox": [10, 10, 30, 30]}],
            "categories": [{"id": 5, "name": "cat"}],
        }
        if split == "train":
            content["images"][1]["width"] = 95
            content["images"].append({"id": 11, "file_name": "gone.png", **image})
            content["annotations"] += [
                {"id": 4, "image_id": 7, "category_id": 6, "bbox": [10, 10, 30, 30]},
                {"id": 5, "image_id": 7, "category_id": 5, "bbox": [10, 10, 30, 29.5]},
                {"id": 6, "image_id": 9, "category_id": 5, "bbox": [10, 10, 0.1, 30]},
                {"id": 7, "image_id": 9, "category_id": 5, "bbox": [10, 10, 0.1, 30], "iscrowd": 1},
            ]
        data.write(f"{split}.json", json.dumps(content))
    data.write(
        "data.yaml",
        "train: {images: images/train, annotations: train.json}\nval: {images: images/val, annotations: val.json}\n",
    )
    assert data.findings() == {
        "bad row": ["train.json: annotation 4"],
        "no image": ["train.json: image 11"],
        "other size": ["train.json: image 9"],
        "tiny box": ["train.json: annotation 6"],
        "doubled box": ["train.json: annotation 5"],
    }


# --- before training -------------------------------------------------------------------------------------------------


def test_a_run_is_told_of_classes_that_are_never_trained(tmp_path):
    data = sound(tmp_path / "set", ("cat", "dog", "fish", "ghost"))
    data.add("val/fish.jpg", "2 .5 .5 .3 .3\n")
    said = []
    read_indices(Settings(data=data.yaml), said.append)
    assert len(said) == 1
    assert "class 2 (fish): none in train, 1 in val" in said[0]


def test_a_run_is_told_of_ids_that_seem_to_begin_at_one(tmp_path):
    data = sound(tmp_path / "set")
    for split, images in (("train", 6), ("val", 3)):
        for i in range(images):
            data.write(f"labels/{split}/{i}.txt", "1 .5 .5 .4 .4\n")
    said = []
    read_indices(Settings(data=data.yaml), said.append)
    assert len(said) == 1
    assert "no label has class 0 (cat), and all other classes have some" in said[0]


# --- the same picture ------------------------------------------------------------------------------------------------


def slowly_nearest(hashes, owner):
    """By the definition, pair by pair."""
    bits = np.unpackbits(hashes, axis=1).astype(bool)
    found = {}
    for i in range(len(bits)):
        best = {}
        for j in range(i):
            either, both = (bits[i] | bits[j]).sum(), (bits[i] & bits[j]).sum()
            question = min(either, bits.shape[1] - both)
            share = (bits[i] ^ bits[j]).sum() / question if question >= 32 else np.inf
            own = owner[i] == owner[j]
            if share <= 0.2 and share < best.get(own, (np.inf,))[0]:
                best[own] = (share, j)
        if best:
            found[i] = best.get(False, best.get(True))[1]
    return found


def test_nearest_is_the_slow_loop(monkeypatch):
    monkeypatch.setattr("detector.data.duplicates.BLOCK", 7)
    random = np.random.default_rng(3)
    bits = random.random((10, 256)) < 0.5
    copies = np.concatenate([bits ^ (random.random(bits.shape) < noise) for noise in (0, 0.01, 0.05, 0.09, 0.12, 0.3)])
    copies[[5, 25]] = False  # two plain grounds
    hashes, owner = np.packbits(copies, axis=1), np.repeat([0, 1, 2], 20)
    expected = slowly_nearest(hashes, owner)
    assert len(expected) > 20
    assert nearest(hashes, owner) == expected


def test_a_resized_picture_is_the_same_and_its_mirror_image_is_not():
    image = picture(5, 240, 360)
    hashes = [difference_hash(image), difference_hash(cv2.resize(image, (96, 64))), difference_hash(image[:, ::-1])]
    packed = np.packbits(np.array(hashes), axis=1)
    assert nearest(packed, [0, 0, 0]) == {1: 0}


def test_small_objects_on_a_plain_ground_are_not_taken_for_one_another():
    hashes = []
    for x in range(0, 200, 20):
        image = np.full((240, 320, 3), 200, dtype=np.uint8)
        image[100:112, x : x + 12] = 10
        hashes.append(difference_hash(image))
    assert nearest(np.packbits(np.array(hashes), axis=1), [0] * len(hashes)) == {}


def test_grey_images_of_one_channel_have_a_hash():
    grey = picture(5)[..., :1]
    assert np.array_equal(difference_hash(grey), difference_hash(np.repeat(grey, 3, axis=2)))


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(ill) -> Index:
    return build_index(load_description(ill.yaml), "val")


def test_counts_are_those_of_a_loop_over_the_images(index):
    counted, imgsz = count(index, 320), 320
    labels = np.concatenate([index.labels(i) for i in range(len(index))])
    assert counted.images == len(index)
    assert counted.boxes == len(labels)
    assert counted.class_boxes.tolist() == [int((labels == c).sum()) for c in range(len(index.names))]
    with_class = [[c in index.labels(i) for i in range(len(index))] for c in range(len(index.names))]
    assert counted.class_images.tolist() == [sum(row) for row in with_class]
    sides = []
    for i in range(len(index)):
        boxes = index.boxes_xyxy(i) * imgsz / max(index.size(i))
        sides += np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).tolist()
    np.testing.assert_allclose(counted.box_sides, sides)
    assert sum(counted.by_size) == counted.boxes
    np.testing.assert_allclose(np.sqrt(box_sides(index, imgsz).prod(axis=1)), sides)


def test_coverage_counts_the_boxes_over_each_cell(index):
    slow = np.zeros((CELLS, CELLS), dtype=int)
    for i in range(len(index)):
        height, width = index.size(i)
        for left, top, right, bottom in index.boxes_xyxy(i) / (width, height, width, height):
            for y in range(CELLS):
                for x in range(CELLS):
                    inside = left * CELLS < x + 1 and right * CELLS > x and top * CELLS < y + 1 and bottom * CELLS > y
                    slow[y, x] += inside
    assert slow.max() > 1
    np.testing.assert_array_equal(count(index, 640).coverage, slow)


# --- printers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(ill):
    description = load_description(ill.yaml)
    return examine(description, list(description.splits), 64)


def test_json_is_the_list(found):
    content = json.loads(json.dumps(as_json(found)))
    listed = [(one["split"], one["kind"], one["place"], one["text"]) for one in content["findings"]]
    assert listed == [(split, *finding[:3]) for split, finding in found.findings]
    assert sum(content["totals"].values()) == len(found.findings)
    assert content["splits"]["train"]["boxes"] == sum(content["splits"]["train"]["class_boxes"])
    assert [one["severity"] for one in content["findings"]] == sorted(
        (one["severity"] for one in content["findings"]), key=["error", "warning", "note"].index
    )


def test_the_terminal_shows_each_kind_with_its_number_and_the_first_places(found):
    text = "\n".join(lines_of(found))
    for _, finding in found.findings:
        told = KINDS[finding.kind].told
        number = sum(other.kind == finding.kind for _, other in found.findings)
        assert f"{told}: {number}" in text
    assert f"{found.description.root}/labels/train/bad.txt:2: y 1.4 is outside 0..1" in text


class Links(HTMLParser):
    """Everything that a browser would fetch, and all text."""

    def __init__(self):
        super().__init__()
        self.fetched, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for key, value in attrs if key in ("src", "href", "data", "srcset", "action")]
        assert tag not in ("script", "link", "iframe", "object")

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_well_formed_and_needs_nothing_beside_it(found):
    text = page(found)
    ElementTree.fromstring(text.replace("<!DOCTYPE html>", ""))
    links = Links()
    links.feed(text)
    assert links.fetched
    assert all(re.match(r"data:image/(jpeg|png);base64,", value) for value in links.fetched)
    assert "url(" not in text
    assert "://" not in text
    shown = "".join(links.text)
    for _, finding in found.findings:
        assert finding.place.removeprefix(f"{found.description.root}/") in shown


def test_names_with_markup_are_text(tmp_path):
    data = sound(tmp_path / "a & b", ("<i>cat</i>", "dog"))
    data.add("train/<b>.jpg", "0 .5 .5 .001 .4\n").add('train/"x\u0007\u202e.jpg', "0 .5 .5 .001 .4\n")
    description = load_description(data.yaml)
    text = page(examine(description, ["train", "val"]))
    ElementTree.fromstring(text.replace("<!DOCTYPE html>", ""))
    assert "<b>.jpg" not in text
    assert "<i>cat" not in text
    assert "&lt;b&gt;.jpg" in text
    assert "\u0007" not in text
    assert "\u202e" not in text


def test_the_images_to_look_at_are_of_all_kinds(found):
    chosen = worst_images(found.findings, 16)
    assert len(chosen) == 16
    assert len({(split, path) for split, path, _ in chosen}) == 16
    assert {"bad row", "clipped box", "damaged image", "leaked image"} <= {
        f.kind for *_, several in chosen for f in several
    }
    assert len(worst_images(found.findings, 3)) == 3


# --- the command -----------------------------------------------------------------------------------------------------


def test_exit_status_and_files(ill, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", ill.yaml, "imgsz=64"]) == 1
    shown = capsys.readouterr().out
    assert f"{tmp_path}/runs/check/report.html" in shown
    content = json.loads((tmp_path / "runs/check/report.json").read_text())
    assert (content["imgsz"], content["pixels"]) == (64, True)
    assert (tmp_path / "runs/check/report.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["check", sound(tmp_path / "set").yaml, "val", "fast=true", "project=elsewhere", "name=x"]) == 0
    assert "nothing was found" in capsys.readouterr().out
    content = json.loads((tmp_path / "elsewhere/x/report.json").read_text())
    assert (list(content["splits"]), content["pixels"]) == (["val"], False)


def test_a_folder_that_is_taken_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = sound(tmp_path / "set")
    (tmp_path / "runs/mine").mkdir(parents=True)
    monkeypatch.setattr("detector.commands.check.examine", None)
    assert main(["check", data.yaml, "name=mine"]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_set_that_cannot_be_read_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = sound(tmp_path / "set")
    data.write("data.yaml", "train: nowhere\nval: nowhere\nnames: [cat, dog]\n")
    assert main(["check", data.yaml]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert not (tmp_path / "runs/check").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the data set's YAML"),
        (["DATA", "other.yaml"], "name one data set"),
        (["DATA", "test"], "'test' is missing; it has train, val"),
        (["DATA", "train", "split=val"], "split is set already"),
        (["DATA", "imgsz=100"], "multiple of 32"),
        (["DATA", "split=training"], "split"),
    ],
)
def test_what_is_not_understood_is_told(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = sound(tmp_path / "set")
    assert main(["check", *(data.yaml if word == "DATA" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_name_that_no_encoding_has_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = sound(tmp_path / "set")
    name = b"images/train/\xff.jpg".decode("utf-8", "surrogateescape")
    (data.root / name).write_bytes(b"")
    assert main(["check", data.yaml]) == 0
    content = json.loads((tmp_path / "runs/check/report.json").read_text(encoding="utf-8"))
    assert content["findings"][0]["image"].endswith(name)
    assert "\\udcff.jpg" in (tmp_path / "runs/check/report.html").read_text(encoding="utf-8")
