"""From an exported file to a runtime: by what it says of itself or, of another tool's, by what is given and seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from detector.errors import CheckpointError, ConfigError
from detector.inference.runtimes.engines import Engine, open_engine
from detector.inference.runtimes.exported import ExportedRuntime
from detector.inference.runtimes.facts import Facts, Output, read_facts

LAYOUTS = ("raw", "detections")


def open_export(
    path: Path,
    device: str = "auto",
    names: Sequence[str] | None = None,
    imgsz: int | None = None,
    layout: Output | None = None,
) -> ExportedRuntime:
    """The runtime of an exported file. `names`, `imgsz` and `layout` are what a file without our metadata needs; of one
    with it, `names` renames the classes and `imgsz` is another side to use.

    Raises CheckpointError for a file that is damaged or does not say enough, ConfigError for what contradicts it.
    """
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r}: should be raw or detections")
    engine = open_engine(path, device)
    facts = read_facts(engine.texts, str(path))
    if facts is None:
        return _foreign(engine, path, names, imgsz, layout)
    if layout not in (None, facts.output):
        raise ConfigError(f"layout={layout}: {path} says that it gives {facts.output}; leave it out")
    if names is not None and len(names) != len(facts.names):
        raise ConfigError(f"names: {len(names)} of them, and {path} has {len(facts.names)} classes")
    runtime = ExportedRuntime(engine, facts)
    if imgsz is not None:
        runtime.check_side(imgsz)
    return replace(runtime, facts=replace(facts, names=tuple(names or facts.names), imgsz=imgsz or facts.imgsz))


def _foreign(
    engine: Engine, path: Path, names: Sequence[str] | None, imgsz: int | None, layout: Output | None
) -> ExportedRuntime:
    """The runtime of a file that says nothing of itself: what is given, and what its input and a trial run show."""
    shape = engine.shape
    if len(shape) != 4:
        raise CheckpointError(f"{path}: takes {shape}, not images (B, C, H, W)")
    last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    channels, height, width = (shape[3], *shape[1:3]) if last else shape[1:]
    dynamic = height is None or width is None
    if not dynamic and height != width:
        raise CheckpointError(f"{path}: takes images of {height} x {width}; ours are square")
    if imgsz is None and not dynamic:
        imgsz = height
    missing = [key for key, value in (("names", names), ("imgsz", imgsz)) if value is None]
    if missing:
        said = " ".join({"names": "names='[cat, dog]'", "imgsz": "imgsz=640"}[key] for key in missing)
        raise CheckpointError(f"{path}: no export of ours: it does not say its {' and '.join(missing)}; give {said}")
    if not dynamic and imgsz != height:
        raise ConfigError(f"imgsz={imgsz}: {path} takes images of {height} x {height} alone")
    facts = Facts(tuple(names), imgsz, batch=shape[0], dynamic=dynamic, channels=channels or 3)
    runtime = ExportedRuntime(engine, facts, last)
    try:
        out = tuple(runtime._run(torch.zeros(shape[0] or 1, facts.channels, imgsz, imgsz)).shape)
    except Exception as error:  # whatever its library raises
        first = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(f"{path}: does not take an image of {imgsz} x {imgsz} ({first[:200]})") from None
    return replace(runtime, facts=_with_output(facts, out, path, layout))


def _with_output(facts: Facts, out: tuple[int, ...], path: Path, layout: Output | None) -> Facts:
    """The facts with what a trial run's output of this shape is."""
    rows = 4 + len(facts.names)
    fits = {"raw": len(out) == 3 and out[1] == rows, "detections": len(out) == 3 and out[2] == 6}
    fitting = [one for one in LAYOUTS if fits[one] and layout in (None, one)]
    if not fitting:
        raise CheckpointError(
            f"{path}: gives {out}; with {len(facts.names)} names that is neither layout=raw (B, {rows}, anchors) nor "
            "layout=detections (B, boxes, 6)"
        )
    if len(fitting) > 1:
        raise CheckpointError(f"{path}: gives {out}, which may be either: say layout=raw or layout=detections")
    if fitting == ["raw"]:
        return facts
    return replace(facts, output="detections", nms="none", max_det=out[1])
