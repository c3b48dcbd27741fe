"""Exports that compute in int8: static quantisation by ONNX Runtime and by NNCF, calibrated on images of the user's.

From the last convolutions on everything stays float: they give the distances and logits that boxes and scores are made
of, and one scale for coordinates of hundreds of pixels and scores below one leaves nothing of the scores.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from detector.data.dataset import ValidationSet
from detector.errors import DataError
from detector.inference.runtimes.engines import silent
from detector.inference.runtimes.facts import Facts

if TYPE_CHECKING:
    import onnx
    import openvino

    from detector.data.index import Index

Node = TypeVar("Node", bound=Any)
Feed = list[NDArray[np.float32]]  # what goes in one after the other, each (B, C, H, W) in 0..1


def calibration(index: Index, facts: Facts, count: int) -> Feed:
    """`count` images from all over a split, always the same ones, letterboxed as in validation and in batches that the
    file takes. Raises DataError where none of them can be read."""
    images = ValidationSet(index, facts.imgsz, facts.stride, rect=facts.dynamic)
    chosen = np.unique(np.linspace(0, len(index) - 1, count).round().astype(int))
    read = (images[int(i)] for i in chosen)
    pixels = [one[0].transpose(2, 0, 1).astype(np.float32) / 255 for one in read if one is not None]
    if not pixels:
        raise DataError(f"{index.place(0)}: damaged, as are the other images to calibrate on; mend them")
    size = facts.batch or 1
    pixels += [pixels[-1]] * (-len(pixels) % size)  # to fill up the last batch
    return [np.stack(pixels[start : start + size]) for start in range(0, len(pixels), size)]


def quantise_onnx(source: Path, target: Path, feed: Feed, name: str) -> onnx.ModelProto:
    """The ONNX model in `source`, in int8, as (QuantizeLinear, DequantizeLinear) pairs; `name` is that of its input.

    Activations are uint8, weights int8 by the channel and of seven bits: processors without VNNI add two products in 16
    bits, which eight bits overflow.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        left = iter(feed)

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            return next(({name: images} for images in self.left), None)

    model = onnx.load(source)
    makers = {output: node for node in model.graph.node for output in node.output}
    kept = up_to_convolutions(
        [makers[output.name] for output in model.graph.output],
        # the shape of a map of any layer is that of a grid of anchors: its numbers are not the layer's
        lambda node: [makers[one] for one in node.input if one in makers and node.op_type != "Shape"],
        lambda node: node.op_type == "Conv",
        lambda node: node.name,
    )
    with _silenced(logging.getLogger()):
        quantize_static(
            model,  # not its path, which ONNX's own code cannot spell in every locale
            str(target),
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            nodes_to_exclude=[node.name for node in kept],
        )
    return onnx.load(target)


def quantise_openvino(model: openvino.Model, feed: Feed) -> openvino.Model:
    """The OpenVINO model in int8, by NNCF; weights have seven bits, as in `quantise_onnx`."""
    library = silent_nncf()
    kept = up_to_convolutions(
        [result.input(0).get_source_output().get_node() for result in model.get_results()],
        lambda node: (
            [] if node.get_type_name() == "ShapeOf" else [one.get_source_output().get_node() for one in node.inputs()]
        ),
        lambda node: node.get_type_name() in ("Convolution", "GroupConvolution"),
        lambda node: node.get_friendly_name(),
    )
    names = [node.get_friendly_name() for node in kept if node.get_type_name() not in ("Constant", "Parameter")]
    everywhere = library.OverflowFix.ENABLE
    with redirect_stdout(io.StringIO()):  # its bars
        return library.quantize(
            model,
            library.Dataset(feed),
            preset=library.QuantizationPreset.MIXED,  # what SiLU gives is not symmetric
            subset_size=len(feed),
            ignored_scope=library.IgnoredScope(names=names, validate=False),
            advanced_parameters=library.AdvancedQuantizationParameters(overflow_fix=everywhere),
        )


def silent_nncf() -> ModuleType:
    """NNCF without its telemetry and its log."""
    with silent(), _silenced(logging.getLogger("torch.utils.cpp_extension")):  # which tells of a CUDA it lacks
        library = import_module("nncf")
    library.set_log_level(logging.ERROR)
    return library


def up_to_convolutions(
    ends: Iterable[Node],
    sources: Callable[[Node], Sequence[Node]],
    is_convolution: Callable[[Node], bool],
    key: Callable[[Node], Hashable],
) -> list[Node]:
    """The nodes between the end of a graph and the first convolutions met on the way back, and these; each once."""
    found: dict[Hashable, Node] = {}
    left = list(ends)
    while left:
        node = left.pop()
        if key(node) in found:
            continue
        found[key(node)] = node
        if not is_convolution(node):
            left += sources(node)
    return list(found.values())


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    """A context in which a logger tells errors alone."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
