"""`detector compare`: two runs or more on the same images, as text and as a page."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from detector import checkpoint_file
from detector.classes import differing, order_of
from detector.commands.val import Subject, images_of, indexed, measured, opened
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import CompareSettings, ValSettings
from detector.data.dataset import damage
from detector.data.index import Index
from detector.errors import ConfigError
from detector.evaluation.comparing import Contender, compare
from detector.evaluation.evaluate import ground_truth_of
from detector.files import replaced, writing
from detector.folders import create_folder
from detector.inference.runtimes.engines import is_export
from detector.reporting.compare_page import page
from detector.reporting.compare_text import labels_of, lines_of
from detector.reporting.run_files import read_metrics

PAGE = "compare.html"


def run(options: argparse.Namespace) -> int:
    said = words.of_comparison(options.arguments)
    settings = load_settings(CompareSettings, None, said.overrides, said.values)
    if len(settings.runs or ()) < 2:
        raise ConfigError("name two runs or more: detector compare runs/train runs/train2")
    of_val = settings.of_val()
    paths = [weights_of(path) for path in settings.runs]
    subjects = {path: opened(of_val, path) for path in dict.fromkeys(paths)}
    check_alike(settings, subjects)
    with page_file(settings) as file:
        index, runs = contenders(of_val, subjects, dict(zip(labels_of(settings.runs), paths, strict=True)))
        data = settings.data or subjects[paths[0]].trained["data"]
        objects = int((~index.ignored_boxes).sum())
        shown = f"{data}, {settings.split}: {len(index):,} images with {objects:,} objects"
        names = subjects[paths[0]].detector.names
        found = compare(runs, names, ground_truth_of(index), shown, settings.draws, settings.seed)
        print("\n".join(lines_of(found, index)))
        if file is not None:
            text = page(found, index)
            with writing(file, "name another page with out="), replaced(file) as beside:
                beside.write_text(text, encoding="utf-8", errors="backslashreplace")
            print(f"\npage      {file}")
    return 0


def weights_of(path: Path) -> Path:
    """The checkpoint or export that a run is measured by."""
    path = path.resolve()
    file = path if is_export(path) else checkpoint_file.weights_in(path)
    if path.is_dir() and not file.exists():
        raise ConfigError(
            f"{path}: has no weights/best.pt to measure; it is written at the end of a run's first epoch. "
            "Name another run, or the checkpoint itself"
        )
    return file


def check_alike(settings: CompareSettings, subjects: dict[Path, Subject]) -> None:
    """ConfigError unless all can be measured on the same images by the same classes."""
    first, *others = subjects.values()
    for one in others:
        if order_of(one.detector.names, first.detector.names) is None:
            told = differing(one.detector.names, first.detector.names)
            raise ConfigError(
                f"{one.path} and {first.path} are not of the same classes ({told}); only runs that are can be compared"
            )
        if settings.data is None and dataset_of(one) != dataset_of(first):
            raise ConfigError(
                f"{first.path} was trained on {dataset_of(first) or 'a data set that it does not name'}, {one.path} on "
                f"{dataset_of(one) or 'one that it does not name'}; say on which to measure all: data=my_data.yaml"
            )
        if settings.classes is None and judged_in(one) != judged_in(first):
            raise ConfigError(
                f"{first.path} was trained for {judged_in(first) or 'all classes'} alone, {one.path} for "
                f"{judged_in(one) or 'all classes'}; say which to measure: classes='[...]'"
            )
    if settings.data is None and dataset_of(first) is None:
        raise ConfigError(f"{first.path}: does not say where its data set is; name one: data=my_data.yaml")


def dataset_of(subject: Subject) -> Path | None:
    data = subject.trained.get("data")
    return None if data is None else Path(data).resolve()


def judged_in(subject: Subject) -> list[str] | None:
    """The classes that it was trained for, where not for all, by their names."""
    classes, names = subject.trained.get("classes"), subject.detector.names
    if classes is None or subject.trained.get("single_cls"):
        return None if classes is None else sorted(map(str, classes))
    return sorted(names[int(one)] if str(one).isdecimal() and int(one) < len(names) else str(one) for one in classes)


def contenders(
    settings: ValSettings, subjects: dict[Path, Subject], labelled: dict[str, Path]
) -> tuple[Index, list[Contender]]:
    """The images by the classes of the first, and each run measured on them; what is named twice is measured once."""
    first: Index | None = None
    known: dict[Path, Contender] = {}
    for label, path in labelled.items():
        if path in known:
            continue
        subject = subjects[path]
        index, judged, _ = indexed(settings, subject)
        if first is None:
            first = index
            for warning in index.warnings:
                print(f"warning: {settings.split}: {warning}")
        images = images_of(settings, index, [subject])
        evaluation = measured(settings, subject, images, judged)
        for i in evaluation.missing if not known else ():
            print(f"warning: {settings.split}: {damage(index, i)}; nothing is found in it")
        known[path] = Contender(
            label=label,
            path=path,
            where=subject.where,
            imgsz=images.imgsz,
            epoch=subject.epoch,
            settings=subject.trained,
            history=read_metrics(path.parent.parent) if path.parent.name == "weights" else [],
            evaluation=evaluation,
            order=order_of(subject.detector.names, next(iter(subjects.values())).detector.names) or [],
        )
    assert first is not None
    return first, [replace(known[path], label=label) for label, path in labelled.items()]


@contextmanager
def page_file(settings: CompareSettings) -> Iterator[Path | None]:
    """Where the page is to be written, None where none is; a new folder of it goes again where nothing is written.

    What cannot be written to is told before the measuring.
    """
    if not settings.html:
        yield None
        return
    if settings.out is not None:
        folder = settings.out.parent
        if not folder.is_dir() or settings.out.is_dir():
            raise ConfigError(f"out={settings.out}: cannot be a file: {folder} is no folder, or it is one itself")
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"out={settings.out}: {folder} cannot be written to; name another page")
        yield settings.out
        return
    folder = create_folder(settings.project, None, "compare", False)
    try:
        yield folder / PAGE
    except BaseException:
        with suppress(OSError):  # it holds something
            folder.rmdir()
        raise
