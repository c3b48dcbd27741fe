"""Data sets in tar shards: the same samples in the same order as from folders, wherever the shards lie."""

import gzip
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile

import cv2
import fsspec
import numpy as np
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem
from scenes import MINUTE, write_dataset
from test_fingerprint import fingerprint, training_set
from test_training import run, same, train

from detector.cli import main
from detector.data import shard, storage
from detector.data.description import load_description
from detector.data.formats.shards import expanded
from detector.data.reading import Reading, build_index
from detector.data.shard_writing import sample_names, write_shards
from detector.errors import DataError

IMAGES = 14


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=IMAGES)


@pytest.fixture(scope="module")
def index(data):
    return build_index(load_description(data), "train")


def description(folder, train, val=None, **more):
    path = folder / "shards.yaml"
    path.write_text(yaml.safe_dump({"train": train, "val": val or train, "names": ["square", "disc"], **more}))
    return load_description(path)


def jpeg(value=0, height=20, width=30):
    return cv2.imencode(".jpg", np.full((height, width, 3), value, np.uint8))[1].tobytes()


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_shards_of(data, folder):
    """The pattern of the shards of a description's training images."""
    return write_shards(build_index(load_description(data), "train"), folder, 5)


ROW = "1 0.5 0.5 0.25 0.5\n"


def assert_same(one, other):
    assert len(one) == len(other)
    assert one.digest == other.digest
    assert one.names == other.names
    assert one.labelled.tolist() == other.labelled.tolist()
    for i in range(len(one)):
        assert one.content(i) == other.content(i)
        assert one.size(i) == other.size(i)
        assert one.labels(i).tolist() == other.labels(i).tolist()
        assert one.boxes_xyxy(i) == pytest.approx(other.boxes_xyxy(i), abs=1e-12)
        assert one.ignored(i).tolist() == other.ignored(i).tolist()


# --- patterns


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{0..2}.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("a-{098..101}.tar", ["a-098.tar", "a-099.tar", "a-100.tar", "a-101.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("{5..5}.tar", ["5.tar"]),
    ],
)
def test_braces_stand_for_what_they_do_in_a_shell(pattern, texts):
    assert expanded(pattern) == texts
    shell = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True)
    assert shell.returncode or shell.stdout.split() == texts


@pytest.mark.parametrize("pattern", ["a-{3..1}.tar", "a-{}.tar", "a-{x}.tar", "a-{1..x}.tar"])
def test_braces_that_stand_for_nothing_are_refused(pattern):
    with pytest.raises(DataError, match="stands for nothing"):
        expanded(pattern)


# --- the same samples


@pytest.mark.parametrize("images_per_shard", [1, 5, 100])
def test_shards_hold_the_images_and_boxes_of_folders_in_their_order(tmp_path, index, images_per_shard):
    pattern = write_shards(index, tmp_path, images_per_shard)
    assert (
        pattern
        == {1: "train-{000000..000013}.tar", 5: "train-{000000..000002}.tar", 100: "train-000000.tar"}[images_per_shard]
    )
    read = build_index(description(tmp_path, pattern), "train")
    assert_same(read, index)
    assert read.warnings == ()
    assert read.place(3).endswith(".tar:003.png")
    assert read.path(3).name == "003.png"
    assert_same(build_index(description(tmp_path, pattern), "train"), index)  # from what was kept
    subset = read.take(np.array([7, 2]))
    assert [subset.content(0), subset.content(1)] == [index.content(7), index.content(2)]


def test_samples_look_the_same_from_shards_as_from_folders(tmp_path, data):
    (tmp_path / "shards.yaml").write_text(f"train: {write_shards_of(data, tmp_path)}\nval: none\nnames: [square, disc]")
    prints = []
    for source in (data, tmp_path / "shards.yaml"):
        images = training_set(source)
        samples = {(epoch, slot): images[epoch, slot] for epoch in range(2) for slot in range(IMAGES)}
        prints.append({at: fingerprint(one.image, one.boxes_xyxy, one.classes) for at, one in samples.items()})
    assert prints[0] == prints[1]
    assert len(set(prints[0].values())) == 2 * IMAGES


@pytest.mark.slow
def test_a_run_on_folders_goes_on_with_shards_and_ends_alike(tmp_path, data):
    shards = tmp_path / "shards"
    for split in ("train", "val"):
        write_shards(build_index(load_description(data), split), shards, 6, split)
    description(shards, "train-{000000..000002}.tar", "val-000000.tar")
    common = [f"model={MINUTE}", "imgsz=64", "batch=2", "nbs=4", "device=cpu", "plots=false", "amp=fp32"]
    whole = train(tmp_path, [*common, f"data={data}", "workers=0"], "whole", "epochs=2", "save_period=1")
    halves = shutil.copytree(whole, tmp_path / "halves")
    os.replace(halves / "weights" / "epoch1.pt", halves / "weights" / "last.pt")
    assert run("train", f"resume={halves}", f"data={shards / 'shards.yaml'}", "workers=2") == 0
    assert same(halves, whole)
    assert run("val", halves, "workers=0", "plots=true", "device=cpu", f"project={tmp_path}") == 0


def test_shards_of_shards_and_of_the_same_index_are_the_same_bytes(tmp_path, index):
    for folder in ("a", "b"):
        write_shards(index, tmp_path / folder, 6)
    again = build_index(description(tmp_path, "a/train-{000000..000002}.tar"), "train")
    write_shards(again, tmp_path / "c", 6)
    for number in range(3):
        contents = {(tmp_path / folder / f"train-{number:06}.tar").read_bytes() for folder in "abc"}
        assert len(contents) == 1


def test_convert_data_writes_shards_and_folders_from_them(tmp_path, data, index):
    assert main(["convert-data", str(data), str(tmp_path / "shards"), "format=shards"]) == 0
    shards = tmp_path / "shards" / "data.yaml"
    assert yaml.safe_load(shards.read_text())["train"] == "train-000000.tar"
    assert_same(build_index(load_description(shards), "train"), index)
    for form in ("yolo", "coco", "voc"):
        assert main(["convert-data", str(shards), str(tmp_path / form), f"format={form}"]) == 0
        back = build_index(load_description(tmp_path / form / "data.yaml"), "train")
        assert [back.content(i) for i in range(IMAGES)] == [index.content(i) for i in range(IMAGES)]
        assert back.digest == index.digest
        assert back.boxes_xyxy(2) == pytest.approx(index.boxes_xyxy(2), abs=1e-3)


def test_names_are_kept_but_for_dots_and_each_is_another():
    places = ["/d/a/x.jpg", "/d/a/x.png", "/d/a.b/x.rf.12.jpg", "/d/x_rf_12.jpg"]
    assert sample_names(places) == ["a/x", "a/x_2", "a.b/x_rf_12", "x_rf_12"]
    assert sample_names(["/d/one.jpg"]) == ["one"]
    assert sample_names(["/s/t-0.tar:a/1.jpg", "/s/t-1.tar:a/2.jpg"]) == ["1", "2"]


def test_crowds_areas_polygons_and_missing_labels_survive(tmp_path):
    """From COCO, whose boxes have all of these."""
    (tmp_path / "images").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "images" / f"{name}.jpg").write_bytes(jpeg())
    boxes = [
        {"bbox": [2, 3, 10, 5], "iscrowd": 1, "area": 50},
        {"bbox": [0, 0, 30, 20], "segmentation": [[0, 0, 30, 0, 30, 20]], "area": 300.5},
        {"bbox": [1.25, 2.5, 3, 4]},
    ]
    content = {
        "images": [{"id": n, "file_name": f"{name}.jpg", "height": 20, "width": 30} for n, name in enumerate("abc")],
        "annotations": [{"id": n + 1, "image_id": n // 2, "category_id": 5, **box} for n, box in enumerate(boxes)],
        "categories": [{"id": 3, "name": "square"}, {"id": 5, "name": "disc"}],
    }
    (tmp_path / "train.json").write_text(json.dumps(content))
    coco = {"images": "images", "annotations": "train.json"}
    reading = Reading(polygons=True)
    before = build_index(description(tmp_path, coco, format="coco"), "train", reading)
    assert before.ignored_boxes.tolist() == [True, False, False]
    pattern = write_shards(before, tmp_path / "out", 2)
    after = build_index(description(tmp_path / "out", pattern), "train", reading)
    assert_same(after, before)
    assert np.array_equal(after.areas, before.areas, equal_nan=True)
    assert after.polygons(0)[1].tolist() == [[0, 0], [30, 0], [30, 20]]
    assert after.polygons(1) == [None]


# --- what is read of a shard


def test_a_sample_is_what_shares_a_name_up_to_its_first_dot(tmp_path):
    write_tar(
        tmp_path / "x.tar",
        {
            "a/1.seg.png": b"a mask", "a/1.JPG": jpeg(1), "a/1.txt": ROW, "b/1.jpg": jpeg(2), "README": "",
            "b/1.cls": "3", ".hidden.jpg": b"", "a/._1.jpg": b"resource fork", "2.json": '{"url": "x"}',
            "2.jpg": jpeg(3), "3.txt": ROW, "4.jpg": jpeg(4), "5.txt": ROW, "5.jpg": jpeg(5), "4.npy": b"features",
            "4.json": '{"annotations": [{"bbox": [1, 2, 3, 4], "category": "disc"}]}',
            "5.json": '[{"bbox": [1, 2, 3, 4], "category_id": 0}]',
        },
    )  # fmt: skip
    read = build_index(description(tmp_path, "x.tar"), "train")
    assert [read.place(i).partition(".tar:")[2] for i in range(len(read))] == [
        "a/1.JPG", "b/1.jpg", "2.jpg", "4.jpg", "5.jpg"
    ]  # fmt: skip
    assert [read.content(i) for i in range(5)] == [jpeg(value) for value in (1, 2, 3, 4, 5)]
    assert read.labelled.tolist() == [True, False, False, True, True]
    assert [read.labels(i).tolist() for i in range(5)] == [[1], [], [], [1], [1]]
    assert read.boxes_xyxy(3) == pytest.approx(np.array([[1, 2, 4, 6]]))
    assert read.boxes_xyxy(4) == pytest.approx(np.array([[11.25, 5, 18.75, 15]]))


def test_of_members_of_one_name_the_last_counts_as_for_tar(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"1.jpg": jpeg(1), "1.txt": ROW})
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("1.jpg")
        info.size = len(jpeg(9))
        tar.addfile(info, io.BytesIO(jpeg(9)))
    read = build_index(description(tmp_path, "x.tar"), "train")
    assert [read.content(i) for i in range(len(read))] == [jpeg(9)]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"1.jpg": jpeg(), "1.png": jpeg()}, "1.jpg and 1.png are images of one sample"),
        ({"a.rf.1.jpg": jpeg(), "a.rf.1.txt": ROW}, "holds no images; .* ends at the first dot"),
        ({"1.jpg": jpeg(), "1.txt": "9 0.5 0.5 0.1 0.1"}, "x.tar:1.txt:1: class 9 is outside 0..1"),
        ({"1.jpg": jpeg(), "1.txt": "a cat on a mat"}, "x.tar:1.txt:1: class 'a' is not a number"),
        ({"1.jpg": jpeg(), "1.json": '{"annotations": [{"bbox": [1, 2, 3], "category_id": 0}]}'},
         r"x.tar:1.json:1: bbox is \[1, 2, 3\]"),
        ({"1.jpg": jpeg(), "1.json": '[{"bbox": [1, 2, 3, 4], "category_id": 2}]'}, "category_id 2 is not a number in"),
        ({"1.jpg": jpeg(), "1.json": '[{"bbox": [1, 2, 3, 4], "category": "cat"}]'}, "'cat' is not among `names`"),
        ({"1.jpg": jpeg(), "1.json": "[3]"}, "x.tar:1.json:1: is 3, expected a map"),
        ({"1.jpg": jpeg(), "1.json": '{"annotations": 3}'}, "no list of maps"),
        ({"1.jpg": jpeg(), "1.json": "{"}, "x.tar:1.json: is no JSON"),
        ({"1.jpg": jpeg(), "2.jpg": jpeg()}, "none of the 2 images has a label file; looked for .*x.tar:1.txt"),
        ({"1.jpg": b"no image", "1.txt": ROW}, "none of its images can be read"),
        ({"1.jpg": b"", "1.txt": ROW}, "x.tar:1.jpg: .*is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_shard_is_told_with_its_place(tmp_path, members, reason):
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=reason):
        build_index(description(tmp_path, "x.tar"), "train")


def test_an_image_that_cannot_be_read_is_left_out_and_told(tmp_path):
    write_tar(tmp_path / "x.tar", {"1.jpg": b"no image", "1.txt": ROW, "2.jpg": jpeg(2), "2.txt": ROW})
    for _ in range(2):  # read, and kept
        read = build_index(description(tmp_path, "x.tar"), "train")
        assert [read.content(i) for i in range(len(read))] == [jpeg(2)]
        assert "1 unreadable images were left out" in read.warnings[0]
        assert f"{tmp_path}/x.tar:1.jpg: cannot be read" in read.warnings[0]


SECOND = 512 + 1024 + 2 * 512  # byte of the second image's header


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda whole: whole[:700], "x.tar:1.jpg: the shard ends inside it"),
        (
            lambda whole: whole[:SECOND] + b"\1" + whole[SECOND + 1 :],
            f"is damaged at byte {SECOND:,}, and what follows",
        ),
        (lambda whole: whole[: SECOND + 300], f"is damaged at byte {SECOND:,}"),
        (lambda whole: b"x" * 5000, "is no tar file"),
        (lambda whole: b"", "is no tar file|holds no images"),
        (gzip.compress, "is compressed, .*unpack it"),
    ],
)
def test_a_damaged_shard_is_refused_and_never_read_in_part(tmp_path, break_it, reason):
    path = write_tar(tmp_path / "x.tar", {"1.jpg": jpeg(), "1.txt": ROW, "2.jpg": jpeg(), "2.txt": ROW})
    whole = path.read_bytes()
    assert whole[SECOND : SECOND + 5] == b"2.jpg"
    path.write_bytes(break_it(whole))
    with pytest.raises(DataError, match=reason):
        build_index(description(tmp_path, "x.tar"), "train")


@pytest.mark.parametrize("train", ["none.tar", "none-{0..1}.tar", ["a.tar", "none.tar"], "none-*.tar"])
def test_a_shard_that_is_not_there_is_named(tmp_path, train):
    write_tar(tmp_path / "a.tar", {"1.jpg": jpeg(), "1.txt": ROW})
    with pytest.raises(DataError, match=r"none\S*\.tar: (does not exist|there is no such shard)"):
        build_index(description(tmp_path, train), "train")


def test_a_folder_beside_shards_in_a_split_is_refused_and_in_another_split_is_not(tmp_path, data):
    write_tar(tmp_path / "a.tar", {"1.jpg": jpeg(), "1.txt": ROW})
    folder = str(data.parent / "images" / "val")
    with pytest.raises(DataError, match=f"{folder}: is no tar shard"):
        build_index(description(tmp_path, ["a.tar", folder]), "train")
    mixed = description(tmp_path, "a.tar", folder)
    assert [len(build_index(mixed, split)) for split in ("train", "val")] == [1, 4]
    assert len(build_index(description(tmp_path, "*.tar", folder), "train")) == 1
    assert len(build_index(description(tmp_path, ["a.tar", "{a,a}.tar"], folder), "train")) == 1


def test_names_must_be_said(tmp_path):
    (tmp_path / "d.yaml").write_text("train: x.tar\nval: x.tar\n")
    with pytest.raises(DataError, match="'names' is missing"):
        load_description(tmp_path / "d.yaml")


# --- what is kept


@pytest.fixture
def reads(monkeypatch):
    """The shards that are read through, as they are."""
    seen = []
    read = shard.read_shard
    monkeypatch.setattr(
        shard, "read_shard", lambda place, *more: seen.append(os.path.basename(place)) or read(place, *more)
    )
    return seen


def test_only_a_shard_that_has_changed_is_read_again(tmp_path, index, reads):
    pattern = write_shards(index, tmp_path, 5)
    names = [f"train-00000{n}.tar" for n in range(3)]
    build_index(description(tmp_path, pattern), "train")
    assert sorted(reads) == names
    assert sorted(p.name for p in tmp_path.glob(".*")) == [f".{name}.index" for name in names]
    build_index(description(tmp_path, pattern), "train")
    assert sorted(reads) == names
    write_tar(tmp_path / names[1], {"new.jpg": jpeg(3), "new.txt": ROW})
    changed = build_index(description(tmp_path, pattern), "train")
    assert sorted(reads) == sorted([*names, names[1]])
    assert (len(changed), changed.content(5)) == (IMAGES - 4, jpeg(3))
    (tmp_path / f".{names[0]}.index").write_bytes(b"damaged")
    assert_same(build_index(description(tmp_path, pattern), "train"), changed)
    assert reads[-1] == names[0]


def test_what_is_kept_goes_where_it_can_be_written(tmp_path, reads, monkeypatch):
    write_tar(tmp_path / "shards/x.tar", {"1.jpg": jpeg(), "1.txt": ROW})
    chosen = Reading(cache_dir=tmp_path / "kept")
    for _ in range(2):
        build_index(description(tmp_path, "shards/x.tar"), "train", chosen)
    assert reads == ["x.tar"]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert not list((tmp_path / "shards").glob(".*"))
    save = shard._save

    def on_a_read_only_disk(path, *more):
        if path.parent.name == "shards":
            raise PermissionError
        save(path, *more)

    monkeypatch.setattr(shard, "_save", on_a_read_only_disk)
    for _ in range(2):
        build_index(description(tmp_path, "shards/x.tar"), "train")
    assert reads == ["x.tar"] * 2
    assert [file.name.startswith(".x.tar.") for file in (tmp_path / ".shards.shards").iterdir()] == [True]


def test_a_shard_that_has_changed_since_is_told_when_an_image_is_missing(tmp_path, index):
    read = build_index(description(tmp_path, write_shards(index, tmp_path, 100)), "train")
    path = tmp_path / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(DataError, match=r"train-000000.tar: ends after .* cut short, or has changed"):
        read.content(len(read) - 1)
    path.unlink()
    with pytest.raises(DataError, match=r"train-000000.tar: does not exist"):
        read.content(0)


# --- elsewhere


@pytest.fixture
def elsewhere(index, tmp_path):
    """The shards in a file system that is not the disk's."""
    write_shards(index, tmp_path / "local", 5)
    memory = fsspec.filesystem("memory")
    for file in sorted((tmp_path / "local").glob("*.tar")):
        memory.pipe(f"/bucket/{file.name}", file.read_bytes())
    yield "memory://bucket/train-{000000..000002}.tar"
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("form", ["plain", "glob", "cached"])
def test_shards_elsewhere_hold_the_same(tmp_path, index, elsewhere, form, reads):
    pattern = {"plain": elsewhere, "glob": "memory://bucket/train-*.tar", "cached": f"simplecache::{elsewhere}"}[form]
    for _ in range(2):
        read = build_index(description(tmp_path, pattern), "train")
        assert_same(read, index)
        assert "memory://" in read.place(0)
    assert len(reads) == 3  # what was found is kept beside the description
    assert len(list((tmp_path / ".shards.shards").iterdir())) == 3


def test_one_image_elsewhere_is_one_range(tmp_path, index, elsewhere, monkeypatch):
    read = build_index(description(tmp_path, elsewhere), "train")
    asked = []
    whole = MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "cat_file",
        lambda self, path, start=None, end=None: asked.append((path, end - start)) or whole(self, path, start, end),
    )
    assert read.content(7) == index.content(7)
    assert asked == [("/bucket/train-000001.tar", len(index.content(7)))]


def test_a_read_that_fails_for_a_moment_is_tried_again(tmp_path, index, elsewhere, monkeypatch):
    read = build_index(description(tmp_path, elsewhere), "train")
    whole, failures, waits = MemoryFileSystem.cat_file, [], []

    def flaky(self, *arguments, **more):
        if len(failures) < broken:
            failures.append(1)
            raise ConnectionResetError("the server hung up")
        return whole(self, *arguments, **more)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    broken = 2
    assert read.content(1) == index.content(1)
    assert waits == list(storage.PAUSES[:2])
    broken = 99
    with pytest.raises(DataError, match=r"memory://bucket/train-000000.tar: cannot be read \(the server hung up\)"):
        read.content(1)


@pytest.mark.parametrize("broken", [1, 99])
def test_a_pass_that_fails_for_a_moment_is_taken_again_and_no_image_is_lost(
    tmp_path, index, elsewhere, monkeypatch, broken
):
    """Whatever is being read then: a server's failure is never taken for a damaged image's."""
    failures = []
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)

    class Flaky(io.BytesIO):
        def read(self, *arguments):
            if len(failures) < broken and self.tell() > 9000:
                failures.append(1)
                raise OSError("the server hung up")
            return super().read(*arguments)

    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(MemoryFileSystem, "_open", lambda self, path, *a, **k: Flaky(memory.store[path].getvalue()))
    if broken == 1:
        assert_same(build_index(description(tmp_path, elsewhere), "train"), index)
        assert failures
    else:
        with pytest.raises(DataError, match=r"memory://bucket/train-00000\d.tar: cannot be read \(the server hung up"):
            build_index(description(tmp_path, elsewhere), "train")
        assert not (tmp_path / ".shards.shards").exists()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://bucket/x.tar", "nosuch"),
        ("s3://bucket/x.tar", "s3fs|cannot be read"),
        ("memory://bucket/none.tar", "does not exist"),
        ("memory://bucket/images", "is no tar shard"),
    ],
)
def test_what_cannot_be_had_from_elsewhere_is_told(tmp_path, url, reason, monkeypatch):
    monkeypatch.setattr(storage, "PAUSES", ())
    with pytest.raises(DataError, match=reason):
        build_index(description(tmp_path, url), "train")


def test_a_server_that_cannot_be_reached_is_no_missing_file(tmp_path, monkeypatch):
    """fsspec calls both a FileNotFoundError."""
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)

    def info(self, path, **more):
        raise FileNotFoundError(path) from ConnectionRefusedError("connection refused")

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    monkeypatch.setattr(MemoryFileSystem, "_open", info)
    with pytest.raises(DataError, match=r"memory://b/a.tar: cannot be read \(connection refused\); see that it can be"):
        build_index(description(tmp_path, "memory://b/a.tar"), "train")
    assert waits == list(storage.PAUSES)


def contents_of(index, queue):
    queue.put([index.content(i) for i in range(len(index))])


@pytest.mark.slow
@pytest.mark.parametrize(("start", "where"), [("fork", "local"), ("spawn", "local"), ("fork", "elsewhere")])
def test_other_processes_read_the_same(tmp_path, index, elsewhere, start, where):
    pattern = elsewhere if where == "elsewhere" else "local/train-{000000..000002}.tar"
    read = build_index(description(tmp_path, pattern), "train")
    read.content(0)  # before the others are there
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    processes = [context.Process(target=contents_of, args=(read, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [[index.content(i) for i in range(len(index))]] * 2


def test_reading_shards_loads_no_fsspec_for_local_ones(tmp_path, index):
    pattern = write_shards(index, tmp_path, 5)
    description(tmp_path, pattern)
    code = (
        "import sys; from detector.data.description import load_description; from detector.data.reading import "
        "build_index; build_index(load_description(sys.argv[1]), 'train').content(0); "
        "print('fsspec.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "shards.yaml"], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
