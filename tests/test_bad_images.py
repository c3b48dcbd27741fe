"""Runs on data sets some of whose images turn out damaged when they are decoded."""

import cv2
import pytest
import torch
from scenes import MINUTE, write_dataset

from detector.cli import main

pytestmark = pytest.mark.slow
BAD = {"train": [2, 5], "val": [1]}


@pytest.fixture
def data(tmp_path):
    """Ten images to train and four to validate on, of which BAD are JPEGs that are cut in half."""
    path = write_dataset(tmp_path / "data")
    for split, numbers in BAD.items():
        for number in numbers:
            image = path.parent / "images" / split / f"{number:03d}.png"
            content = cv2.imencode(".jpg", cv2.imread(str(image)))[1].tobytes()
            image.unlink()
            image.with_suffix(".jpg").write_bytes(content[: len(content) // 2])
    return path


def train(folder, data, name, *overrides):
    common = ["imgsz=64", "batch=2", "nbs=4", "workers=0", "device=cpu", "plots=false", "epochs=2", "close_mosaic=1"]
    return main(["train", f"data={data}", f"model={MINUTE}", *common, f"project={folder}", f"name={name}", *overrides])


def last(folder):
    return torch.load(folder / "weights" / "last.pt", weights_only=True)


def test_damaged_images_are_skipped_alike_by_any_number_of_workers(tmp_path, data, capsys):
    """With mosaic in the first epoch, where they are partners too, and without in the second."""
    assert train(tmp_path, data, "alone", "plots=true") == 0
    lines = capsys.readouterr().out.splitlines()
    assert train(tmp_path, data, "workers", "workers=2", "cache=false") == 0
    alone, workers = last(tmp_path / "alone"), last(tmp_path / "workers")
    for part in ("model", "ema"):
        assert all(torch.equal(workers[part][name], value) for name, value in alone[part].items())
    assert alone["bad_images"] == workers["bad_images"] == BAD
    for split, numbers in BAD.items():
        for number in numbers:
            path = data.parent / "images" / split / f"{number:03d}.jpg"
            assert len([line for line in lines if line.startswith(f"warning: {split}: {path}: cannot be dec")]) == 1
    epochs = [line for line in lines if line.startswith("epoch ") and "img/s" not in line]
    assert [line.endswith(count) for line, count in zip(epochs, ("3 bad images",) * 2, strict=True)] == [True] * 2


def test_a_step_without_a_good_image_is_not_taken(tmp_path, data):
    """Each step is one image: the damaged ones make none, and their loss is in no mean."""
    assert train(tmp_path, data, "run", "batch=1", "nbs=1", "mosaic=0") == 0
    saved = last(tmp_path / "run")
    assert saved["step"] == 2 * (10 - 2)
    assert saved["skipped"] == 0
    assert all(row["box"] >= 0 for row in saved["history"])


def test_damaged_images_stop_the_run_where_that_is_wished(tmp_path, data, capsys):
    assert train(tmp_path, data, "run", "bad_images=error") == 2
    assert "cannot be decoded" in capsys.readouterr().err
