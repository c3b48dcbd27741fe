"""`detector report`: the page of a run, whether it is finished, stopped, killed or still going."""

import argparse

from detector.commands.val import images_of, indexed, measured, opened
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import ReportSettings, ValSettings
from detector.errors import ConfigError, DataError, DetectorError
from detector.files import replaced, writing
from detector.reporting.run_page.page import Measured, page
from detector.reporting.run_page.record import Record, read_record
from detector.run.lock import in_use

PAGE = "report.html"
# Settings of a run that say how its validation images are read and looked at.
KEPT = (
    "names", "nms", "amp", "workers", "multiprocessing_start", "bad_images", "bad_boxes", "max_missing_labels",
    "cache_dir",
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    said = words.of_folder(options.arguments, "run", "out=page.html")
    settings = load_settings(ReportSettings, None, said.overrides, said.values)
    if settings.run is None:
        raise ConfigError("name a run's folder: detector report runs/train")
    folder = settings.run.resolve()
    if not folder.is_dir():
        raise ConfigError(f"{settings.run}: no such folder; name that of a run: detector report runs/train")
    path = settings.out or folder / PAGE
    if path.is_dir() or not path.parent.is_dir():  # told before the measuring
        raise ConfigError(f"out={path}: no file can be there; name one in a folder that exists: out=page.html")
    record = read_record(folder)
    best, why = None, ""
    try:
        best = measure(settings, record)
    except (DetectorError, OSError) as error:
        why = str(error)
        print(f"warning: {error}; the page goes without what is measured")
    with writing(path, "make room, or write it elsewhere with out=FILE"), replaced(path) as beside:
        beside.write_text(page(record, best, why, in_use(folder)), encoding="utf-8", errors="backslashreplace")
    print(f"report    {path}")
    return 0


def measure(settings: ReportSettings, record: Record) -> Measured:
    """weights/best.pt on the run's validation images, read as the run read them.

    Raises DetectorError where there is no such file, or no such data set any more.
    """
    subject = opened(wanted(settings, record.settings), record.folder / "weights" / "best.pt")
    how = wanted(settings, subject.trained)
    index, judged, _ = indexed(how, subject)
    images = images_of(how, index, [subject])
    evaluation = measured(how, subject, images, judged)
    if len(evaluation.missing) == len(index):
        raise DataError(f"{index.place(0)}: cannot be read, nor can any other of the {len(index)} validation images")
    return Measured(evaluation, images, subject.detector.names)


def wanted(settings: ReportSettings, trained: dict[str, object]) -> ValSettings:
    """How to measure: on what is asked for, and for the rest by the run's own settings."""
    kept = {key: trained[key] for key in KEPT if trained.get(key) is not None}
    asked = {key: getattr(settings, key) for key in settings.model_fields_set & {"data", "device", "amp"}}
    return load_settings(ValSettings, values={**kept, **asked})
