"""`detector export`: a checkpoint as a file of another runtime, with the proof that it finds the same."""

import argparse
from pathlib import Path
from typing import Any

from detector import checkpoint_file
from detector.config import words
from detector.config.settings import ExportSettings, load_settings
from detector.errors import CheckpointError, ConfigError
from detector.export.formats import FORMATS, check_format
from detector.export.images import some_images
from detector.export.write import check_target, write_export
from detector.files import writing
from detector.inference.runtimes.engines import is_export
from detector.inference.runtimes.facts import Facts
from detector.model.checkpoint import network_of
from detector.model.network import Network, check_side


def run(options: argparse.Namespace) -> int:
    said = words.of_conversion(options.arguments)
    settings = load_settings(ExportSettings, None, said.overrides, said.values)
    if settings.weights is None:
        raise ConfigError("name a checkpoint or a run's folder: detector export runs/train format=onnx")
    if settings.weights.exists() and is_export(settings.weights):
        raise CheckpointError(f"{settings.weights}: an export; name the checkpoint that it was made of")
    form = check_format(settings.format, settings.nms is True)
    path = checkpoint_file.weights_in(settings.weights)
    target = settings.to or path.with_name(f"{path.stem}{FORMATS[settings.format].suffix}")
    check_target(target, settings.exist_ok)
    saved = checkpoint_file.read(path)
    network = network_of(saved, path).eval()
    network.head.choose(False if settings.nms == "end2end" else "auto")
    facts = facts_of(settings, network, saved)
    images, which = some_images(network, saved, settings.images)
    for line in told(path, facts, which, saved):
        print(line)
    with writing(target, "make room, or choose another file"):
        passed = write_export(network, facts, form, target, images)
    return 0 if passed else 1


def facts_of(settings: ExportSettings, network: Network, saved: dict[str, Any]) -> Facts:
    """What the file is to say of itself."""
    imgsz = settings.imgsz or saved["imgsz"]
    check_side(network, imgsz)
    dynamic = settings.batch == "dynamic"
    inside, free = settings.nms is True, settings.nms == "end2end"
    return Facts(
        names=tuple(saved["names"]),
        imgsz=imgsz,
        output="detections" if inside or free else "raw",
        nms="inside" if inside else "none" if free else "outside",
        batch=None if dynamic else settings.batch,
        dynamic=dynamic,
        stride=network.stride,
        channels=network.channels,
        value_range=network.value_range,
        half=settings.half,
        conf=settings.conf if inside else 0.0,
        iou=settings.iou,
        max_det=settings.max_det,
    )


def told(path: Path, facts: Facts, images: str, saved: dict[str, Any]) -> list[str]:
    """What is going to be written, and what it is compared on."""
    sides = (
        f"multiples of {facts.stride}, meant for {facts.imgsz}" if facts.dynamic else f"{facts.imgsz} x {facts.imgsz}"
    )
    count = f"any number of images, sides {sides}" if facts.dynamic else f"{facts.batch} x {sides}"
    nms = {
        "outside": "raw: (B, 4 + classes, anchors), for the reader to suppress",
        "inside": f"(B, {facts.max_det}, 6), suppressed at iou {facts.iou:g} from score {facts.conf:g}",
        "none": f"(B, {facts.max_det}, 6), of the head that needs no suppression",
    }[facts.nms]
    lines = [
        f"model     {path}, {saved['description']['name']}, {len(facts.names)} classes",
        f"input     {count}, {'fp16' if facts.half else 'fp32'} inside",
        f"output    {nms}",
        f"images    {images}",
    ]
    if license_text := saved.get("origin", {}).get("license"):
        lines.append(f"license   {license_text}, says the file that the weights come from")
    return lines
