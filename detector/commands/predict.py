"""`detector predict`: boxes for files, folders and globs, printed, drawn and, if wished, written as labels."""

import argparse
import sys
from itertools import chain, count
from pathlib import Path

from detector.config import words
from detector.config.settings import PredictSettings, load_settings
from detector.drawing import draw_boxes, save_image
from detector.errors import ConfigError, DataError
from detector.files import writing
from detector.folders import create_folder
from detector.inference.detector import Result
from detector.inference.load import load


def run(options: argparse.Namespace) -> int:
    said = words.of_checkpoint(options.arguments, sources=True)
    settings = load_settings(PredictSettings, None, said.overrides, said.values)
    if settings.weights is None or not settings.source:
        raise ConfigError("name a checkpoint, and what to look at: detector predict runs/train photos/ 'more/*.jpg'")
    detector = load(settings.weights, settings.device, settings.amp, settings.nms)
    unreadable: list[DataError] = []
    results = detector.stream(
        settings.source,
        settings.conf,
        settings.iou,
        settings.imgsz,
        settings.batch,
        settings.max_det,
        unreadable.append,
    )
    folder: Path | None = None
    taken: set[str] = set()
    images = objects = 0
    for result in results:
        folder = folder or create_folder(settings.project, settings.name, "predict", settings.exist_ok)
        if folder.samefile(result.path.parent):
            raise ConfigError(f"{folder}: pictures would be written among the images themselves; choose another name=")
        target = folder / f"{free_name(result.path.stem, taken)}.jpg"
        with writing(target):
            keep(result, target, settings.save_txt)
        print(f"{result.path}: {result.summary()}")
        images, objects = images + 1, objects + len(result)
    for error in unreadable:
        print(f"warning: left out: {error}", file=sys.stderr)
    if not images:
        raise DataError("none of the images can be read")
    print(f"{objects} objects in {images} images; pictures in {folder}")
    return 0


def keep(result: Result, picture: Path, save_txt: bool) -> None:
    """Draw a result and, if wished, write it as labels/NAME.txt."""
    save_image(picture, draw_boxes(result.image, result.boxes, result.classes, result.names, result.scores))
    labels = picture.parent / "labels" / f"{picture.stem}.txt"
    labels.unlink(missing_ok=True)  # of an earlier call that wrote into this folder
    if save_txt:
        labels.parent.mkdir(exist_ok=True)
        labels.write_text(label_text(result), encoding="utf-8")


def free_name(stem: str, taken: set[str]) -> str:
    """The stem, or stem_2, stem_3, ...: what no earlier picture of this call has; it is taken from then on."""
    name = next(
        name for name in chain([stem], (f"{stem}_{number}" for number in count(2))) if name.casefold() not in taken
    )
    taken.add(name.casefold())  # some file systems do not tell a.jpg from A.jpg
    return name


def label_text(result: Result) -> str:
    """Lines of `class x y w h score`, as fractions of the image."""
    height, width = result.image.shape[:2]
    lines = []
    for (x1, y1, x2, y2), label, score in zip(
        result.boxes.tolist(), result.classes.tolist(), result.scores.tolist(), strict=True
    ):
        x, y, w, h = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height
        lines.append(f"{label} {x:.6f} {y:.6f} {w:.6f} {h:.6f} {score:.4f}\n")
    return "".join(lines)
