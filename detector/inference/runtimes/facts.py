"""What an exported file says of itself: how images go in, and how boxes come out. The schema is in docs/export.md.

A file holds them as texts by name, each of them JSON: `{"names": "[\"cat\", \"dog\"]", "imgsz": "640", ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import detector
from detector.errors import CheckpointError

SCHEMA = 1
LATER = ("int8",)  # what files of the schema's first version do not say
Output = Literal["raw", "detections"]
Suppression = Literal["outside", "inside", "none"]

# How images go in is one rule for all exports. It is written out so that who reads a file needs nothing else.
INPUT = {
    "input": "images (B, channels, H, W) float32",
    "colour": "RGB",
    "normalisation": "value / 255",
    "padding": 114,
    "letterbox": "long side resized to imgsz (to shrink: mean over areas; to enlarge: bilinear; the short side rounded "
    "to a pixel), centred on padding, an odd pixel of it right and bottom",
}
OUTPUT = {
    "raw": "output0 (B, 4 + classes, anchors) float32: centre x, y, width, height in pixels of the input; scores 0..1",
    "detections": "output0 (B, max_det, 6) float32: x1, y1, x2, y2 in pixels of the input, score, class; best first, "
    "padded with zeros",
}


@dataclass(frozen=True)
class Facts:
    """All that must be known of an export to put images in and to read what comes out."""

    names: tuple[str, ...]  # of the classes, by number
    imgsz: int  # the long side that an image is resized to, pixels
    output: Output = "raw"
    nms: Suppression = "outside"  # outside: whoever reads `raw` suppresses; none: there is nothing to suppress
    batch: int | None = None  # images that go in at once; None: any number
    dynamic: bool = True  # whether sides may be any multiples of stride; else they are imgsz x imgsz
    stride: int = 32
    channels: int = 3
    value_range: tuple[float, float] | None = None  # what became 0 and 255 in files of more than 8 bits
    half: bool = False  # whether it computes in float16
    int8: bool = False  # whether it computes in int8, but for its end
    conf: float = 0.0  # with nms inside: the least score of a detection
    iou: float = 0.7  # with nms inside: of two boxes of a class that overlap more, the weaker is dropped
    max_det: int = 300  # with output detections: rows of an image

    @property
    def arithmetic(self) -> str:
        """fp32, fp16 or int8."""
        return "int8" if self.int8 else "fp16" if self.half else "fp32"

    def texts(self) -> dict[str, str]:
        """The facts as a file holds them."""
        said = {"schema": SCHEMA, "version": detector.__version__, **asdict(self), **INPUT}
        said["output_layout"] = OUTPUT[self.output]
        return {name: json.dumps(value, ensure_ascii=False) for name, value in said.items()}


def read_facts(texts: Mapping[str, str], place: str) -> Facts | None:
    """The facts that a file holds; None where it holds none of ours. Raises CheckpointError for what is damaged."""
    if "schema" not in texts or "names" not in texts:
        return None
    said: dict[str, Any] = {}
    try:
        schema = json.loads(texts["schema"])
        for name in Facts.__dataclass_fields__:
            if name in LATER and name not in texts:
                continue
            value = json.loads(texts[name])
            said[name] = tuple(value) if isinstance(value, list) else value
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{place}: its metadata is damaged ({error}); export it again") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{place}: metadata of schema {schema}, this version reads {SCHEMA}; update detector")
    return Facts(**said)
