"""The formats that a graph can be written in: one row each. A library is imported when its format is asked for."""

from __future__ import annotations

import errno
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from detector.errors import ConfigError
from detector.export.graph import ExportGraph
from detector.export.int8 import Feed, quantise_onnx, quantise_openvino
from detector.inference.runtimes.engines import KEY, beside, silent_openvino

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # of ONNX: what torch's exporter writes without converting
INPUT, OUTPUT = "images", "output0"


class Format(NamedTuple):
    """A format: how its files are named, what must be installed, what writes them, and whether we can run them here."""

    suffix: str  # of the file; without a dot, of the folder
    packages: tuple[tuple[str, str], ...]  # (module, what pip calls it)
    write: Callable[[ExportGraph, Path], str]  # gives in a few words what was written
    runs: bool  # whether what was written is run here, and compared with the checkpoint
    nms: bool  # whether suppression can be inside
    int8: Callable[[ExportGraph, Path, Feed], str] | None = None  # as `write`, in int8 calibrated on these images
    int8_packages: tuple[tuple[str, str], ...] = ()  # that this needs besides
    half: bool = True  # whether it can compute in float16
    fixed: bool = False  # whether its files take one size alone, in batches of one number of images
    beside: bool = False  # whether the facts are in a file of their own


def check_format(name: str, suppresses: bool, half: bool = False, int8: bool = False) -> Format:
    """The format of that name. Raises ConfigError for what it cannot do, and where packages that it needs are missing,
    with the line that installs them."""
    form = FORMATS[name]
    if int8 and form.int8 is None:
        able = ", ".join(key for key, one in FORMATS.items() if one.int8)
        raise ConfigError(f"int8=true: {name} is not quantised here; int8=false, or one of {able}")
    if half and not form.half:
        able = ", ".join(key for key, one in FORMATS.items() if one.half)
        raise ConfigError(f"half=true: {name} is written in float32 here; half=false, or one of {able}")
    packages = form.packages + (form.int8_packages if int8 else ())
    missing = [pip for module, pip in packages if find_spec(module) is None]
    if missing:
        what = f"format={name}{' int8=true' if int8 else ''}"
        raise ConfigError(f"{what}: needs {', '.join(missing)}: pip install {' '.join(missing)}")
    if suppresses and not form.nms:
        able = ", ".join(key for key, one in FORMATS.items() if one.nms)
        raise ConfigError(f"nms=true: {name} has no suppression of its own; nms=false, or one of {able}")
    return form


# --- formats that are run here ---------------------------------------------------------------------------------------


def onnx(graph: ExportGraph, target: Path) -> str:
    """By torch's exporter on top of torch.export, checked by ONNX itself."""

    with _quiet():
        program = torch.onnx.export(
            _program(graph),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            custom_translation_table=_translations(graph),
            verbose=False,
        )
    model = program.model_proto
    del model.graph.value_info[:]  # can be inferred, and names sides otherwise than the next lines
    for part in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        del part.metadata_props[:]  # the source lines that it stems from, with the paths of this machine
        part.doc_string = ""
    if graph.facts.dynamic:
        for dimension, name in ((0, "batch"), (2, "height"), (3, "width")):
            model.graph.input[0].type.tensor_type.shape.dim[dimension].dim_param = name
        shape = model.graph.output[0].type.tensor_type.shape
        shape.dim[0].dim_param = "batch"
        if graph.facts.output == "raw":
            shape.dim[2].dim_param = "anchors"
    return _save_onnx(model, graph, target)


def onnx_int8(graph: ExportGraph, target: Path, feed: Feed) -> str:
    """By ONNX Runtime's static quantisation of the float file."""
    between = target.with_name(f"{target.stem}.float.onnx")
    onnx(graph, between)
    model = quantise_onnx(between, target, feed, INPUT)
    del model.graph.value_info[:]
    written = _save_onnx(model, graph, target)
    sizes = f"{_mib(target)}, in float {_mib(between)}"
    between.unlink()
    return f"{written}, int8; {sizes}"


def torchscript(graph: ExportGraph, target: Path) -> str:
    """By a trace, of which sizes stay free where they are computed from the input's."""
    with _quiet():
        traced = torch.jit.trace(graph, _example(graph), check_trace=False)
        torch.jit.save(traced, held := io.BytesIO(), _extra_files=_texts(graph))
    target.write_bytes(held.getbuffer())  # torch's own writer ends the process where the disk is full
    return f"TorchScript of torch {torch.__version__}"


def openvino(graph: ExportGraph, target: Path) -> str:
    """From ONNX, by OpenVINO's own reader and not by `convert_model`, which reports its use."""
    return _openvino(graph, target, None)


def openvino_int8(graph: ExportGraph, target: Path, feed: Feed) -> str:
    """By NNCF, from what OpenVINO reads of the ONNX file."""
    return _openvino(graph, target, feed)


def _openvino(graph: ExportGraph, target: Path, feed: Feed | None) -> str:
    library = silent_openvino()
    target.mkdir()
    between = target / f"{target.name}.onnx"
    onnx(graph, between)
    model = library.Core().read_model(str(between))
    if feed is not None:
        model = quantise_openvino(model, feed)
    model.set_rt_info(json.dumps(graph.facts.texts()), [KEY])
    file = target / f"{target.name.removesuffix('_openvino')}.xml"
    try:
        library.save_model(model, str(file), graph.facts.half)
    except RuntimeError as error:  # it reads no reason off a stream that fails
        raise OSError(errno.EIO, f"OpenVINO stops ({str(error).strip().splitlines()[0][:200]})", str(file)) from None
    del model
    sizes = "" if feed is None else f", int8; {_mib(file.with_suffix('.bin'))}, in float {_mib(between)}"
    between.unlink()
    return f"OpenVINO IR of openvino {library.__version__.split('-')[0]}{sizes}"


def torch_export(graph: ExportGraph, target: Path) -> str:
    with _quiet():
        torch.export.save(_program(graph), held := io.BytesIO(), extra_files=_texts(graph))
    target.write_bytes(held.getbuffer())
    return f"torch.export program of torch {torch.__version__}"


# --- formats of packages that bring much along, and of machines that are not here ------------------------------------


def tensorrt(graph: ExportGraph, target: Path) -> str:
    """An engine for the GPU of this machine, from ONNX."""
    import tensorrt as library

    between = target.with_suffix(".onnx")
    onnx(graph, between)
    logger = library.Logger(library.Logger.WARNING)
    builder = library.Builder(logger)
    network = builder.create_network(0)
    parser = library.OnnxParser(network, logger)
    if not parser.parse(between.read_bytes()):
        raise ConfigError(f"format=tensorrt: {parser.get_error(0)}")
    config = builder.create_builder_config()
    facts = graph.facts
    if facts.half:
        config.set_flag(library.BuilderFlag.FP16)
    if facts.dynamic:
        profile = builder.create_optimization_profile()
        shapes = ((1, facts.stride), (1, facts.imgsz), (16, facts.imgsz))
        profile.set_shape(INPUT, *((batch, facts.channels, side, side) for batch, side in shapes))
        config.add_optimization_profile(profile)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise ConfigError("format=tensorrt: TensorRT built nothing; its messages say why")
    between.unlink()
    target.write_bytes(built)
    _write_beside(graph, target)
    return f"TensorRT engine of {library.__version__}"


def coreml(graph: ExportGraph, target: Path) -> str:
    facts = graph.facts
    shape = (facts.batch, facts.channels, facts.imgsz, facts.imgsz)
    with _converting("coreml", "coremltools"):
        import coremltools as library

        model = library.convert(
            _program(graph).run_decompositions({}),  # of a trace it cannot convert the integers
            inputs=[library.TensorType(INPUT, shape=shape)],
            outputs=[library.TensorType(OUTPUT)],
            convert_to="mlprogram",
            compute_precision=library.precision.FLOAT16 if facts.half else library.precision.FLOAT32,
        )
    model.user_defined_metadata.update(facts.texts())
    model.save(str(target))
    return f"Core ML program of coremltools {library.__version__}"


def litert(graph: ExportGraph, target: Path) -> str:
    with _converting("litert", "litert-torch"):
        import litert_torch as library

        library.convert(graph, (_example(graph),)).export(str(target))
    _write_beside(graph, target)
    return "LiteRT flat buffer"


def executorch(graph: ExportGraph, target: Path) -> str:
    with _converting("executorch", "executorch"):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(_program(graph), partitioner=[XnnpackPartitioner()])
        target.write_bytes(lowered.to_executorch().buffer)
    _write_beside(graph, target)
    return "ExecuTorch program for XNNPACK"


ONNX = (("onnx", "onnx"), ("onnxscript", "onnxscript"))
FORMATS = {
    "onnx": Format(".onnx", (*ONNX, ("onnxruntime", "onnxruntime")), onnx, runs=True, nms=True, int8=onnx_int8),
    "torchscript": Format(".torchscript", (), torchscript, runs=True, nms=False),
    "openvino": Format(
        "_openvino",
        (*ONNX, ("openvino", "openvino")),
        openvino,
        runs=True,
        nms=True,
        int8=openvino_int8,
        int8_packages=(("nncf", "nncf"),),
    ),
    "torch_export": Format(".pt2", (), torch_export, runs=True, nms=False),
    "tensorrt": Format(".engine", (*ONNX, ("tensorrt", "tensorrt")), tensorrt, runs=False, nms=True, beside=True),
    "coreml": Format(".mlpackage", (("coremltools", "coremltools"),), coreml, runs=False, nms=False, fixed=True),
    "litert": Format(
        ".tflite",
        (("litert_torch", "litert-torch"),),
        litert,
        runs=True,
        nms=False,
        half=False,
        fixed=True,
        beside=True,
    ),
    "executorch": Format(
        ".pte",
        (("executorch", "executorch"),),
        executorch,
        runs=True,
        nms=False,
        half=False,
        fixed=True,
        beside=True,
    ),
}


# --- what they share -------------------------------------------------------------------------------------------------


def _example(graph: ExportGraph) -> Tensor:
    """Images of the size that is exported. Two, where any number will do: of one the exporter believes it is fixed."""
    facts = graph.facts
    return torch.zeros(facts.batch or 2, facts.channels, facts.imgsz, facts.imgsz)


def _save_onnx(model: ModelProto, graph: ExportGraph, target: Path) -> str:
    """Write an ONNX model with the facts once ONNX has checked it; gives in words what it is."""
    import onnx as library

    used = {node.domain for part in (model.graph, *model.functions) for node in part.node}
    kept = [one for one in model.opset_import if one.domain in used or not one.domain]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    library.helper.set_model_props(model, graph.facts.texts())
    library.checker.check_model(model, full_check=True)
    library.save(model, str(target))
    others = {one.domain for one in kept} - {""}
    return f"ONNX, opset {OPSET}" + (f" and {', '.join(sorted(others))}" if others else ", standard operations alone")


def _mib(file: Path) -> str:
    return f"{file.stat().st_size / 2**20:.1f} MiB"


def _program(graph: ExportGraph) -> torch.export.ExportedProgram:
    """The graph as torch.export has it: batch, height and width are free, or fixed."""
    free = None
    if graph.facts.dynamic:
        cells = {name: torch.export.Dim(name, min=1, max=1024) for name in ("rows", "columns")}
        stride = graph.facts.stride
        sides = {2: stride * cells["rows"], 3: stride * cells["columns"]}
        free = ({0: torch.export.Dim("batch", min=1, max=4096), **sides},)
    with torch.no_grad():
        program = torch.export.export(graph, (_example(graph),), dynamic_shapes=free)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the paths of this machine
    return program


def _translations(graph: ExportGraph) -> dict[Callable, Callable | Sequence[Callable]]:
    """How suppression is written in ONNX."""
    if graph.facts.nms != "inside":
        return {}
    from onnxscript import FLOAT
    from onnxscript import opset20 as op

    def suppress(boxes: FLOAT, scores: FLOAT, conf: float, iou: float, max_det: int) -> FLOAT:
        most = op.Constant(value_int=max_det)
        left = op.NonMaxSuppression(
            boxes, scores, most, op.Constant(value_float=iou), op.Constant(value_float=conf)
        )  # (N, 3) image, class, anchor
        return op.ScatterND(op.Sub(scores, scores), left, op.GatherND(scores, left))

    return {torch.ops.detector.suppress.default: suppress}


def _write_beside(graph: ExportGraph, target: Path) -> None:
    """The facts in a file of their own, where the format has no place for them."""
    beside(target).write_text(json.dumps(graph.facts.texts()), encoding="utf-8")


def _texts(graph: ExportGraph) -> dict[str, str]:
    return {f"{KEY}.json": json.dumps(graph.facts.texts())}


@contextmanager
def _patched(module: object, name: str, value: object) -> Iterator[None]:
    """A context in which a setting of a library, where it has it, is another."""
    before = getattr(module, name, None)
    if before is not None:
        setattr(module, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(module, name, before)


# What was converted with torch 2.14.1: these packages bring a converter that follows torch's insides.
TRIED = {"coremltools": "9.0", "litert-torch": "0.10.0", "executorch": "1.5.1"}


@contextmanager
def _converting(name: str, package: str) -> Iterator[None]:
    """A context for a converter, without its log; whatever it raises becomes a ConfigError that says what works."""
    try:
        with _quiet(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    except OSError:  # the place that is written to
        raise
    except Exception as error:  # of any kind: they fail anywhere inside
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"format={name}: {package} {version(package)} cannot convert this network with torch {torch.__version__} "
            f"({first[:200]}); what works together: pip install torch==2.14.1 {package}=={TRIED[package]}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without the exporters' warnings about their own insides, and without their notes of source lines.

    Those would end up in the file, with the paths of this machine, and take a third of the time.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), _patched(torch.fx.config, "do_not_emit_stack_traces", True):
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
