"""Imports go one way, nothing draws from a global generator, and the front door stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from exports import write_checkpoint
from scenes import TINY

from detector import checkpoint_file
from detector.cli import main
from detector.model.network import load_description, network_from_description

PACKAGE = Path(__file__).parents[1] / "detector"
# A room may import what stands before its own row; rooms of one row do not import each other.
ROWS = [
    {"errors", "boxes", "classes", "rng", "memory", "terminal", "spelling", "fonts"},
    {"distributed", "files", "values", "public_network", "drawing"},
    {"public_file"},
    {"device", "mesh", "precision", "checkpoint_file", "folders"},
    {"config"},
    {"data", "model", "loss"},
    {"step", "inference"},
    {"evaluation"},
    {"reporting"},
    {"run"},
    {"fitting", "export", "search"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def imported(file):
    """Names of the project's modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("detector"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            if node.module == "detector":
                yield from (f"detector.{alias.name}" for alias in node.names)
            elif node.module and node.module.startswith("detector."):
                yield node.module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imported(file):
        other = [*module.split("."), ""][1]
        if other in ("", room):
            continue
        assert ROW[other] < ROW[room], f"{file} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_seeds_or_draws_from_a_global_generator(file):
    text = file.read_text()
    for forbidden in (
        "np.random.seed",
        "torch.manual_seed",
        "import random",
        "np.random.rand",
        "np.random.uniform",
        "random.seed(",
    ):
        assert forbidden not in text, f"{file}: {forbidden}"


# What using a trained detector must not wait for: the trainer and its libraries, and OpenCV before there is an image.
SPARED = {
    "detector.run", "detector.step", "detector.fitting", "detector.evaluation", "detector.reporting",
    "detector.commands", "detector.data.loader", "detector.config.settings",
    "torchvision", "matplotlib", "pydantic", "faster_coco_eval", "cv2", "PIL", "yaml", "tqdm",
    "detector.export", "onnxruntime", "onnx", "openvino",
}  # fmt: skip


COMPILER = {"torchvision.models", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"}  # seconds


def test_loading_and_predicting_import_no_trainer_and_no_compiler(tmp_path):
    network = network_from_description({**load_description(TINY), "nc": 2})
    saved = {"ema": network.state_dict(), "description": network.description, "names": ["a", "b"], "imgsz": 64}
    checkpoint_file.write(tmp_path / "best.pt", saved)
    code = (
        "import sys, numpy, torch; before = set(sys.modules); import detector; "
        "model = detector.load(sys.argv[1], device='cpu'); print(*(set(sys.modules) - before)); "
        "(found,) = model.predict(numpy.zeros((64, 64, 3), 'uint8'), conf=0); assert len(found); print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, tmp_path / "best.pt"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    loading, predicting = (set(line.split()) for line in shown)
    assert "detector.inference.detector" in loading
    assert not loading & SPARED
    assert "cv2" in predicting
    assert not predicting & COMPILER


@pytest.mark.slow
def test_predicting_with_an_export_imports_no_trainer(tmp_path):
    for module in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    write_checkpoint(tmp_path / "a.pt")
    assert main(["export", str(tmp_path / "a.pt"), str(tmp_path / "a.onnx")]) == 0
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((96, 96, 3), np.uint8))
    code = "import sys; from detector.cli import main; assert main(sys.argv[1:]) == 0; print(*sys.modules)"
    words = ["predict", tmp_path / "a.onnx", tmp_path / "a.png", f"project={tmp_path}", "conf=0"]
    shown = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    imported = set(shown.splitlines()[-1].split())
    assert {"onnxruntime", "detector.commands.predict"} <= imported
    trainer = {"detector.run", "detector.step", "detector.loss", "detector.fitting", "detector.export"}
    assert not imported & {*trainer, "detector.evaluation", "detector.data.loader", "faster_coco_eval", "onnx"}
    assert not imported & COMPILER


def test_help_and_the_package_do_not_import_torch():
    code = (
        "import sys, detector, detector.cli; detector.cli.build_parser().format_help(); "
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
