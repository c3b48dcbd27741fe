"""Exports in int8: what is refused before any work, what is calibrated on, what stays float, and the loss of mAP."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
import yaml
from exports import NAMES, noise, write_checkpoint
from scenes import write_dataset
from test_training import run

import detector
from detector.commands import export as command
from detector.data.description import load_description
from detector.data.image import letterbox
from detector.data.reading import Reading, build_index
from detector.evaluation.evaluate import ground_truth_of, judge_found
from detector.export.accuracy import Accuracy, judged_by
from detector.export.int8 import calibration, up_to_convolutions
from detector.inference.infer import JUDGED
from detector.inference.runtimes.facts import Facts, read_facts
from detector.model.selection import Detections

pytestmark = pytest.mark.slow  # an export takes seconds
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
needs_nncf = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nncf", "openvino")), reason="needs openvino and nncf"
)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("int8") / "best.pt")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), train=9, val=4)


@pytest.fixture(scope="module")
def quantised(best, data):
    """An ONNX file for any batch and size, written where the locale cannot spell the place."""
    target = best.with_name("dätá") / "quantised.onnx"
    target.parent.mkdir()
    place = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = (best, target, "int8=true", f"data={data}", "calibration=4")
    command = [sys.executable, "-m", "detector", "export", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr
    return target


# --- refused ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_in_int8_is_refused_and_nothing_is_written(tmp_path, best, data, capsys):
    others = tmp_path / "others.yaml"
    others.write_text(
        yaml.safe_dump({**yaml.safe_load(data.read_text()), "path": str(data.parent), "names": ["cat", "dog"]})
    )
    empty = tmp_path / "empty.yaml"
    (tmp_path / "nothing").mkdir()
    content = {**yaml.safe_load(data.read_text()), "path": str(data.parent)}
    empty.write_text(yaml.safe_dump({**content, "train": str(tmp_path / "nothing")}))
    gone = write_checkpoint(tmp_path / "gone.pt", settings={"data": str(tmp_path / "gone.yaml")})
    before = sorted(tmp_path.iterdir())
    target = tmp_path / "m.onnx"
    for checkpoint, words, reason in (
        (best, ("half=true", f"data={data}"), "half=true int8=true: a file computes in one of them"),
        (best, ("format=torchscript", f"data={data}"), "torchscript is not quantised here; int8=false, or one of onnx"),
        (best, (), "needs a data set to calibrate on"),
        (gone, (), "gone.yaml, which"),
        (best, (f"data={others}",), "its classes are not those"),
        (best, (f"data={empty}",), "nothing"),
        (best, (f"data={data}", "images=photos"), "with int8=true the images are those of data"),
        (best, (f"data={data}", "calibration=0"), "calibration"),
        (best, (f"data={data}", "max_loss=1.5"), "max_loss"),
        (best, (f"data={data}", "imgsz=100"), "must be a multiple of 32"),
    ):
        assert run("export", checkpoint, target, "int8=true", *words) == 2, words
        assert reason in capsys.readouterr().err
    assert run("export", best, target, "calibration=8") == 2
    assert "belongs to int8=true" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_split_without_boxes_measures_no_loss(tmp_path, best, capsys):
    data = write_dataset(tmp_path, train=2, val=1)  # the first image is background
    assert run("export", best, tmp_path / "m.onnx", "int8=true", f"data={data}") == 2
    assert "val: has no box to measure" in capsys.readouterr().err


def test_int8_of_openvino_names_the_package_that_it_needs(tmp_path, best, data, capsys, monkeypatch):
    from detector.export import formats

    monkeypatch.setattr(formats, "find_spec", lambda module: None if module == "nncf" else True)
    words = ("format=openvino", "int8=true", f"data={data}")
    assert run("export", best, tmp_path / "m_openvino", *words) == 2
    assert "format=openvino int8=true: needs nncf: pip install nncf" in capsys.readouterr().err


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_takes_images_from_all_over_the_split_as_validation_puts_them_in(tmp_path):
    """In batches of a fixed size the last one is filled up; files that take any size get each image by itself."""
    folder = write_dataset(tmp_path, train=7, val=1).parent
    for number in range(7):
        image = noise(40, 80, seed=number)[0].numpy()
        cv2.imwrite(str(folder / f"images/train/{number:03d}.png"), image)
    index = build_index(load_description(folder / "data.yaml"), "train", Reading())
    expected = [letterbox(index.image(i), 96, 32, rect=True)[0].transpose(2, 0, 1) / 255 for i in (0, 3, 6)]
    feed = calibration(index, Facts(NAMES, 96), 3)
    assert [one.shape for one in feed] == [(1, 3, 64, 96)] * 3
    np.testing.assert_allclose(np.concatenate(feed), expected, atol=1e-6)
    feed = calibration(index, Facts(NAMES, 96, batch=2, dynamic=False), 3)
    assert [one.shape for one in feed] == [(2, 3, 96, 96)] * 2
    np.testing.assert_array_equal(feed[1][0], feed[1][1])
    assert len(calibration(index, Facts(NAMES, 96), 100)) == 7


def test_the_end_of_a_graph_reaches_to_the_last_convolutions():
    sources = {"out": ["add", "box"], "add": ["cls", "deep"], "deep": ["cls"], "box": ["stem"], "cls": ["stem"]}
    kept = up_to_convolutions(["out"], lambda node: sources.get(node, []), {"box", "cls", "stem"}.__contains__, str)
    assert sorted(kept) == ["add", "box", "cls", "deep", "out"]


# --- what is written -------------------------------------------------------------------------------------------------


def test_int8_is_of_standard_operations_and_float_from_the_last_convolutions_on(quantised):
    """Weights have seven bits: of eight, two products overflow 16 bits on processors without VNNI."""
    model = onnx.load(quantised)
    assert [one.domain for one in model.opset_import] == [""]
    assert {node.domain for node in model.graph.node} == {""}
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    in_float = [node for node in convolutions if node.input[1] in weights]
    assert sorted(len(weights[node.input[1]]) for node in in_float) == [2, 2, 2, 64, 64, 64]
    assert len(convolutions) > 10
    for node in convolutions:
        if node not in in_float:
            maker = makers[node.input[1]]
            assert maker.op_type == "DequantizeLinear"
            assert weights[maker.input[0]].dtype == np.int8
            assert np.abs(weights[maker.input[0]].astype(int)).max() <= 64


def test_an_int8_file_is_used_as_any_export(quantised, best, data, tmp_path, capsys):
    common = (f"data={data}", "plots=false", "workers=0", "device=cpu", f"project={tmp_path}")
    assert run("val", quantised, *common, f"against={best}") == 0
    assert "ONNX Runtime on cpu, int8" in capsys.readouterr().out
    assert run("predict", quantised, data.parent / "images" / "val", f"project={tmp_path}", "save=false") == 0
    loaded, checkpoint = detector.load(quantised), detector.load(best, device="cpu")
    assert loaded.runtime.facts == Facts(NAMES, 96, int8=True)
    for imgsz in (96, 64):  # the same boxes, roughly: this network's scores are made of noise
        images = noise(imgsz, imgsz, 3)
        for one, other in zip(*(r.find(images, JUDGED) for r in (loaded.runtime, checkpoint.runtime)), strict=True):
            assert len(one.scores) > 10
            top = other.boxes_xyxy[:10]
            apart = (top[:, None] - one.boxes_xyxy[None]).abs().amax(dim=2).amin(dim=1)
            assert apart.median() < 4


@pytest.mark.parametrize("words", [("nms=true", "batch=2", "conf=0.1"), ("batch=3",)])
def test_int8_with_suppression_inside_and_of_one_size(words, tmp_path, best, data, capsys):
    target = tmp_path / "m.onnx"
    assert run("export", best, target, "int8=true", f"data={data}", "calibration=3", *words) == 0
    shown = capsys.readouterr().out
    assert "int8 inside" in shown
    assert "4 images, detections with a score of" in shown
    found = detector.load(target).predict(data.parent / "images" / "val", conf=0.1)
    assert sum(len(one.boxes) for one in found) > 0
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx"]


def test_int8_where_the_locale_cannot_spell_the_place(quantised):
    assert [one.name for one in quantised.parent.iterdir()] == ["quantised.onnx"]


@needs_nncf
def test_openvino_in_int8(tmp_path, best, data, capsys):
    target = tmp_path / "m_openvino"
    assert run("export", best, target, "format=openvino", "int8=true", f"data={data}", "calibration=4") == 0
    shown = capsys.readouterr().out
    assert "Statistics" not in shown
    assert sorted(one.name for one in target.iterdir()) == ["m.bin", "m.xml"]
    text = (target / "m.xml").read_text()
    assert 'type="FakeQuantize"' in text
    loaded = detector.load(target)
    assert loaded.runtime.title == "OpenVINO on cpu, int8"
    assert sum(len(one.boxes) for one in loaded.predict(data.parent / "images" / "val", conf=0.1)) > 0
    assert run("export", best, target, "format=openvino", "int8=true", f"data={data}") == 2


def test_files_from_before_int8_are_read():
    texts = Facts(NAMES, 96).texts()
    del texts["int8"]
    assert read_facts(texts, "old.onnx") == Facts(NAMES, 96)


# --- the proof -------------------------------------------------------------------------------------------------------


def accuracy(data, share, most):
    """All true boxes found by the checkpoint, and in the first `share` of the images by the export."""
    index = build_index(load_description(data), "val", Reading())
    truth = ground_truth_of(index)

    def perfect(i):
        labels = np.asarray(index.labels(i)).astype(np.int64)
        fields = (index.boxes_xyxy(i), np.ones(len(labels)), labels)
        return Detections(*(torch.as_tensor(np.asarray(field)) for field in fields))

    whole = judge_found(truth, {i: perfect(i) for i in range(len(index))}, NAMES)
    part = judge_found(truth, {i: perfect(i) for i in range(int(share * len(index)))}, NAMES)
    timed = [replace(one, seconds={"detect": 2.0}) for one in (whole, part)]
    return Accuracy(*timed, most, 0.001, "ONNX Runtime on cpu, int8")


def test_a_loss_above_the_limit_fails(data):
    same = accuracy(data, 1.0, 0.0)
    assert same.loss == 0
    assert same.passed
    worse = accuracy(data, 0.5, 0.1)
    assert worse.loss > 0.1
    assert not worse.passed
    assert "FAILED" in "\n".join(worse.lines())
    assert replace(worse, most=worse.loss).passed
    better = replace(worse, checkpoint=worse.exported, exported=worse.checkpoint)
    assert better.loss < 0
    assert better.passed


@pytest.mark.slow
@pytest.mark.long
def test_a_file_that_loses_more_is_called_unverified(tmp_path, best, data, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda *arguments, most, **more: accuracy(data, 0.5, most))
    target = tmp_path / "m.onnx"
    words = (f"data={data}", "calibration=2", "max_loss=0.02")
    assert run("export", best, target, "int8=true", *words) == 1
    shown = capsys.readouterr().out
    assert "allowed: a loss of 0.02 of mAP50-95" in shown
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx.unverified"]


def test_checkpoint_and_file_are_judged_by_what_the_file_has_settled():
    assert judged_by(Facts(NAMES, 96)) == JUDGED
    inside = Facts(NAMES, 96, output="detections", nms="inside", conf=0.1, iou=0.5, max_det=20)
    assert judged_by(inside) == (0.1, 0.5, 20, False)
    assert judged_by(replace(inside, nms="none", conf=0.0)) == (JUDGED.conf, 0.5, 20, True)
