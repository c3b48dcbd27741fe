"""`detector val`: measure a checkpoint by the COCO protocol, with the code that training validates with."""

import argparse
from pathlib import Path

from detector import checkpoint_file
from detector.config import words
from detector.config.settings import ValSettings, load_settings
from detector.data.dataset import ValidationSet, damage
from detector.data.description import load_description
from detector.data.index import build_index
from detector.data.loader import validation_batches, worker_count
from detector.device import choose_device
from detector.errors import ConfigError
from detector.evaluation.evaluate import evaluate_network, ground_truth_of
from detector.folders import create_folder
from detector.model.checkpoint import network_of
from detector.precision import choose_precision
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
    names = tuple(saved["names"])

    data = settings.data or Path(saved["settings"]["data"])
    description = load_description(data)
    if len(description.names) != len(names):
        raise ConfigError(
            f"data={data}: has {len(description.names)} classes, but {path} was trained for {len(names)}: {list(names)}"
        )
    index = build_index(description, settings.split)
    for warning in index.warnings:
        print(f"warning: {settings.split}: {warning}")
    images = ValidationSet(index, settings.imgsz or saved["imgsz"], bad_images=settings.bad_images)

    evaluation = evaluate_network(
        network,
        validation_batches(
            images, settings.batch, worker_count(settings.workers), start=settings.multiprocessing_start
        ),
        ground_truth_of(index),
        names,
        device=device,
        autocast=precision.autocast,
        conf=settings.conf,
        iou=settings.iou,
        max_det=settings.max_det,
    )
    for i in evaluation.missing:
        print(f"warning: {settings.split}: {damage(index, i)}; nothing is found in it")
    print(f"{path} on {data}, {settings.split}: {len(index)} images at {images.imgsz}, {device}, {precision.name}")
    print(format_class_table(evaluation, names))
    if settings.plots:
        folder = create_folder(settings.project, settings.name, "val", settings.exist_ok)
        draw_evaluation(evaluation, images, names, folder)
        print(f"pictures  {folder}")
    return 0
