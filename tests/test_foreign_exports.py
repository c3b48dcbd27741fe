"""Exports that other tools made, which say nothing of themselves, and files that are none; made here in an instant."""

import numpy as np
import pytest
import torch
from exports import noise
from test_training import run

import detector
from detector.errors import CheckpointError, ConfigError
from detector.inference.infer import Limits
from detector.inference.runtimes import engines
from detector.inference.runtimes.engines import Engine
from detector.inference.runtimes.exported import ExportedRuntime, rows_to_detections
from detector.inference.runtimes.facts import Facts, read_facts
from detector.inference.runtimes.opening import open_export
from detector.memory import attempt

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
LIMITS = Limits(0.25, 0.7, 300, multi_label=False)


def write_constant(path, output, sides=(1, 3, 64, 64), kind="FLOAT", **metadata):
    """An ONNX file that gives these numbers, plus nothing of each image that it looks at."""
    from onnx import TensorProto, helper, numpy_helper

    output = np.asarray(output, np.float32)
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "nothing"], ["none"]),
        helper.make_node("Add", ["constant", "none"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "constant",
        [helper.make_tensor_value_info("images", getattr(TensorProto, kind), list(sides))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, list(output.shape))],
        [numpy_helper.from_array(output, "constant"), numpy_helper.from_array(np.float32(0), "nothing")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


RAW = np.zeros((1, 6, 4), np.float32)  # two classes, four anchors
RAW[0, :, 0] = 20, 30, 8, 12, 0.1, 0.9
RAW[0, :, 1] = 21, 30, 8, 12, 0.1, 0.8  # suppressed by the first
RAW[0, :, 2] = 40, 40, 10, 10, 0.6, 0.3
ROWS = np.zeros((1, 5, 6), np.float32)
ROWS[0, 0] = 16, 24, 24, 36, 0.9, 1
ROWS[0, 1] = 35, 35, 45, 45, 0.6, 0
ROWS[0, 2] = 35, 35, 45, 45, 0.3, 1  # the same anchor's other class
EXPECTED = [[16, 24, 24, 36], [35, 35, 45, 45]], [0.9, 0.6], [1, 0]


@pytest.mark.parametrize(
    ("output", "sides", "kind"),
    [
        (RAW, (1, 3, 64, 64), "FLOAT"),
        (RAW, ("b", 3, "h", "w"), "FLOAT"),
        (RAW, (1, 64, 64, 3), "FLOAT"),
        (RAW, (1, 3, 64, 64), "FLOAT16"),
        (ROWS, (1, 3, 64, 64), "FLOAT"),
    ],
)
def test_a_file_without_metadata_is_used_as_what_it_is_said_to_be(tmp_path, output, sides, kind):
    path = write_constant(tmp_path / "m.onnx", output, sides, kind)
    found = detector.load(path, device="cpu", names=["a", "b"], imgsz=64)
    (result,) = found.predict(noise(64, 64)[0].numpy())
    np.testing.assert_allclose(result.boxes, EXPECTED[0], atol=1e-4)
    np.testing.assert_allclose(result.scores, EXPECTED[1], atol=1e-6)
    assert result.classes.tolist() == EXPECTED[2]
    assert result.names == ("a", "b")


def test_what_is_missing_and_what_does_not_fit_is_said(tmp_path, capsys):
    fixed = write_constant(tmp_path / "fixed.onnx", RAW)
    free = write_constant(tmp_path / "free.onnx", RAW, ("b", 3, "h", "w"))
    square = write_constant(tmp_path / "square.onnx", np.zeros((1, 6, 6)))
    for path, words, reason in (
        (fixed, {}, r"does not say its names; give names='\[cat, dog\]'"),
        (free, {}, "does not say its names and imgsz; .* imgsz=640"),
        (fixed, {"names": ["a", "b"], "imgsz": 96}, "takes images of 64 x 64 alone"),
        (fixed, {"names": ["a"]}, r"gives \(1, 6, 4\); with 1 names .* \(B, 5, anchors\)"),
        (square, {"names": ["a", "b"]}, "layout=raw or layout=detections"),
        (fixed, {"names": ["a", "b"], "layout": "rows"}, "should be raw or detections"),
        (tmp_path / "none.onnx", {}, "no such file"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=reason):
            detector.load(path, device="cpu", **words)
    assert detector.load(square, names=["a", "b"], layout="detections").runtime.facts.nms == "none"
    assert run("predict", fixed, tmp_path) == 2
    assert "give names=" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".torchscript", ".pt2"])
def test_a_file_that_is_something_else_is_an_error_of_one_line(tmp_path, suffix):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(b"PK\x03\x04 no such thing")
    with pytest.raises(CheckpointError, match=rf"m{suffix}: cannot be opened as {suffix[1:]} \(") as caught:
        detector.load(path, device="cpu")
    assert "\n" not in str(caught.value)
    (tmp_path / "two.xml").touch()
    if suffix == ".xml":
        with pytest.raises(CheckpointError, match="has 2 models"):
            detector.load(tmp_path, device="cpu")


def test_a_library_that_is_missing_is_named_with_its_pip_line(tmp_path, monkeypatch):
    path = write_constant(tmp_path / "m.onnx", RAW)
    monkeypatch.setattr(engines, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match="needs onnxruntime, which is not installed: pip install onnxruntime"):
        detector.load(path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="device=cuda:7"):
        detector.load(path, device="cuda:7")


def test_facts_come_back_as_they_were_written_and_damage_is_told():
    facts = Facts(("猫", "b c"), 320, "detections", "inside", 4, False, 64, 4, (0.0, 4095.0), True, 0.2, 0.5, 50)
    assert read_facts(facts.texts(), "m") == facts
    assert read_facts({"names": "{0: 'a'}", "stride": "32"}, "m") is None  # of another tool
    for name, value in (("imgsz", "["), ("schema", "99")):
        with pytest.raises(CheckpointError, match=r"m: .*(damaged|schema 99)"):
            read_facts({**facts.texts(), name: value}, "m")
    with pytest.raises(CheckpointError, match="damaged"):
        read_facts({"schema": "1", "names": "[]"}, "m")


# --- how images go in ------------------------------------------------------------------------------------------------


def recording(shape, **facts):
    """A runtime of a file that notes what it is given, and finds the whole input."""
    seen = []

    def run(images):
        seen.append(images)
        height, width = images.shape[2:]
        rows = torch.tensor([width / 2, height / 2, width, height, 0.9])
        return rows.repeat(len(images), 1)[..., None]

    return ExportedRuntime(Engine(run, {}, shape, "test"), Facts(("a",), **facts)), seen


def test_images_are_padded_as_a_square_letterbox_and_batches_filled():
    runtime, seen = recording((4, 3, 96, 96), imgsz=96, batch=4, dynamic=False)
    images = noise(64, 96, 6)
    found = runtime.find(images, LIMITS)
    assert [tuple(one.shape) for one in seen] == [(4, 3, 96, 96)] * 2
    given = torch.cat(seen)
    assert torch.equal((given[:6, :, 16:80] * 255).round().byte(), images.permute(0, 3, 1, 2))
    assert torch.equal((given[:6, :, :16] * 255).round(), torch.full((6, 3, 16, 96), 114.0))
    assert torch.equal((given[:6, :, 80:] * 255).round(), torch.full((6, 3, 16, 96), 114.0))
    assert len(found) == 6
    assert found[0].boxes_xyxy.tolist() == [[0.0, -16.0, 96.0, 80.0]]  # in pixels of the image that was given
    with pytest.raises(ConfigError, match="96 x 96 at most"):
        runtime.find(noise(128, 96), LIMITS)


def test_running_out_of_memory_halves_the_batch(monkeypatch):
    class AllocationError(Exception):  # as ONNX Runtime's, which is no RuntimeError
        pass

    sizes = []
    runtime, _ = recording((None,) * 4, imgsz=64)
    genuine = runtime.engine.run

    def short(images):
        sizes.append(len(images))
        if len(images) > 2:
            raise AllocationError(
                "[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size 8589934592"
            )
        return genuine(images)

    runtime = ExportedRuntime(runtime.engine._replace(run=short), runtime.facts)
    results = detector.inference.detector.Detector(runtime, ("a",), 64).predict(list(noise(64, 64, 5).numpy()), batch=5)
    assert len(results) == 5
    assert sizes == [5, 3, 2, 2, 1]
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)


def test_rows_are_filtered_by_score_and_cut():
    rows = torch.from_numpy(np.concatenate([ROWS[0], np.full((1, 6), np.nan, np.float32)]))
    both = rows_to_detections(rows, Limits(0.0, 0.7, 300, multi_label=True))
    assert both.scores.tolist() == pytest.approx([0.9, 0.6, 0.3])
    assert rows_to_detections(rows, Limits(0.0, 0.7, 300, False)).classes.tolist() == [1, 0]
    assert len(rows_to_detections(rows, Limits(0.0, 0.7, 1)).scores) == 1
    assert len(rows_to_detections(rows[3:5], LIMITS).scores) == 0


def test_predict_writes_for_an_export(tmp_path, capsys):
    import cv2

    path = write_constant(tmp_path / "m.onnx", RAW)
    cv2.imwrite(str(tmp_path / "a.png"), noise(32, 64)[0].numpy())
    words = ("names=[cat, dog]", "save_txt=true", f"project={tmp_path}", "name=out")
    assert run("predict", path, tmp_path / "a.png", *words) == 0
    assert "1 cat, 1 dog" in capsys.readouterr().out
    assert len((tmp_path / "out" / "labels" / "a.txt").read_text().splitlines()) == 2
    assert open_export(path, names=["a", "b"]).title == "ONNX Runtime on cpu, fp32"
