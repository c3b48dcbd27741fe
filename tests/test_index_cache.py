"""The index in memory that workers share, and kept in a file for the next start."""

import os
import pickle
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
from test_formats import picture, random_set, split, yolo_set

from detector.data import reading
from detector.data.index import Index
from detector.data.writing import write_dataset
from detector.errors import DataError


def same(one: Index, other: Index) -> bool:
    for name in Index.__dataclass_fields__:
        ours, theirs = getattr(one, name), getattr(other, name)
        alike = ours == theirs
        if isinstance(ours, np.ndarray):
            alike = np.array_equal(ours, theirs, equal_nan=name == "areas")
        if not alike:
            return False
    return True


def told_by_a_worker(index: Index, pipe) -> None:
    pipe.send((index.memory_file(), pickle.dumps(index)))
    pipe.close()


def test_a_worker_that_is_started_anew_has_the_same_memory(tmp_path):
    index = split(random_set(tmp_path))
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=told_by_a_worker, args=(index, theirs))
    worker.start()
    file, copy = ours.recv()
    worker.join()
    assert file == index.memory_file()
    assert same(pickle.loads(copy), index)
    assert same(pickle.loads(pickle.dumps(index)), index)


@pytest.fixture
def kept(monkeypatch):
    """As if every data set were large enough to be kept."""
    monkeypatch.setattr(reading, "CACHED_FROM", 1)


def spied(monkeypatch) -> list[str]:
    """The images whose headers are read from now on."""
    read = []
    real = reading.read_header
    monkeypatch.setattr(
        reading, "read_header", lambda path, **kind: read.append(os.path.basename(path)) or real(path, **kind)
    )
    return read


@pytest.mark.parametrize("form", ["yolo", "coco", "voc"])
@pytest.mark.parametrize("place", ["beside", "folder"])
def test_a_kept_index_is_the_one_that_was_read(tmp_path, monkeypatch, kept, form, place):
    original = split(random_set(tmp_path / "in"))
    write_dataset({"train": original, "val": original}, tmp_path / "out", form)
    data, folder = tmp_path / "out" / "data.yaml", None if place == "beside" else tmp_path / "kept" / "here"
    first, read = split(data, cache_dir=folder), spied(monkeypatch)
    (file,) = (folder or tmp_path / "out").glob("*data.train*")
    written = file.stat().st_ino
    assert same(split(data, cache_dir=folder), first)
    assert read == []
    assert file.suffix == ".index"
    assert file.stat().st_ino == written  # a million images take seconds to write


def test_what_belongs_to_no_image_is_told_though_no_image_changed(tmp_path, kept):
    data = yolo_set(tmp_path, images=3)
    split(data)
    (tmp_path / "labels" / "train" / "alone.txt").write_text("0 .5 .5 .1 .1\n")
    for _ in range(2):
        assert [finding.kind for finding in split(data).findings] == ["no picture"]
    (tmp_path / "labels" / "train" / "alone.txt").unlink()
    assert split(data).findings == ()


def changed_label(root):
    (root / "labels" / "train" / "1.txt").write_text("1 .5 .5 .1 .1\n")


def touched_label(root):
    os.utime(root / "labels" / "train" / "1.txt", ns=(1, 1))


def gone_label(root):
    (root / "labels" / "train" / "1.txt").unlink()


def new_image(root):
    picture(root / "images" / "train" / "00.png", 9, 9)
    (root / "labels" / "train" / "00.txt").write_text("0 .5 .5 .5 .5\n")


def other_image(root):
    picture(root / "images" / "train" / "1.png", 50, 60)


def damaged_image(root):
    (root / "images" / "train" / "1.png").write_bytes(b"no picture")


def gone_image(root):
    (root / "images" / "train" / "1.png").unlink()


def bad_label(root):
    (root / "labels" / "train" / "1.txt").write_text("0 .9 .5 .4 .4\n")


@pytest.mark.parametrize(
    "change",
    [changed_label, touched_label, gone_label, new_image, other_image, damaged_image, gone_image, bad_label],
)
def test_what_has_changed_is_read_anew_and_nothing_else(tmp_path, monkeypatch, kept, change):
    data = yolo_set(tmp_path, images=6)
    (tmp_path / "images" / "train" / "3.png").write_bytes(b"damaged from the beginning")
    (tmp_path / "labels" / "train" / "4.txt").write_text("0 .9 .5 .4 .4\n")
    split(data)
    change(tmp_path)
    read = spied(monkeypatch)
    again = split(data)
    assert read == {"new_image": ["00.png"], "gone_image": []}.get(change.__name__, ["1.png"])
    monkeypatch.setattr(reading, "CACHED_FROM", 99)
    for file in tmp_path.glob(".*.index"):
        file.unlink()
    fresh = split(data)
    assert sorted(fresh.findings) == sorted(again.findings)
    assert same(replace(fresh, findings=()), replace(again, findings=()))


@pytest.mark.parametrize("what", ["another class", "damaged", "cut short", "read only", "no folder"])
def test_what_is_kept_harms_nobody(tmp_path, kept, what):
    data = yolo_set(tmp_path, "1 .5 .5 .5 .5\n")
    split(data)
    [file] = tmp_path.glob(".data.train.index")
    if what == "another class":
        data.write_text(data.read_text().replace("[cat, dog]", "[cat]"))
        with pytest.raises(DataError, match="class 1 is outside"):
            split(data)
        return
    if what in ("damaged", "cut short"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content if what == "damaged" else content[: len(content) // 3])
    folder = tmp_path / "no" / "such"
    if what == "read only":
        folder.parent.mkdir()
        folder.write_text("a file in the place of the folder")
    assert len(split(data, cache_dir=folder if what in ("read only", "no folder") else None).classes) == 4
