"""`detector export`: a checkpoint as a file of another runtime, with the proof that it finds the same."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from detector import checkpoint_file
from detector.commands.val import Subject, indexed
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import ExportSettings, ValSettings
from detector.errors import CheckpointError, ConfigError
from detector.export.accuracy import measure
from detector.export.formats import FORMATS, Format, check_format
from detector.export.images import some_images
from detector.export.int8 import calibration
from detector.export.write import Quantised, check_target, write_export
from detector.files import writing
from detector.inference.detector import Detector
from detector.inference.infer import NetworkRuntime
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
    check_int8(settings)
    form = check_format(settings.format, settings.nms is True, settings.half, settings.int8)
    path = checkpoint_file.weights_in(settings.weights)
    target = settings.to or path.with_name(f"{path.stem}{FORMATS[settings.format].suffix}")
    check_target(target, settings.exist_ok, form)
    saved = checkpoint_file.read(path)
    network = network_of(saved, path).eval()
    network.head.choose(False if settings.nms == "end2end" else "auto")
    facts = facts_of(settings, form, network, saved)
    images, quantised = [], None
    if settings.int8:
        quantised, which = quantised_of(settings, path, network, facts, saved)
    else:
        images, which = some_images(network, saved, settings.images, settings.data)
    for line in told(path, facts, which, saved):
        print(line)
    with writing(target, "make room, or choose another file"):
        passed = write_export(network, facts, form, target, images, quantised=quantised)
    return 0 if passed else 1


def check_int8(settings: ExportSettings) -> None:
    """Raise ConfigError for settings that only int8 has, or cannot have."""
    if settings.int8 and settings.half:
        raise ConfigError("half=true int8=true: a file computes in one of them; keep one")
    if settings.int8 and settings.images is not None:
        raise ConfigError(
            f"images={settings.images}: with int8=true the images are those of data: of its training split to "
            "calibrate on, of its validation split to measure the loss; leave it out"
        )
    idle = [] if settings.int8 else [key for key in ("calibration", "max_loss") if key in settings.model_fields_set]
    if idle:
        raise ConfigError(f"{idle[0]}={getattr(settings, idle[0])}: belongs to int8=true; say so, or leave it out")


def quantised_of(
    settings: ExportSettings, path: Path, network: Network, facts: Facts, saved: dict[str, Any]
) -> tuple[Quantised, str]:
    """What int8 takes, and in words which images. Raises ConfigError or DataError where the data set has none to give,
    or is of other classes."""
    named = saved.get("settings", {}).get("data")
    if settings.data is None and (named is None or not Path(named).is_file()):
        why = f"{path} names none" if named is None else f"{named}, which {path} names, is not there"
        raise ConfigError(f"int8=true: needs a data set to calibrate on, and {why}; name one: data=my_data.yaml")
    runtime = NetworkRuntime(network, torch.device("cpu"))
    subject = Subject(path, Detector(runtime, facts.names, facts.imgsz), saved.get("settings", {}), "")
    split = {"data": settings.data, "weights": path}
    train, _, data = indexed(ValSettings(**split, split="train"), subject)
    val, judged, _ = indexed(ValSettings(**split, split="val"), subject)
    if not any(len(val.labels(i)) for i in range(len(val))):
        raise ConfigError(f"{data}: val: has no box to measure the loss of int8 by; name another data set with data=")
    feed = calibration(train, facts, settings.calibration)
    count = min(settings.calibration, len(train))
    which = f"{data}: {count} of train to calibrate on, {len(val)} of val to measure the loss"
    measured = partial(measure, index=val, names=facts.names, judged=judged, most=settings.max_loss)
    return Quantised(feed, measured), which


def facts_of(settings: ExportSettings, form: Format, network: Network, saved: dict[str, Any]) -> Facts:
    """What the file is to say of itself."""
    imgsz = settings.imgsz or saved["imgsz"]
    check_side(network, imgsz)
    dynamic = settings.batch == "dynamic" and not form.fixed
    batch = 1 if settings.batch == "dynamic" else settings.batch
    inside, free = settings.nms is True, settings.nms == "end2end"
    return Facts(
        names=tuple(saved["names"]),
        imgsz=imgsz,
        output="detections" if inside or free else "raw",
        nms="inside" if inside else "none" if free else "outside",
        batch=None if dynamic else batch,
        dynamic=dynamic,
        stride=network.stride,
        channels=network.channels,
        value_range=network.value_range,
        half=settings.half,
        int8=settings.int8,
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
        f"input     {count}, {facts.arithmetic} inside",
        f"output    {nms}",
        f"images    {images}",
    ]
    if license_text := saved.get("origin", {}).get("license"):
        lines.append(f"license   {license_text}, says the file that the weights come from")
    return lines
