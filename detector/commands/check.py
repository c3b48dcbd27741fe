"""`detector check`: the doctor of a data set. Its findings on the terminal, in report.json and in report.html."""

import argparse
import json
from contextlib import suppress
from pathlib import Path

from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import CheckSettings
from detector.data.description import load_description
from detector.data.doctor import Examination, examine
from detector.data.reading import Reading
from detector.errors import ConfigError, DataError
from detector.files import replaced, writing
from detector.folders import create_folder
from detector.reporting.data_page import page
from detector.reporting.data_report import as_json, lines_of
from detector.reporting.progress import reading_bar


def run(options: argparse.Namespace) -> int:
    """The exit status is 1 where there is an error among the findings."""
    said = words.of_check(options.arguments)
    settings = load_settings(CheckSettings, None, said.overrides, said.values)
    if settings.data is None:
        raise ConfigError("name the data set's YAML: detector check my_data.yaml")
    description = load_description(settings.data).named(settings.names)
    if absent := [split for split in settings.split or () if split not in description.splits]:
        raise DataError(f"{description.path}: '{absent[0]}' is missing; it has {', '.join(description.splits)}")
    # Before work that takes minutes: a name that is taken is told at once.
    folder = create_folder(settings.project, settings.name, "check", settings.exist_ok)
    try:
        found = examine(
            description,
            [split for split in description.splits if split in (settings.split or description.splits)],
            settings.imgsz,
            not settings.fast,
            Reading(max_missing_labels=settings.max_missing_labels, cache_dir=settings.cache_dir),
            reading_bar,
        )
    except BaseException:
        with suppress(OSError):  # it holds something else
            folder.rmdir()
        raise
    for line in lines_of(found):
        print(line)
    with writing(folder):
        write(found, folder)
    print(f"report    {folder / 'report.html'}, and all findings in report.json")
    return 1 if found.of_severity("error") else 0


def write(found: Examination, folder: Path) -> None:
    """report.json and report.html, each whole or as it was."""
    texts = {"report.json": json.dumps(as_json(found), indent=1) + "\n", "report.html": page(found)}
    for name, text in texts.items():
        with replaced(folder / name) as beside:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")
