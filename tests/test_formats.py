"""YOLO, COCO and VOC read in place: one data set in three formats is one index; written, it is read by others."""

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from detector.cli import main
from detector.data.description import load_description
from detector.data.formats import coco, voc
from detector.data.index import Index
from detector.data.reading import Reading, build_index
from detector.data.writing import write_dataset
from detector.errors import DataError

NAMES = ("cat", "dog & <co>", "émeu")


def picture(path, width=40, height=30):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (30, 90, 200)).save(path)


def random_set(root, images=12, crowds=True) -> Path:
    """A COCO data set, in which ids have gaps, with images in folders; whole pixels."""
    random = np.random.default_rng(3)
    categories = [{"id": 7 * i + 3, "name": name} for i, name in enumerate(NAMES)]
    content = {"images": [], "annotations": [], "categories": categories}
    for number in range(images):
        width, height = random.integers(20, 90, 2).tolist()
        name = f"{'deep/' if number % 3 else ''}{number} ü.png"
        picture(root / "images" / name, width, height)
        content["images"].append({"id": 1000 - 7 * number, "file_name": name, "width": width, "height": height})
        for _ in range(random.integers(0, 5)):
            left, top = random.integers(0, (width - 5, height - 5)).tolist()
            size = random.integers(1, (width - left + 1, height - top + 1)).tolist()
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 5,
                    "image_id": 1000 - 7 * number,
                    "category_id": int(random.integers(3)) * 7 + 3,
                    "bbox": [left, top, *size],
                    "area": float(size[0] * size[1] / 2),
                    "iscrowd": int(crowds and random.random() < 0.2),
                }
            )
    random.shuffle(content["annotations"])
    (root / "all.json").write_text(json.dumps(content))
    (root / "data.yaml").write_text("train: all.json\nval: all.json\n")
    return root / "data.yaml"


def boxes_of(index: Index) -> dict[str, list[tuple]]:
    """Each image's boxes, sorted: name, whether to be ignored, corners in pixels."""
    found = {}
    for i in range(len(index)):
        columns = (index.labels(i).tolist(), index.ignored(i).tolist(), index.boxes_xyxy(i).round(6).tolist())
        name = index.path(i).name
        found[name] = sorted(
            (index.names[label], crowd, *corners) for label, crowd, corners in zip(*columns, strict=True)
        )
    return found


def split(data: Path, name="train", **options) -> Index:
    return build_index(load_description(data), name, Reading(**options))


# --- one data set, three formats -------------------------------------------------------------------------------------


def test_coco_is_what_its_own_tools_read(tmp_path):
    data = random_set(tmp_path)
    index, tools = split(data), COCO(str(tmp_path / "all.json"))
    assert index.names == NAMES
    assert len(index.classes) == len(
        {(a["image_id"], a["category_id"], *a["bbox"]) for a in tools.dataset["annotations"]}
    )
    for i, number in enumerate(index.image_ids):
        image = tools.loadImgs(number)[0]
        assert str(index.path(i)).endswith(image["file_name"])
        assert index.size(i) == (image["height"], image["width"])
        told = {
            (
                tools.cats[a["category_id"]]["name"],
                a["iscrowd"],
                *a["bbox"][:2],
                *(np.add(a["bbox"][:2], a["bbox"][2:])),
            )
            for a in tools.loadAnns(tools.getAnnIds(number))
        }
        columns = zip(
            index.labels(i).tolist(), index.ignored(i).tolist(), index.boxes_xyxy(i).round(9).tolist(), strict=True
        )
        assert {(NAMES[label], int(crowd), *corners) for label, crowd, corners in columns} == told
        rows = slice(index.box_offsets[i], index.box_offsets[i + 1])
        corners = index.boxes_xyxy(i)
        assert index.areas[rows] == pytest.approx((corners[:, 2:] - corners[:, :2]).prod(axis=1) / 2)


@pytest.mark.parametrize("form", ["yolo", "coco", "voc"])
def test_one_data_set_in_three_formats_is_one_index(tmp_path, form):
    original = split(random_set(tmp_path / "in", crowds=form != "yolo"))
    write_dataset({"train": original, "val": original}, tmp_path / "out", form)
    description = load_description(tmp_path / "out" / "data.yaml")
    assert description.format == form
    for name in ("train", "val"):
        again = build_index(description, name)
        assert boxes_of(again) == boxes_of(original)
        assert again.warnings == ()
    if form == "coco":
        assert sorted(again.image_ids) == sorted(original.image_ids)
        assert again.category_ids == original.category_ids == (3, 10, 17)
        assert sorted(again.areas.tolist()) == pytest.approx(sorted(original.areas.tolist()))


@pytest.mark.parametrize("form", ["yolo", "coco", "voc"])
def test_the_format_of_a_set_is_recognised(tmp_path, form):
    original = split(random_set(tmp_path / "in", crowds=False))
    write_dataset({"train": original, "val": original}, tmp_path / "out", form)
    data = tmp_path / "out" / "data.yaml"
    data.write_text(re.sub("^format.*\n", "", data.read_text(), flags=re.M))
    assert boxes_of(split(data)) == boxes_of(original)
    folder = {"yolo": "images", "coco": "images", "voc": "JPEGImages"}[form]
    data.write_text(f"train: {folder}/train\nval: {folder}/val\nnames: [cat, dog & <co>, émeu]\n", encoding="utf-8")
    assert load_description(data).format == form
    assert boxes_of(split(data)) == boxes_of(original)


def test_written_voc_is_what_another_reader_reads(tmp_path):
    original = split(random_set(tmp_path / "in"))
    write_dataset({"train": original}, tmp_path / "out", "voc")
    stems = (tmp_path / "out" / "ImageSets" / "Main" / "train.txt").read_text().split("\n")[:-1]
    assert len(stems) == len(original)
    for stem in stems:
        root = ElementTree.parse(tmp_path / "out" / "Annotations" / f"{stem}.xml").getroot()
        told = sorted(
            (
                one.find("name").text,
                one.find("difficult").text == "1",
                *(float(one.find(f"bndbox/{corner}").text) - ("min" in corner) for corner in voc.CORNERS),
            )
            for one in root.findall("object")
        )
        assert told == boxes_of(original)[f"{Path(stem).name}.png"]


def test_convert_data_writes_what_trains(tmp_path, capsys):
    random_set(tmp_path / "in", crowds=False)
    words = [str(tmp_path / "in" / "data.yaml"), str(tmp_path / "out"), "format=yolo", "link=true"]
    assert main(["convert-data", *words]) == 0
    assert "written" in capsys.readouterr().out
    assert (tmp_path / "out" / "images" / "train" / "0 ü.png").is_symlink()
    assert boxes_of(split(tmp_path / "out" / "data.yaml", "val")) == boxes_of(split(tmp_path / "in" / "data.yaml"))
    assert main(["convert-data", *words]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["convert-data", *words, "exist_ok=true"]) == 0


def test_two_images_that_would_share_a_label_file_are_not_written(tmp_path):
    data = random_set(tmp_path, 2)
    content = json.loads((tmp_path / "all.json").read_text())
    picture(tmp_path / "images" / "0 ü.jpg")
    content["images"].append({"id": 1, "file_name": "0 ü.jpg"})
    (tmp_path / "all.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"0 ü.jpg and 0 ü.png would have one label file"):
        write_dataset({"train": split(data)}, tmp_path / "out", "yolo")


# --- what each format has of its own ---------------------------------------------------------------------------------

XML = """<annotation><size><width>{width}</width><height>30</height></size>
<object><name>cat</name>{difficult}
<bndbox><xmin>1</xmin><ymin>2.5</ymin><xmax>10</xmax><ymax>20.25</ymax></bndbox>
<part><name>head</name><bndbox><xmin>3</xmin><ymin>3</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></part>
</object></annotation>"""


def voc_set(root, difficult="<difficult>0</difficult>", width="40", lines="a\n") -> Path:
    picture(root / "JPEGImages" / "a.png")
    (root / "Annotations").mkdir()
    (root / "Annotations" / "a.xml").write_text(XML.format(difficult=difficult, width=width))
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for name in ("train", "val"):
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text(lines)
    (root / "data.yaml").write_text("train: ImageSets/Main/train.txt\nval: ImageSets/Main/val.txt\n")
    return root / "data.yaml"


@pytest.mark.parametrize(
    ("difficult", "ignored"),
    [("", False), ("<difficult></difficult>", False), ("<difficult>Unspecified</difficult>", False),
     ("<difficult>1</difficult>", True)],
)  # fmt: skip
def test_voc_counts_pixels_from_one_and_parts_not_at_all(tmp_path, difficult, ignored):
    index = split(voc_set(tmp_path, difficult))
    assert index.names == ("cat",)
    assert index.boxes_xyxy(0) == pytest.approx(np.array([[0, 1.5, 10, 20.25]]))
    assert index.ignored(0).tolist() == [ignored]


@pytest.mark.parametrize("lines", ["a\n", "a 1\nb -1\n", "a  1\n", "# a comment\na.png\n\n"])
def test_image_sets_name_images_in_several_ways(tmp_path, lines):
    index = split(voc_set(tmp_path, lines=lines))
    assert [index.path(i).name for i in range(len(index))] == ["a.png"]
    assert index.warnings == ()


def test_a_size_that_is_not_the_images_is_told(tmp_path):
    index = split(voc_set(tmp_path, width="80"))
    assert "says 80 x 30 pixels, the image has 40 x 30" in index.warnings[0]
    assert split(voc_set(tmp_path / "none", width="odd")).warnings == ()


def test_images_of_an_image_set_that_are_not_there_are_told(tmp_path):
    index = split(voc_set(tmp_path, lines="a\nb\n"))
    assert "1 annotated images are not there" in index.warnings[0]
    with pytest.raises(DataError, match=r"none of its 1 images is in .*JPEGImages"):
        split(voc_set(tmp_path / "none", lines="b\n"))


@pytest.mark.parametrize(
    "layout",
    ["annotations/instances_train.json", "train/_annotations.coco.json", "{images: pics, annotations: a.json}"],
)
def test_images_are_found_where_coco_layouts_have_them(tmp_path, layout):
    content = json.loads(random_set(tmp_path / "in", 3).with_name("all.json").read_text())
    for name in [image["file_name"] for image in content["images"]]:
        place = {"a": "images/train", "t": "train", "{": "pics"}[layout[0]]
        (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_bytes((tmp_path / "in" / "images" / name).read_bytes())
    file = tmp_path / ("a.json" if layout[0] == "{" else layout)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
    entry = "train" if layout[0] == "t" else layout
    (tmp_path / "data.yaml").write_text(f"train: {entry}\nval: {entry}\n")
    assert len(split(tmp_path / "data.yaml")) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["images"][0].pop("id"), r"images\[0\] is .* expected a map with id, file_name"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), r"annotation \d+: bbox is \[1, 2, 3\], expected"),
        (lambda c: c["annotations"][0].update(category_id=4), r"annotation \d+: category_id 4 is not among"),
        (lambda c: c["categories"][0].update(name="cow"), "the category 'cow' is not among `names`"),
        (lambda c: [image.update(file_name="x.png") for image in c["images"]], "none of its first images is there"),
        (lambda c: c.pop("images"), "has no `images`"),
    ],
)
def test_what_is_wrong_in_a_coco_file_is_named(tmp_path, change, message):
    data = random_set(tmp_path)
    data.write_text(data.read_text() + f"names: {list(NAMES)}\n", encoding="utf-8")
    content = json.loads((tmp_path / "all.json").read_text())
    change(content)
    (tmp_path / "all.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as error:
        split(data)
    assert "all.json" in str(error.value)


def test_a_test_split_that_is_not_there_stops_no_training(tmp_path):
    data = random_set(tmp_path)
    data.write_text(data.read_text() + "test: annotations/image_info_test-dev.json\n", encoding="utf-8")
    assert len(split(data, "train"))
    with pytest.raises(DataError, match=r"image_info_test-dev\.json: no such file; name the COCO file"):
        split(data, "test")


@pytest.mark.parametrize(
    "written",
    [
        '{"images": [], "categories": %s, "annotations": []}',
        '{"categories" : %s, "images": []}',
        '{"images": [{"id": 1, "file_name": "categories"}], "info": {"categories": [{}]}, "categories": %s}',
    ],
)
@pytest.mark.parametrize("categories", ['[{"id": 3, "name": "cat"}, {"id": 1, "name": "[\\u00e9"}]', "[]", "null"])
def test_categories_are_read_alone_as_with_the_whole_file(tmp_path, written, categories):
    file = tmp_path / "a.json"
    file.write_text(written % categories, encoding="utf-8")
    assert coco.read_categories(file) == coco.read_json(file)["categories"] == (json.loads(categories) or [])


def test_crowds_and_difficult_objects_are_not_trained_on_but_judged(tmp_path):
    from detector.config.settings import Settings, load_settings
    from detector.evaluation.evaluate import ground_truth_of
    from detector.run.build import indices

    data = random_set(tmp_path)
    training, validation = indices(load_settings(Settings, None, [f"data={data}"]), print)
    assert validation.ignored_boxes.any()
    assert len(training.classes) == np.count_nonzero(~validation.ignored_boxes)
    truth = ground_truth_of(validation)
    assert truth.crowd.tolist() == validation.ignored_boxes.tolist()
    assert [a["area"] for a in truth.coco.dataset["annotations"]] == pytest.approx(validation.areas.tolist())


# --- YOLO as it is found in the world --------------------------------------------------------------------------------


def yolo_set(root, text="0 .5 .5 .5 .5\n", images=4, more="") -> Path:
    for number in range(images):
        picture(root / "images" / "train" / f"{number}.png")
        (root / "labels" / "train").mkdir(parents=True, exist_ok=True)
        (root / "labels" / "train" / f"{number}.txt").write_text(text)
    (root / "data.yaml").write_text(f"train: images/train\nval: images/train\nnames: [cat, dog]\n{more}")
    return root / "data.yaml"


def test_an_export_that_names_the_folder_above_is_found(tmp_path):
    data = yolo_set(tmp_path)
    (tmp_path / "train").mkdir()
    os.rename(tmp_path / "images" / "train", tmp_path / "train" / "images")
    os.rename(tmp_path / "labels" / "train", tmp_path / "train" / "labels")
    data.write_text("train: ../train/images\nvalidation: ../train/images\nnc: '2'\n")
    index = split(data)
    assert index.names == ("class_0", "class_1")
    assert len(index.classes) == 4


def test_a_path_may_count_from_where_we_are(tmp_path, monkeypatch):
    yolo_set(tmp_path / "sets" / "mine")
    (tmp_path / "elsewhere").mkdir()
    data = tmp_path / "elsewhere" / "data.yaml"
    data.write_text("path: sets/mine\ntrain: images/train\nval: images/train\nnames: [cat, dog]\n")
    monkeypatch.chdir(tmp_path)
    assert len(split(data)) == 4


def test_download_is_told_and_never_run(tmp_path):
    data = yolo_set(tmp_path, more="download: |\n  open('ran', 'w')\n")
    data.write_text(data.read_text().replace("train: images/train", "train: images/gone"))
    with pytest.raises(DataError, match=r"images/gone does not exist.*\(open\('ran', 'w'\) ...\) is never run"):
        split(data)


def test_rows_of_keypoints_are_boxes_and_no_polygons(tmp_path):
    row = "1 .5 .5 .2 .4 " + ".1 .1 2 " * 3
    index = split(yolo_set(tmp_path, row, more="kpt_shape: [3, 3]\n"))
    assert index.boxes_xyxy(0) == pytest.approx(np.array([[16, 9, 24, 21]]))
    with pytest.raises(DataError, match="with kpt_shape as in the description there are 14, or 5"):
        split(yolo_set(tmp_path / "other", "1 .5 .5 .2 .4 .1 .1", more="kpt_shape: [3, 3]\n"))


def test_label_files_in_capitals_count_and_those_without_a_picture_are_told(tmp_path):
    data = yolo_set(tmp_path)
    labels = tmp_path / "labels" / "train"
    os.rename(labels / "1.txt", labels / "1.TXT")
    (labels / "9.txt").write_text("0 .5 .5 .5 .5\n")
    (labels / "classes.txt").write_text("cat\ndog\n")
    index = split(data)
    assert len(index.classes) == 4
    assert index.warnings == (f"1 label files belong to no image (first: {labels / '9.txt'})",)


@pytest.mark.parametrize(("without", "fine"), [(2, True), (3, False)])
def test_too_many_images_without_a_label_file_stop_the_run(tmp_path, without, fine):
    data = yolo_set(tmp_path)
    for number in range(without):
        (tmp_path / "labels" / "train" / f"{number}.txt").unlink()
    if fine:
        assert split(data).labelled.tolist() == [False] * without + [True] * (4 - without)
    else:
        with pytest.raises(DataError, match=r"3 of 4 images have no label file \(first: .*0\.txt\), more than"):
            split(data)
        assert len(split(data, max_missing_labels=0.75)) == 4


def test_a_list_whose_images_are_not_there_says_so(tmp_path):
    data = yolo_set(tmp_path)
    (tmp_path / "list.txt").write_text("pictures/a.png\npictures/b.png\n")
    data.write_text(data.read_text().replace("train: images/train", "train: list.txt"))
    with pytest.raises(DataError, match="none of the 2 images that it lists exists"):
        split(data)
    (tmp_path / "list.txt").write_text("data/images/train/0.png\n")  # as darknet's lists have it
    assert len(split(data)) == 1


def test_polygons_are_kept_where_they_are_asked_for(tmp_path):
    index = split(yolo_set(tmp_path, "0 .5 .5 .5 .5\n1 .1 .2 .5 .2 .5 .8\n"), polygons=True)
    box, polygon = index.polygons(2)
    assert box is None
    assert polygon == pytest.approx(np.array([[4, 6], [20, 6], [20, 24]]))
    part = index.take(np.array([3, 0])).keep(np.array([True, True, False, True]))
    assert [len(part.polygons(i)) for i in range(2)] == [2, 1]
    assert part.polygons(1)[0] == pytest.approx(polygon)
    assert split(tmp_path / "data.yaml").polygons(2) == [None, None]


# --- policy ----------------------------------------------------------------------------------------------------------

MIXED = "0 .5 .5 .5 .5\n0 .9 .5 .4 .2\n1 .5 .5 0 .5\n7 .5 .5 .1 .1\n"  # fine, reaches out, flat, no such class


@pytest.mark.parametrize(
    ("policy", "text", "boxes"),
    [
        ("clip", MIXED.rsplit("7", 1)[0], [2, 2]),
        ("drop_box", MIXED, [1, 1]),
        ("drop_image", MIXED, [1]),
        ("clip", MIXED, "class 7 is outside"),
        ("error", MIXED.rsplit("7", 1)[0], "2 labels break a rule|clipped box"),
    ],
)
def test_bad_boxes_are_treated_as_was_said_and_told(tmp_path, policy, text, boxes):
    data = yolo_set(tmp_path, text, images=2)
    if policy == "drop_image":
        (tmp_path / "labels" / "train" / "1.txt").write_text("1 .5 .5 .1 .1\n")
    if isinstance(boxes, str):
        with pytest.raises(DataError, match=boxes):
            split(data, bad_boxes=policy)
        return
    index = split(data, bad_boxes=policy)
    assert [len(index.labels(i)) for i in range(len(index))] == boxes
    assert len(index.warnings) > 0
    assert "labels break a rule" not in " ".join(index.warnings)
