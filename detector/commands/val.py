"""`detector val`: measure a checkpoint by the COCO protocol, with the code that training validates with."""

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from detector import checkpoint_file
from detector.classes import differing
from detector.config import words
from detector.config.settings import ValSettings, load_settings
from detector.data.choosing import ITEM, class_numbers, of_classes
from detector.data.dataset import ValidationSet, damage
from detector.data.description import load_description
from detector.data.index import Index
from detector.data.loader import validation_batches, worker_count
from detector.data.reading import Reading, build_index
from detector.device import choose_device
from detector.errors import ConfigError
from detector.evaluation.evaluate import evaluate_runtime, ground_truth_of
from detector.files import writing
from detector.folders import create_folder
from detector.inference.infer import Limits, NetworkRuntime
from detector.model.checkpoint import network_of
from detector.model.network import check_side
from detector.model.selection import Detections
from detector.precision import choose_precision
from detector.reporting.progress import reading_bar
from detector.reporting.summary import draw_evaluation
from detector.reporting.table import format_class_table


def run(options: argparse.Namespace) -> int:
    said = words.of_checkpoint(options.arguments)
    settings = load_settings(ValSettings, None, said.overrides, said.values)
    if settings.weights is None:
        raise ConfigError("name a checkpoint or a run's folder: detector val runs/train")
    path = checkpoint_file.weights_in(settings.weights)
    saved = checkpoint_file.read(path)
    device = choose_device(settings.device)
    precision = choose_precision(settings.amp, device)
    network = network_of(saved, path).to(device)
    network.head.choose(settings.nms)
    names = tuple(saved["names"])

    trained = saved["settings"]
    if settings.data is None and "data" not in trained:
        raise ConfigError(f"{path}: does not say where its data set is; name one: detector val {path} my_data.yaml")
    data = settings.data or Path(trained["data"])
    renamed = settings.names or (trained["names"] if settings.data is None else None)
    description = load_description(data).named(renamed)
    if description.channels != network.channels:
        raise ConfigError(
            f"data={data}: has `channels: {description.channels}`, and {path} is a network for {network.channels}; "
            "change it in data.yaml, or take other weights"
        )
    if description.value_range is None:
        description = replace(description, value_range=network.value_range)
    reading = Reading(settings.bad_boxes, settings.max_missing_labels, False, settings.cache_dir)
    index = build_index(description, settings.split, reading, reading_bar(settings.split))
    classes = trained.get("classes") if settings.classes is None else settings.classes
    if names == (ITEM,):
        index, judged = of_classes(index, classes, single=True), None
    else:
        index, judged = judged_of(in_order_of(index, names, path, data), classes)
    for warning in index.warnings:
        print(f"warning: {settings.split}: {warning}")
    images = ValidationSet(
        index,
        settings.imgsz or saved["imgsz"],
        network.stride,
        bad_images=settings.bad_images,
        public_batch=settings.batch if settings.letterbox == "public" else None,
    )
    check_side(network, images.imgsz)

    evaluation = evaluate_runtime(
        NetworkRuntime(network, device, precision.autocast),
        validation_batches(
            images, settings.batch, worker_count(settings.workers), start=settings.multiprocessing_start
        ),
        ground_truth_of(index),
        names,
        Limits(settings.conf, settings.iou, settings.max_det),
        judged=judged,
    )
    for i in evaluation.missing:
        print(f"warning: {settings.split}: {damage(index, i)}; nothing is found in it")
    print(f"{path} on {data}, {settings.split}: {len(index)} images at {images.imgsz}, {device}, {precision.name}")
    print(format_class_table(evaluation, names))
    if settings.plots or settings.save_json:
        folder = create_folder(settings.project, settings.name, "val", settings.exist_ok)
        with writing(folder):
            if settings.save_json:
                rows = coco_results(evaluation.detections, index)
                (folder / "detections.json").write_text(json.dumps(rows), encoding="utf-8")
            if settings.plots:
                draw_evaluation(evaluation, images, names, folder)
        print(f"{'pictures' if settings.plots else 'written':9} {folder}")
    return 0


def coco_results(detections: Sequence[Detections], index: Index) -> list[dict[str, Any]]:
    """The detections as COCO's tools read them: boxes as corner and size in pixels of the original image.

    Ids are those of the data set's COCO file; without one images go by their names without the ending, and classes by
    their numbers.
    """
    rows = []
    for i, found in enumerate(detections):
        image = index.image_ids[i] if index.image_ids else index.path(i).stem
        for (left, top, right, bottom), score, label in zip(
            found.boxes_xyxy.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True
        ):
            bbox = [round(value, 3) for value in (left, top, right - left, bottom - top)]
            category = index.category_ids[label] if index.category_ids else label
            rows.append({"image_id": image, "category_id": category, "bbox": bbox, "score": round(score, 5)})
    return rows


def judged_of(index: Index, classes: Sequence[int | str] | None) -> tuple[Index, Collection[int] | None]:
    """The index with the boxes of some classes alone, and their numbers; all, and None, where none are said."""
    if classes is None:
        return index, None
    judged = class_numbers(classes, index.names)
    print(f"classes   {', '.join(index.names[number] for number in sorted(judged))} alone")
    return of_classes(index, classes, single=False), judged


def in_order_of(index: Index, names: tuple[str, ...], path: Path, data: Path) -> Index:
    """The index with its classes numbered as the network's are. ConfigError where they are other classes."""
    ordered = index.with_classes_of(names)
    if ordered is None:
        raise ConfigError(
            f"data={data}: its classes are not those that {path} was trained for ({differing(index.names, names)}); "
            "where they are the same under other names, write names='[...]' in the order of the data set"
        )
    if index.names != names:
        print(f"classes   in the order of {path.name}; {data} has them in another")
    return ordered
