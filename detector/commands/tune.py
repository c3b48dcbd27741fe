"""`detector tune`: which micro-batch, and which way of keeping activations, is the fastest that fits a device."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import yaml

from detector.config import words
from detector.config.settings import Settings, TuneSettings, load_settings, read_yaml
from detector.device import choose_devices
from detector.errors import ConfigError
from detector.files import replaced
from detector.fitting.estimate import estimate_bench
from detector.fitting.fit import allocator, bench, tried
from detector.fitting.search import SPARE, Trial, check_whole, parse_memory, recommend, size, table
from detector.model.checkpoint import chosen_description
from detector.model.description import title
from detector.run.loop import say_now
from detector.run.run import silent


def run(options: argparse.Namespace) -> int:
    if not options.arguments:
        raise ConfigError("name a config file, or at least data=...: detector tune my.yaml memory=4GiB")
    said = words.of_run(options.arguments)
    if options.write and said.file is None:
        raise ConfigError("--write: there is no config file to write to; name one: detector tune my.yaml --write")
    given = load_settings(TuneSettings, said.file, said.overrides, said.values)
    for note in said.notes:
        print(note)
    settings, memory = given.of_run(), None if given.memory is None else parse_memory(given.memory)
    check_whole(settings, "detector tune")
    if options.estimate:
        found, limit = estimated(settings, memory, options.min_bn_batch)
    else:
        found, limit = measured(settings, memory, options.min_bn_batch)
    chosen = recommend(found, settings.norm, options.min_bn_batch)
    print(table(found, settings.norm, chosen))
    if chosen is None:
        raise ConfigError(
            f"not even one image fits {size(limit)} with {SPARE:.0%} to spare; take a smaller imgsz or model"
        )
    print("\n".join(advice(chosen, settings, options.min_bn_batch)))
    if options.write:
        print("\n".join(write(said.file, chosen.settings())))
    return 0


def measured(settings: Settings, memory: int | None, least: int) -> tuple[list[Trial], int]:
    """The trials that ran on the device, and the bytes that they were to fit."""
    devices = choose_devices(settings.device)
    here = bench(settings, devices, memory, say_now)
    boxes = len(here.job.sample.classes)
    model = title(chosen_description(settings.model, settings.weights))
    print(f"measured  {model} at {settings.imgsz}, all images with {boxes} boxes, {devices[0]}")
    print(
        f"memory    {size(here.memory)} for the process of each of {len(devices)} devices, {SPARE:.0%} of it to spare"
    )
    if setup := allocator(devices[0]):
        print(f"allocator {setup}")
    return tried(here.measure, settings, here.modes(), here.planned(), least, say_now), here.memory


def estimated(settings: Settings, memory: int | None, least: int) -> tuple[list[Trial], int]:
    """The ways that were counted, and the bytes that they were to fit."""
    here = estimate_bench(settings, memory, say_now)
    print("\n".join(here.lines()))
    return tried(here.measure, settings, here.modes(), here.planned(), least, silent), here.memory


def advice(chosen: Trial, settings: Settings, least: int) -> list[str]:
    """The lines of a config file for what is recommended, and what to know about it."""
    lines = ["recommended:"]
    lines += [f"    {key}: {text(value)}" for key, value in chosen.settings().items()]
    seen = chosen.sees(settings.norm)
    if seen is not None and seen < least:
        lines.append(f"BatchNorm sees {seen} images, fewer than the {least} asked for: no way with more of them fits")
    return lines


def text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write(file: Path, values: dict[str, int | str | bool]) -> list[str]:
    """Set keys of a config file, whose other lines and comments stay; says what was changed.

    A key that is not in the file is added at its end where it is not the default. ConfigError where the file is
    written in a way that cannot be edited so.
    """
    before = file.read_text(encoding="utf-8")
    nodes = {key.value: value for key, value in read_yaml(file, "config file").value}
    changes, added, after = [], [], before
    for key, node in sorted(nodes.items(), key=lambda item: -item[1].start_mark.index):  # from the end on
        old = before[node.start_mark.index : node.end_mark.index]
        if key in values and old != text(values[key]):
            after = after[: node.start_mark.index] + text(values[key]) + after[node.end_mark.index :]
            changes.insert(0, f"{file}: {key}: {old} -> {text(values[key])}")
    for key, value in values.items():
        if key not in nodes and value != Settings.model_fields[key].default:
            added.append(f"{key}: {text(value)}\n")
            changes.append(f"{file}: {key}: {text(value)} (added)")
    if added:
        after = after + ("" if after.endswith("\n") or not after else "\n") + "".join(added)
    check(file, before, after, values)
    replace(file.resolve(), after)
    return changes or [f"{file}: says so already"]


def replace(file: Path, after: str) -> None:
    """Give a file new text, at once, with the mode and the ends of lines that it has."""
    ending = "\r\n" if b"\r\n" in file.read_bytes() else "\n"
    try:
        with replaced(file) as beside:
            beside.write_text(after, encoding="utf-8", newline=ending)
            shutil.copymode(file, beside)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; the file is as it was") from None


def check(file: Path, before: str, after: str, values: dict[str, int | str | bool]) -> None:
    """Raise ConfigError unless the new text is the old one's settings with these values."""
    wanted = {key: yaml.safe_load(text(value)) for key, value in values.items()}
    try:
        old, new = yaml.safe_load(before) or {}, yaml.safe_load(after)
        defaults = {key: yaml.safe_load(text(Settings.model_fields[key].default)) for key in wanted}
        right = {**defaults, **old, **wanted} == {**defaults, **new}
    except (yaml.YAMLError, TypeError):
        right = False
    if not right:
        lines = ", ".join(f"{key}: {text(value)}" for key, value in values.items())
        raise ConfigError(f"{file}: cannot be edited line by line, for example a file in {{}}; write into it {lines}")
