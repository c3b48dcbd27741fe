"""`detector convert-data`: a data set in another format, YOLO text, COCO JSON, Pascal VOC XML or tar shards."""

import argparse

from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import ConvertDataSettings
from detector.data.description import load_description
from detector.data.reading import Reading, build_index
from detector.data.writing import write_dataset
from detector.errors import ConfigError
from detector.files import writing
from detector.reporting.progress import reading_bar


def run(options: argparse.Namespace) -> int:
    said = words.of_conversion(options.arguments, ("data", "to"))
    settings = load_settings(ConvertDataSettings, None, said.overrides, said.values)
    if settings.data is None or settings.to is None or settings.format is None:
        raise ConfigError(
            "name a data set, a new folder and a format: detector convert-data my.yaml my_coco format=coco"
        )
    folder = settings.to
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not settings.exist_ok)):
        raise ConfigError(f"to={folder}: is there already; name a new folder, or write into it with exist_ok=true")
    description = load_description(settings.data)
    reading = Reading(settings.bad_boxes, 1.0, settings.polygons)
    splits = {}
    for split in description.splits:
        splits[split] = build_index(description, split, reading, reading_bar(split))
        for warning in splits[split].warnings:
            print(f"warning: {split}: {warning}")
    with writing(folder, "make room, or choose another folder"):
        notes = write_dataset(splits, folder, settings.format, settings.link)
    for note in notes:
        print(f"note      {note}")
    for split, index in splits.items():
        print(f"{split:9} {len(index):,} images with {len(index.classes):,} boxes")
    print(f"written   {folder / 'data.yaml'}, {settings.format}, from {description.format}")
    return 0
