"""Results that cannot be written: an error with the place and the remedy, from every command, and no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from scenes import MINUTE, write_dataset
from test_training import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=4, val=3, size=256)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("trained")
    settings = [f"data={data}", f"model={MINUTE}", "imgsz=64", "epochs=1", "workers=0", "plots=false", "device=cpu"]
    assert run("train", *settings, f"project={folder}", "name=run") == 0
    return folder / "run" / "weights" / "best.pt"


def on_disk(disk, size, *command):
    """Run the command line with a disk of that size."""
    if not ranks.can_mount():
        pytest.skip("mounting in a namespace of one's own does not work here")
    disk.mkdir()
    return ranks.call("detector", *command, mounts=[(f"size={size}", disk)])


def told(done):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_val_and_predict_on_a_full_disk(tmp_path, data, trained):
    val = told(on_disk(tmp_path / "a", "16k", "val", trained, f"project={tmp_path / 'a'}", "workers=0"))
    assert f"OutputError: {tmp_path / 'a' / 'val'}" in val
    assert "No space left on device; make room, or choose another project=" in val
    images = data.parent / "images" / "val"
    predict = told(on_disk(tmp_path / "b", "16k", "predict", trained, images, f"project={tmp_path / 'b'}"))
    assert f"OutputError: {tmp_path / 'b' / 'predict'}" in predict
    assert "No space left on device; make room" in predict


def test_what_is_printed_onto_a_full_disk(trained):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "detector", "info", str(trained)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert "OutputError: what is printed: cannot be written: No space left on device" in told(done)


@pytest.mark.parametrize("command", ["val", "predict"])
def test_a_project_that_is_a_file(tmp_path, data, trained, command):
    (tmp_path / "project").write_text("", encoding="utf-8")
    words = [trained, "plots=false", "save_json=true"]
    words = words if command == "val" else [trained, data.parent / "images" / "val"]
    done = ranks.call("detector", command, *words, f"project={tmp_path / 'project'}")
    assert "cannot make a run folder here: Not a directory; choose another project=" in told(done)
