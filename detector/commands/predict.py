"""`detector predict`: boxes for files, folders and globs, printed, drawn and, if wished, written as labels."""

import argparse
import sys
from pathlib import Path

from detector.config import PredictSettings, load_settings
from detector.errors import ConfigError, DataError
from detector.folders import create_folder
from detector.inference.detector import Result
from detector.inference.load import load
from detector.reporting.draw import draw_boxes, save_image


def run(options: argparse.Namespace) -> int:
    sources = [word for word in options.arguments if "=" not in word or Path(word).exists()]
    settings = load_settings(PredictSettings, None, [word for word in options.arguments if word not in sources])
    if not sources:
        raise ConfigError("name what to look at: files, folders or globs")
    detector = load(options.weights, settings.device, settings.amp)
    unreadable: list[DataError] = []
    results = detector.stream(
        sources, settings.conf, settings.iou, settings.imgsz, settings.batch, settings.max_det, unreadable.append
    )
    folder: Path | None = None
    images = objects = 0
    for result in results:
        folder = folder or create_folder(settings.project, settings.name, "predict", settings.exist_ok)
        target = free_path(folder / result.path.name)
        save_image(target, draw_boxes(result.image, result.boxes, result.classes, result.names, result.scores))
        if settings.save_txt:
            labels = folder / "labels" / f"{target.stem}.txt"
            labels.parent.mkdir(exist_ok=True)
            labels.write_text(label_text(result), encoding="utf-8")
        print(f"{result.path}: {result.summary()}")
        images, objects = images + 1, objects + len(result)
    for error in unreadable:
        print(f"warning: left out: {error}", file=sys.stderr)
    if not images:
        raise DataError("none of the images can be read")
    print(f"{objects} objects in {images} images; pictures in {folder}")
    return 0


def free_path(path: Path) -> Path:
    """A .jpg path for a picture that no earlier one of this call took."""
    candidate, number = path.with_suffix(".jpg"), 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.stem}_{number}.jpg"), number + 1
    return candidate


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
