"""The libraries that run exported files, each behind one function: an array of images in, the file's output out.

A library is imported when a file needs it and not before.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detector.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "detector"  # what holds the facts where a format has one text for them
Shape = tuple[int | None, ...]  # None: any


class Engine(NamedTuple):
    """A file that is open and ready to run."""

    run: Callable[
        [Tensor], Tensor
    ]  # float32 images in 0..1 on the host, in the order of `shape`, to the float32 output
    texts: Mapping[str, str]  # the file's metadata
    shape: Shape  # of the input: (B, C, H, W), or (B, H, W, C) where another tool made the file
    title: str  # what runs it, and where


def is_export(path: Path) -> bool:
    """Whether a path is what an engine opens, by its name; a folder, by what is in it."""
    return path.suffix.lower() in OPENERS or (path.is_dir() and any(path.glob("*.xml")))


def open_engine(path: Path, device: str = "auto") -> Engine:
    """The engine for a file. Raises CheckpointError where it is missing or damaged, ConfigError where its library or
    the device is not there."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; name one that is here, nothing is downloaded")
    if path.is_dir():
        models = sorted(path.glob("*.xml"))
        if len(models) != 1:
            raise CheckpointError(f"{path}: has {len(models)} models (*.xml); name the file of one")
        path = models[0]
    return OPENERS[path.suffix.lower()](path, str(device).strip().lower())


def need(package: str, what: str, pip: str | None = None) -> None:
    """Raise ConfigError unless a package is installed, with the line that installs it; `pip`: another name there."""
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs {pip or package}, which is not installed: pip install {pip or package}")


def beside(path: Path) -> Path:
    """The file that holds the facts of one whose format has no place for them."""
    return path.with_name(f"{path.name}.json")


@contextmanager
def silent() -> Iterator[None]:
    """A context to import OpenVINO and NNCF in, without their telemetry: as they come, being imported or used is enough
    for them to report to their makers.

    They do without that part where it cannot be imported, for which None in `sys.modules` is Python's own word.
    """
    part = "openvino_telemetry"
    absent = part not in sys.modules
    if absent:
        sys.modules[part] = None
    try:
        yield
    finally:
        if absent:
            del sys.modules[part]


def silent_openvino() -> ModuleType:
    """OpenVINO without its telemetry."""
    with silent():
        return import_module("openvino")


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """A context in which whatever a library says of a file it cannot open becomes a CheckpointError."""
    try:
        yield
    except Exception as error:  # each library has errors of its own, some of them plain Exceptions
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: cannot be opened as {path.suffix[1:]} ({first[:200]})") from None


def _onnx(path: Path, device: str) -> Engine:
    need("onnxruntime", f"{path.name}: an ONNX file")
    import onnxruntime

    cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    wanted = device.startswith("cuda") or device.isdigit()
    if device not in ("auto", "cpu") and not (wanted and cuda):
        raise ConfigError(f"device={device}: this ONNX Runtime has no such device (GPUs: pip install onnxruntime-gpu)")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # it would start one a core, whatever share of them is ours
    options.log_severity_level = 3  # errors: warnings about a graph are not its user's
    providers = ["CUDAExecutionProvider"] * (cuda and device != "cpu") + ["CPUExecutionProvider"]
    with _opening(path):
        file = str(path) if _spelt(path) else path.read_bytes()
        session = onnxruntime.InferenceSession(file, options, providers=providers)
    (image, *_), output = session.get_inputs(), session.get_outputs()[0].name
    kind = np.float16 if image.type == "tensor(float16)" else np.float32

    def run(images: Tensor) -> Tensor:
        found = session.run([output], {image.name: images.numpy().astype(kind, copy=False)})[0]
        return _host(found)

    shape = tuple(side if isinstance(side, int) else None for side in image.shape)
    where = "cuda" if session.get_providers()[0].startswith("CUDA") else "cpu"
    return Engine(run, session.get_modelmeta().custom_metadata_map, shape, f"ONNX Runtime on {where}")


def _openvino(path: Path, device: str) -> Engine:
    need("openvino", f"{path.name}: an OpenVINO model")
    _only_on_cpu(device, "OpenVINO models run")
    core = silent_openvino().Core()
    with _opening(path):
        model = core.read_model(str(path))
        held = json.loads(model.get_rt_info([KEY]).astype(str)) if model.has_rt_info([KEY]) else {}
        texts = held if isinstance(held, dict) else {}
        # Left alone it computes in bfloat16 where the processor can, which finds other boxes.
        precise = {} if texts.get("half") == "true" else {"INFERENCE_PRECISION_HINT": "f32"}
        threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = core.compile_model(model, "CPU", {**precise, **threads})
    request = compiled.create_infer_request()

    def run(images: Tensor) -> Tensor:
        request.infer([images.numpy()])
        return _host(request.get_output_tensor(0).data.copy())  # its memory is the next call's

    shape = tuple(side.get_length() if side.is_static else None for side in compiled.input(0).get_partial_shape())
    return Engine(run, texts, shape, "OpenVINO on cpu")


def _torchscript(path: Path, device: str) -> Engine:
    from detector.device import choose_device

    target, held = choose_device(device), {f"{KEY}.json": ""}
    with _opening(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated is not news to its reader
        file = str(path) if _spelt(path) else io.BytesIO(path.read_bytes())
        module = torch.jit.load(file, map_location=target, _extra_files=held).eval()
        texts = json.loads(held[f"{KEY}.json"] or "{}")
    return Engine(_by_module(module, target), texts, (None, None, None, None), f"TorchScript on {target}")


def _torch_export(path: Path, device: str) -> Engine:
    _only_on_cpu(device, "torch.export's programs run")
    held = {f"{KEY}.json": ""}
    with _opening(path):
        program = torch.export.load(path, extra_files=held)
        try:  # its guards rule out maps of one cell, which were never seen in export and come out right
            module = program.module(check_guards=False)
        except TypeError:  # torch before 2.9 has none
            module = program.module()
        texts = json.loads(held[f"{KEY}.json"] or "{}")
    return Engine(_by_module(module, torch.device("cpu")), texts, (None, None, None, None), "torch.export on cpu")


def _litert(path: Path, device: str) -> Engine:
    need("ai_edge_litert", f"{path.name}: a LiteRT model", "ai-edge-litert")
    _only_on_cpu(device, "LiteRT models run")
    from ai_edge_litert.interpreter import Interpreter

    with _opening(path):
        interpreter = Interpreter(str(path), num_threads=torch.get_num_threads())
        interpreter.allocate_tensors()
        (image, *_), (output, *_) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(images: Tensor) -> Tensor:
        interpreter.set_tensor(image["index"], images.numpy())
        interpreter.invoke()
        return _host(interpreter.get_tensor(output["index"]))

    return Engine(run, _texts_beside(path), tuple(image["shape"].tolist()), "LiteRT on cpu")


def _executorch(path: Path, device: str) -> Engine:
    need("executorch", f"{path.name}: an ExecuTorch program")
    _only_on_cpu(device, "ExecuTorch programs run")
    from executorch.runtime import Runtime

    with _opening(path):
        program = Runtime.get().load_program(path)
        method = program.load_method("forward")
        shape = tuple(method.metadata.input_tensor_meta(0).sizes())

    def run(images: Tensor) -> Tensor:
        return method.execute([images])[0].float().clone()  # its memory is the next call's

    return Engine(run, _texts_beside(path), shape, "ExecuTorch on cpu")


def _texts_beside(path: Path) -> dict[str, str]:
    """The facts of a file that are in another one beside it; none where that is not there."""
    file = beside(path)
    if not file.is_file():
        return {}
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: damaged ({error}); export {path.name} again") from None
    return held if isinstance(held, dict) else {}


OPENERS: dict[str, Callable[[Path, str], Engine]] = {
    ".onnx": _onnx,
    ".xml": _openvino,
    ".torchscript": _torchscript,
    ".pt2": _torch_export,
    ".tflite": _litert,
    ".pte": _executorch,
}


def _spelt(path: Path) -> bool:
    """Whether libraries that are not written in Python can be told the path: it is UTF-8 as this locale reads it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _only_on_cpu(device: str, what: str) -> None:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device={device}: {what} on the cpu here")


def _by_module(module: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return module(images.to(device)).float().cpu()

    return run


def _host(found: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.asarray(found, dtype=np.float32))
