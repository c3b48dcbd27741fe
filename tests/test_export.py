"""`detector export`: files that find what the checkpoint finds, and nothing left behind where they do not."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from exports import MINUTE, NAMES, finding, noise, write_checkpoint
from scenes import write_dataset
from test_training import run

import detector
from detector.export import formats, write
from detector.export.graph import ExportGraph
from detector.export.parity import EXACT, cuts, differences
from detector.inference.infer import Limits, NetworkRuntime
from detector.inference.runtimes.engines import open_engine
from detector.inference.runtimes.facts import Facts
from detector.inference.runtimes.opening import open_export
from detector.model.network import load_description
from detector.model.selection import Detections, best_candidates, non_max_suppression

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # an export takes seconds
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
LIMITS = Limits(0.25, 0.7, 300, multi_label=False)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("export") / "best.pt")


@pytest.fixture(scope="module")
def raw(best):
    """An ONNX file for any batch and size; the command's output is in raw.txt beside it."""
    return exported(best, "raw.onnx")


@pytest.fixture(scope="module")
def inside(best):
    """An ONNX file with suppression inside, for two images of 96 x 96."""
    return exported(best, "inside.onnx", "nms=true", "batch=2", "conf=0.1")


@pytest.fixture(scope="module")
def free(best):
    """A TorchScript file of the head that needs no suppression."""
    two = write_checkpoint(best.with_name("two.pt"), end2end=True)
    return exported(two, "free.torchscript", "format=torchscript", "nms=end2end")


def exported(checkpoint, name, *words):
    target = checkpoint.with_name(name)
    assert run("export", checkpoint, target, *words) == 0
    return target


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images that are not square, and one that is."""
    folder = tmp_path_factory.mktemp("photos")
    for number, (height, width) in enumerate(((60, 97), (130, 70), (96, 96))):
        image = noise(height, width, seed=number)[0].numpy()
        cv2.imwrite(str(folder / f"{number}.png"), image)
    return folder


def same(these, those, pixels=0.01, score=1e-4):
    """Whether two lists of results or detections are the same boxes in the same order."""
    for one, other in zip(these, those, strict=True):
        boxes = [np.asarray(r.boxes if hasattr(r, "boxes") else r.boxes_xyxy) for r in (one, other)]
        assert len(boxes[0]) == len(boxes[1]) > 0
        np.testing.assert_allclose(*boxes, atol=pixels)
        np.testing.assert_allclose(one.scores, other.scores, atol=score)
        np.testing.assert_array_equal(one.classes, other.classes)


# --- what comes out --------------------------------------------------------------------------------------------------


def test_onnx_is_of_standard_operations_and_any_size(raw):
    import onnx

    model = onnx.load(raw)
    onnx.checker.check_model(model, full_check=True)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", formats.OPSET)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    shapes = [
        [side.dim_param or side.dim_value for side in one.type.tensor_type.shape.dim]
        for one in (*model.graph.input, *model.graph.output)
    ]
    assert shapes == [["batch", 3, "height", "width"], ["batch", 6, "anchors"]]
    assert str(ROOT).encode() not in raw.read_bytes()  # whose machine it was


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 32, 32), (3, 64, 160), (2, 224, 96)])
def test_onnx_decodes_as_the_network_at_sizes_it_was_not_exported_at(best, raw, batch, height, width):
    import onnxruntime

    images = noise(height, width, batch).permute(0, 3, 1, 2).float() / 255
    (out,) = onnxruntime.InferenceSession(raw).run(None, {"images": images.numpy()})
    network = detector.load(best, device="cpu").network.eval()  # not fused
    with torch.no_grad():
        boxes, scores = network.head.decode(network(images))
    low, high = boxes.split(2, dim=-1)
    expected = torch.cat(((low + high) / 2, high - low, scores), dim=-1).transpose(1, 2)
    np.testing.assert_allclose(out, expected, atol=1e-3)


def test_suppression_inside_is_ours(best, inside):
    images = noise(96, 96, 5)
    network = detector.load(best, device="cpu").runtime
    limits = LIMITS._replace(conf=0.1)
    there = network.find(images, limits)
    assert max(len(one.scores) for one in there) > 20
    same(there, open_export(inside).find(images, limits))
    ops = {node.op_type for node in __import__("onnx").load(inside).graph.node}
    assert "NonMaxSuppression" in ops


def test_the_head_without_suppression_is_ours(best, free):
    images = noise(64, 96, 3)
    for multi_label in (True, False):
        limits = Limits(0.1, 0.7, 30, multi_label)
        network = detector.load(best.with_name("two.pt"), device="cpu", nms=False).runtime
        same(network.find(images, limits), open_export(free).find(images, limits))


@pytest.mark.parametrize("nms", ["inside", "none"])
def test_rows_are_padded_with_zeros_and_best_first(nms):
    facts = Facts(NAMES, 64, "detections", nms, conf=0.3, iou=0.5, max_det=120)
    graph = ExportGraph(finding(load_description(MINUTE)), facts).eval()
    images = noise(64, 64, 2).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        rows = graph(images)
        boxes, scores = graph.network.head.decode(graph.network(images))
    assert rows.shape == (2, 120, 6)  # of 84 anchors
    found = (
        non_max_suppression(boxes, scores, 0.3, 0.5, 120, multi_label=False)
        if nms == "inside"
        else best_candidates(boxes, scores, 1e-9, 120)
    )
    for image, one in zip(rows, found, strict=True):
        count = len(one.scores)
        assert 0 < count <= 120
        torch.testing.assert_close(image[:count, :4], one.boxes_xyxy)
        torch.testing.assert_close(image[:count, 4], one.scores)
        assert torch.equal(image[:count, 5].long(), one.classes)
        assert not image[count:].any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["v5nu", "v8n", "v9t", "v10n", "v11n", "v12n", "v26n"])
def test_every_family_is_exported_for_any_size(tmp_path, name):
    """To what it is in double precision as near as torch is: in a network of noise roundings grow."""
    network = finding(load_description(name))
    graph, exact = (ExportGraph(network, Facts(NAMES, 96)).eval().to(dtype) for dtype in (torch.float32, torch.float64))
    formats.onnx(graph, tmp_path / "m.onnx")
    engine = open_engine(tmp_path / "m.onnx")
    for batch, height, width in ((1, 96, 96), (3, 64, 160)):
        images = noise(height, width, batch).permute(0, 3, 1, 2).float() / 255
        with torch.no_grad():
            expected, by_torch = exact(images.double()), graph(images)
        for part, least in ((slice(0, 4), 0.01), (slice(4, None), 1e-4)):
            error, usual = ((one - expected)[:, part].abs().max() for one in (engine.run(images), by_torch))
            assert error < 5 * usual + least


# --- the command -----------------------------------------------------------------------------------------------------


def test_every_format_that_runs_here_predicts_and_says_what_it_is(tmp_path, best, raw, photos, monkeypatch, capsys):
    def refuse(*arguments, **more):
        raise AssertionError("a network is used")

    monkeypatch.setattr(socket, "socket", refuse)
    # ONNX is what takes long: the same graph again
    monkeypatch.setattr(formats, "onnx", lambda graph, target: target.write_bytes(raw.read_bytes()) and "ONNX")
    expected = detector.load(best, device="cpu").predict(photos)
    for name in ("openvino", "torchscript", "torch_export"):
        target = tmp_path / f"m{formats.FORMATS[name].suffix}"
        assert run("export", best, target, f"format={name}", f"images={photos}") == 0
        assert " FAILED" not in capsys.readouterr().out
        loaded = detector.load(target)
        assert (loaded.names, loaded.imgsz, loaded.runtime.facts.dynamic) == (NAMES, 96, True)
        same(expected, loaded.predict(photos))
        same(detector.load(best, device="cpu").predict(photos, imgsz=64), loaded.predict(photos, imgsz=64))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.pt2", "m.torchscript", "m_openvino"]
    assert sorted(one.name for one in (tmp_path / "m_openvino").iterdir()) == ["m.bin", "m.xml"]


def test_openvino_is_used_without_its_telemetry(tmp_path):
    """In a process of its own, where nobody else has imported it; its import alone sends an event as it comes."""
    pytest.importorskip("openvino")
    code = (
        "import sys; from detector.inference.runtimes.engines import silent_openvino; library = silent_openvino(); "
        "from openvino.tools.ovc import telemetry_utils as utils; library.Core(); "
        "print(utils.tm.__name__, *(name for name in sys.modules if name.startswith('openvino_telemetry')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["openvino.tools.ovc.telemetry_stub"]


def test_a_file_of_one_size_takes_what_a_checkpoint_takes(best, inside, photos):
    """As a letterbox of that square, whatever shape and number the images have."""
    from detector.data.image import letterbox, read_image
    from detector.inference.infer import find_objects

    found = detector.load(inside).predict(photos)
    network = detector.load(best, device="cpu").runtime
    for file, one in zip(sorted(photos.iterdir()), found, strict=True):
        image, placement = letterbox(read_image(file), 96, 32, rect=False)
        (expected,) = find_objects(network, torch.from_numpy(image[None]), [placement], LIMITS)
        same([expected], [one])
    with pytest.raises(detector.errors.ConfigError, match="takes images of 96 x 96 alone"):
        detector.load(inside).predict(photos, imgsz=64)


def test_what_a_file_has_settled_cannot_be_asked_otherwise(inside, photos, raw):
    for words, reason in (({"conf": 0.05}, "boxes from 0.1 on"), ({"iou": 0.5}, "iou=0.7")):
        with pytest.raises(detector.errors.ConfigError, match=reason):
            detector.load(inside).predict(photos, **words)
    for words, reason in (
        ({"amp": "bf16"}, "half=true"),
        ({"nms": False}, "nms=false"),
        ({"layout": "detections"}, "gives raw"),
    ):
        with pytest.raises(detector.errors.ConfigError, match=reason):
            detector.load(raw, **words)


def test_a_file_that_finds_something_else_is_called_unverified(tmp_path, best, monkeypatch, capsys):
    other = finding(load_description(MINUTE), seed=5)
    genuine = write.ExportGraph
    monkeypatch.setattr(write, "ExportGraph", lambda network, facts: genuine(other, facts))
    assert run("export", best, tmp_path / "m.torchscript", "format=torchscript") == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert [one.name for one in tmp_path.iterdir()] == ["m.torchscript.unverified"]


def test_nothing_is_replaced_unasked_and_a_failure_leaves_nothing(tmp_path, best, monkeypatch, capsys):
    target = tmp_path / "m.torchscript"
    target.write_bytes(b"mine")
    words = (best, target, "format=torchscript")
    assert run("export", *words) == 2
    assert "exist_ok=true" in capsys.readouterr().err

    def full(*arguments, **more):
        (folder,) = tmp_path.glob(".m.torchscript.*.unfinished")
        folder.joinpath("m.torchscript").write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch.jit, "save", full)
        assert run("export", *words, "exist_ok=true") == 2
        assert "No space left on device; make room" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["m.torchscript"]
    assert target.read_bytes() == b"mine"
    assert run("export", *words, "exist_ok=true", "batch=1") == 0
    assert "1 x 96 x 96" in capsys.readouterr().out
    assert detector.load(target).runtime.side == 96
    folder = tmp_path / "m_openvino"
    folder.mkdir()
    (folder / "diary.txt").touch()
    assert run("export", best, folder, "format=openvino", "exist_ok=true") == 2
    assert "a folder with other things in it" in capsys.readouterr().err


def test_what_is_not_installed_is_refused_with_the_pip_line(tmp_path, best, capsys, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda module: None if module in ("coremltools", "onnx") else True)
    assert run("export", best, tmp_path / "m.mlpackage", "format=coreml") == 2
    assert "needs coremltools: pip install coremltools" in capsys.readouterr().err
    assert run("export", best, tmp_path / "m.onnx") == 2
    assert "pip install onnx\n" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_words_that_contradict_the_model_are_refused(tmp_path, best, raw, capsys):
    for words, reason in (
        (("nms=end2end",), "no branch whose boxes need no suppression"),
        (("nms=true", "format=torchscript"), "one of onnx, openvino"),
        (("imgsz=100",), "must be a multiple of 32"),
        (("imgsz=[320,640]",), "the network's input is square"),
        ((f"to={tmp_path / 'm'}",), "write m.onnx"),
        ((f"to={tmp_path / 'm.onnx'}", "format=torchscript"), "write m.onnx.torchscript"),
        (("format=onnxx",), "format='onnxx'"),
        (("int8=true",), "needs a data set to calibrate on"),
        ((f"to={tmp_path / 'no' / 'm.onnx'}",), "no such folder"),
    ):
        assert run("export", best, *words) == 2
        assert reason in capsys.readouterr().err
    assert run("export", raw) == 2
    assert "name the checkpoint" in capsys.readouterr().err


def test_half_is_proved_within_its_own_limits(tmp_path, best, capsys):
    assert run("export", best, tmp_path / "m.torchscript", "format=torchscript", "half=true", "batch=2") == 0
    shown = capsys.readouterr().out
    assert "within 2 px and 0.02; 2% may be unlike" in shown
    row = next(line for line in shown.splitlines() if re.match(r" +96 +2 ", line)).split()
    assert float(row[4]) > 1e-3  # it does compute in halves


# --- the proof -------------------------------------------------------------------------------------------------------


def found(*rows):
    boxes, scores, classes = zip(*rows, strict=True)
    return Detections(torch.tensor(boxes), torch.tensor(scores), torch.tensor(classes))


def test_differences_are_to_the_nearest_box_of_the_class():
    box, near = (10.0, 10.0, 20.0, 20.0), (10.0, 10.0, 20.0, 20.25)
    far = (30.0, 30.0, 40.0, 40.0)
    pixels, score = differences(
        found((box, 0.9, 0), (box, 0.8, 1), (far, 0.5, 2)), found((far, 0.9, 0), (near, 0.8995, 0))
    )
    np.testing.assert_allclose(pixels, [0.25, np.inf, np.inf])
    np.testing.assert_allclose(score, [5e-4, np.inf, np.inf], rtol=1e-3)
    crowd = found((near, 0.5, 0), (box, 0.2, 0))  # what is nearest in the plane alone is another one
    np.testing.assert_allclose(differences(found((box, 0.5, 0)), crowd), [[0.25], [0.0]])
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert np.isinf(differences(found((box, 0.9, 0)), nothing)[0]).all()
    assert len(differences(nothing, found((box, 0.9, 0)))[0]) == 0


@pytest.mark.parametrize("change", ["box", "score", "class", "lost", "more"])
def test_any_change_above_the_tolerance_fails_the_proof(change, monkeypatch):
    from detector.export import parity

    network = NetworkRuntime(finding(load_description(MINUTE)), "cpu")
    facts = Facts(NAMES, 96)

    class Changed:
        def __init__(self):
            self.facts = facts

        def find(self, images, limits):
            detections = network.find(images, limits)
            boxes, scores, classes = (one.clone() for one in detections[0])
            if change == "box":
                boxes[0, 2] += 1.1 * EXACT.pixels
            elif change == "score":
                scores[0] -= 1.1 * EXACT.score
            elif change == "class":
                classes[0] = 7
            elif change == "lost":
                boxes, scores, classes = boxes[1:], scores[1:], classes[1:]
            else:
                boxes, classes = torch.cat((boxes, boxes[:1] + 300)), torch.cat((classes, classes[:1]))
                scores = torch.cat((scores, scores[:1]))
            return [Detections(boxes, scores, classes), *detections[1:]]

    images = [noise(96, 96, seed=seed)[0].numpy() for seed in range(2)]
    found = parity.compare(network, Changed(), images)
    assert not found.passed
    assert [(row.imgsz, row.batch) for row in found.rows] == [(96, 1), (96, 4), (32, 1), (32, 4)] == cuts(facts)
    monkeypatch.setattr(Changed, "find", lambda self, images, limits: network.find(images, limits))
    assert parity.compare(network, Changed(), images).passed


# --- val, and the docs -----------------------------------------------------------------------------------------------


def test_val_measures_an_export_beside_its_checkpoint(tmp_path, best, raw, inside, capsys):
    data = write_dataset(tmp_path / "data", train=1, val=5)
    common = (f"data={data}", "plots=false", "workers=0", "device=cpu", "batch=3", f"project={tmp_path}")
    assert run("val", raw, *common, f"against={best}") == 0
    shown = capsys.readouterr().out.splitlines()
    assert "ONNX Runtime on cpu, fp32" in shown[0]
    ours, theirs, apart = (line.split() for line in shown[-3:])
    assert (ours[0], theirs[0], apart[0]) == (str(raw), str(best), "difference")
    assert ours[1:7] == theirs[1:7]
    assert all(abs(float(value)) < 1e-4 for value in apart[1:])
    assert run("val", inside, *common, "conf=0.1", "save_json=true") == 0
    assert json.loads((tmp_path / "val" / "detections.json").read_text())
    assert run("val", raw, "plots=false") == 2
    assert "name one: detector val" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["raw", "inside"])
def test_the_program_in_the_docs_finds_what_predict_finds(which, photos, request, monkeypatch, capsys, tmp_path):
    model = request.getfixturevalue(which)
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(re.search(r"^```python\n(.*?)^```", text, flags=re.M | re.S)[1])
    assert "detector" not in program.read_text()
    for expected in detector.load(model).predict(photos):
        monkeypatch.setattr(sys, "argv", ["program.py", str(model), str(expected.path)])
        capsys.readouterr()
        runpy.run_path(str(program))
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        rows.sort(key=lambda row: -float(row[1]))
        assert [row[0] for row in rows] == [NAMES[label] for label in expected.classes]
        np.testing.assert_allclose([float(row[1]) for row in rows], expected.scores, atol=2e-3)
        np.testing.assert_allclose([list(map(float, row[2:])) for row in rows], expected.boxes, atol=0.1)


def test_the_docs_have_every_fact_and_every_format():
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|([^|]*)\|", text.partition("## Metadata")[2], flags=re.M)
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == Facts(NAMES, 96).texts().keys()
    assert set(re.findall(r"^\| `(\w+)` \| NAME", text, flags=re.M)) == formats.FORMATS.keys()


# --- what stands in the way ------------------------------------------------------------------------------------------


def test_what_two_calls_write_at_once_is_whole_and_what_killed_ones_left_goes(tmp_path):
    """Each has a folder of its own, whatever the other does; one of a killed call stays for a day."""
    target = tmp_path / "m[1].onnx"
    new, old = (tmp_path / f".m[1].onnx.{name}.unfinished" for name in ("new", "old"))
    for folder in (new, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    with write._beside(target) as one:
        one.write_text("one")
        with write._beside(target) as other:
            other.write_text("other")
            write._put(other, target)
        write._put(one, target)
    assert target.read_text() == "one"
    assert sorted(tmp_path.iterdir()) == sorted([target, new])


@pytest.mark.parametrize("name", ["torchscript", "torch_export"])
def test_a_full_disk_is_told_and_leaves_nothing(name, tmp_path, best, capsys):
    """By a limit at which the system refuses: torch's own writer would end the process."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        status = run("export", best, tmp_path / f"m{formats.FORMATS[name].suffix}", f"format={name}", "batch=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2
    assert "File too large; make room" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
