"""`detector val`: measure a checkpoint or an export by the COCO protocol, with the code that validates in training."""

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from detector import checkpoint_file
from detector.classes import differing
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import ValSettings
from detector.data.choosing import ITEM, class_numbers, of_classes
from detector.data.dataset import ValidationSet, WholeImages, damage
from detector.data.description import load_description
from detector.data.index import Index
from detector.data.loader import validation_batches, worker_count
from detector.data.reading import Reading, build_index
from detector.device import choose_device
from detector.errors import ConfigError
from detector.evaluation.evaluate import Evaluation, evaluate_runtime, ground_truth_of
from detector.files import writing
from detector.folders import create_folder
from detector.inference.detector import Detector
from detector.inference.infer import Limits, Runtime
from detector.inference.load import load, of_checkpoint
from detector.inference.runtimes.engines import is_export
from detector.inference.runtimes.exported import ExportedRuntime
from detector.inference.sliced import slicing_by
from detector.model.selection import Detections
from detector.precision import choose_precision
from detector.reporting.progress import reading_bar
from detector.reporting.result_files import coco_row
from detector.reporting.summary import draw_evaluation
from detector.reporting.table import format_class_table


class Subject(NamedTuple):
    """What is measured: a checkpoint or an export, and the settings it was trained with, as far as they are known."""

    path: Path
    detector: Detector
    trained: dict[str, Any]
    where: str  # it computes, and how
    epoch: int | None = None  # of a checkpoint, from 1

    @property
    def runtime(self) -> Runtime:
        return self.detector.runtime


def run(options: argparse.Namespace) -> int:
    said = words.of_checkpoint(options.arguments)
    settings = load_settings(ValSettings, None, said.overrides, said.values)
    if settings.weights is None:
        raise ConfigError("name a checkpoint, a run's folder or an export: detector val runs/train")
    subject = opened(settings, settings.weights)
    other = None if settings.against is None else opened_beside(settings, settings.against, subject)
    index, judged, data = indexed(settings, subject)
    for warning in index.warnings:
        print(f"warning: {settings.split}: {warning}")
    images = images_of(settings, index, [one for one in (subject, other) if one is not None])

    with results_folder(settings) as folder:
        evaluation = measured(settings, subject, images, judged)
        for i in evaluation.missing:
            print(f"warning: {settings.split}: {damage(index, i)}; nothing is found in it")
        tiles = "" if settings.tile is None else f", in tiles of {settings.tile}"
        shown = f"{data}, {settings.split}: {len(index)} images at {images.imgsz}{tiles}"
        print(f"{subject.path} on {shown}, {subject.where}")
        print(format_class_table(evaluation, subject.detector.names))
        if other is not None:
            print("\n".join(side_by_side((subject, evaluation), (other, measured(settings, other, images, judged)))))
        if folder is not None:
            write(settings, evaluation, images, subject.detector.names, folder)
    return 0


@contextmanager
def results_folder(settings: ValSettings) -> Iterator[Path | None]:
    """A new folder for what is asked for, if anything is: made before hours of measuring, to fail before them.

    One that nothing was written into, because the measuring failed or was stopped, goes again.
    """
    if not (settings.plots or settings.save_json):
        yield None
        return
    folder = create_folder(settings.project, settings.name, "val", settings.exist_ok)
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # it holds something
            folder.rmdir()
        raise


def opened(settings: ValSettings, path: Path, nms: bool | str | None = None) -> Subject:
    """The subject in a file or a run's folder; `nms` in place of the setting."""
    nms = settings.nms if nms is None else nms
    if is_export(path):
        detector = load(path, settings.device, settings.amp, nms, settings.names, settings.imgsz, settings.layout)
        return Subject(path, detector, {}, detector.runtime.title)
    path = checkpoint_file.weights_in(path)
    saved = checkpoint_file.read(path)
    device = choose_device(settings.device)
    detector = of_checkpoint(saved, path, settings.device, settings.amp, nms)
    where = f"{device}, {choose_precision(settings.amp, device).name}"
    return Subject(path, detector, saved["settings"], where, saved.get("epoch"))


def opened_beside(settings: ValSettings, path: Path, first: Subject) -> Subject:
    """The subject to measure beside the first: of two heads the one that the first has."""
    free = isinstance(first.runtime, ExportedRuntime) and first.runtime.facts.nms == "none"
    other = opened(settings, path, False if free and not is_export(path) else None)
    if other.detector.names != first.detector.names:
        raise ConfigError(
            f"against={path}: its classes are not those of {first.path} "
            f"({differing(other.detector.names, first.detector.names)})"
        )
    if other.runtime.channels != first.runtime.channels:
        raise ConfigError(f"against={path}: takes images of {other.runtime.channels} channels")
    return other


def indexed(settings: ValSettings, subject: Subject) -> tuple[Index, Collection[int] | None, Path]:
    """The images and their boxes by the subject's classes, the numbers of the classes that count (None: all), and the
    description that they are of."""
    path, runtime, names, trained = subject.path, subject.runtime, subject.detector.names, subject.trained
    if settings.data is None and "data" not in trained:
        raise ConfigError(f"{path}: does not say where its data set is; name one: detector val {path} my_data.yaml")
    data = settings.data or Path(trained["data"])
    renamed = settings.names or (trained["names"] if settings.data is None else None)
    description = load_description(data).named(renamed)
    if description.channels != runtime.channels:
        raise ConfigError(
            f"data={data}: has `channels: {description.channels}`, and {path} is a network for {runtime.channels}; "
            "change it in data.yaml, or take other weights"
        )
    if description.value_range is None:
        description = replace(description, value_range=runtime.value_range)
    reading = Reading(settings.bad_boxes, settings.max_missing_labels, False, settings.cache_dir)
    index = build_index(description, settings.split, reading, reading_bar(settings.split))
    classes = trained.get("classes") if settings.classes is None else settings.classes
    if names == (ITEM,):
        return of_classes(index, classes, single=True), None, data
    return *judged_of(in_order_of(index, names, path, data), classes), data


def images_of(settings: ValSettings, index: Index, subjects: Sequence[Subject]) -> ValidationSet:
    """The images as all subjects take them; whole ones where they are looked at in tiles."""
    images = (ValidationSet if settings.tile is None else WholeImages)(
        index,
        settings.imgsz or subjects[0].detector.imgsz,
        max(one.runtime.stride for one in subjects),
        # What is padded to a square for one is so for the other, which would find other boxes at the edges.
        rect=not any(isinstance(one.runtime, ExportedRuntime) and one.runtime.side for one in subjects),
        bad_images=settings.bad_images,
        public_batch=settings.batch if settings.letterbox == "public" else None,
    )
    for one in subjects:
        one.runtime.check_side(images.imgsz)
    return images


def measured(
    settings: ValSettings, subject: Subject, images: ValidationSet, judged: Collection[int] | None
) -> Evaluation:
    slicing, at_once = None, settings.batch
    if settings.tile is not None:
        slicing = slicing_by(settings.tile, settings.overlap, images.imgsz, settings.batch, images.rect)
        at_once = 1  # large ones, and `batch` is of tiles
    return evaluate_runtime(
        subject.runtime,
        validation_batches(images, at_once, worker_count(settings.workers), start=settings.multiprocessing_start),
        ground_truth_of(images.index),
        subject.detector.names,
        Limits(settings.conf, settings.iou, settings.max_det),
        judged=judged,
        slicing=slicing,
    )


def side_by_side(first: tuple[Subject, Evaluation], second: tuple[Subject, Evaluation]) -> list[str]:
    """A table of the metrics of two subjects, and by how much the first differs from the second."""
    rows = [(str(one.path), one.where, evaluation.row()) for one, evaluation in (first, second)]
    width = max(len(name) for name, _, _ in rows)
    columns = list(rows[0][2])
    lines = [f"\n{'':{width}}  {'  '.join(f'{column:>9}' for column in columns)}"]
    lines += [
        f"{name:{width}}  {'  '.join(f'{values[column]:9.5f}' for column in columns)}  {where}"
        for name, where, values in rows
    ]
    apart = (rows[0][2][column] - rows[1][2][column] for column in columns)
    lines.append(f"{'difference':{width}}  {'  '.join(f'{value:+9.5f}' for value in apart)}")
    return lines


def write(
    settings: ValSettings, evaluation: Evaluation, images: ValidationSet, names: Sequence[str], folder: Path
) -> None:
    """Put what is asked for into a folder: detections.json and pictures."""
    with writing(folder):
        if settings.save_json:
            rows = coco_results(evaluation.detections, images.index)
            (folder / "detections.json").write_text(json.dumps(rows), encoding="utf-8")
        if settings.plots:
            draw_evaluation(evaluation, images, names, folder)
    print(f"{'pictures' if settings.plots else 'written':9} {folder}")


def coco_results(detections: Sequence[Detections], index: Index) -> list[dict[str, Any]]:
    """The detections as COCO's tools read them.

    Ids are those of the data set's COCO file; without one images go by their names without the ending, and classes by
    their numbers.
    """
    rows = []
    for i, found in enumerate(detections):
        image = index.image_ids[i] if index.image_ids else index.path(i).stem
        for box, score, label in zip(
            found.boxes_xyxy.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True
        ):
            rows.append(coco_row(image, index.category_ids[label] if index.category_ids else label, box, score))
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
