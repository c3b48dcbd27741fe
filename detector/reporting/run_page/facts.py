"""What a run was asked to do, on what, and what happened to it: the tables of its page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from detector.config.settings import Settings
from detector.errors import DetectorError
from detector.model.description import title
from detector.model.network import Network
from detector.reporting.arithmetic import decay_line, window_line
from detector.reporting.journal import BEGINNINGS, ENDINGS, Event
from detector.reporting.page import escaped, html_table
from detector.reporting.progress import clock
from detector.reporting.run_files import number
from detector.reporting.run_files import state_of as folder_state
from detector.reporting.run_page.record import Record, clock_of
from detector.step.plan import Cut

EVENTS = 400  # rows of the timeline; of more, the first and the last
BAD = ("failed", "killed", "bad step", "bad image")  # kinds of events in red
WARNING = ("memory", "save", "log", "stopped")
# Settings that a run writes down otherwise than they were left, and which setting made them so.
CHOSEN_BY = {
    "model": "model", "nbs": "nbs", "batch": "nbs or batch", "optimizer": "optimizer", "lr0": "optimizer",
    "momentum": "optimizer", "warmup_bias_lr": "optimizer",
}  # fmt: skip
OF_FOLDER = ("project", "name", "exist_ok", "resume")  # settings that say where a run is, not what


# --- arithmetic ------------------------------------------------------------------------------------------------------


def arithmetic(record: Record) -> str:
    """The run in the lines it said of itself, and what came of them so far; a damaged file's lines are left out."""
    lines = {"model": model_line(record), **_planned(record), "done": _done(record)}
    rows = "".join(
        f'<tr><td class="name faint">{name}</td><td class="name">{escaped(private(line))}</td></tr>'
        for name, line in lines.items()
        if line
    )
    return f'<table class="said">{rows}</table>'


def model_line(record: Record) -> str:
    """The model, its size and what it finds."""
    description = record.saved.get("description")
    if not description:
        return str(record.settings.get("model", ""))
    with suppress(DetectorError, KeyError, TypeError), torch.device("meta"):
        parameters = sum(one.numel() for one in Network(description).parameters())
        classes = len(record.saved["names"])
        return f"{title(description)}, {parameters:,} parameters, {classes:,} class{'es' * (classes > 1)}"
    return title(description)


def _planned(record: Record) -> dict[str, str]:
    """Window, optimizer, decay; nothing where no checkpoint says how it was planned."""
    saved, settings = record.saved, record.settings
    try:
        cut, batch, images = Cut(*saved["cut"]), saved["batch"], saved["images"]
        epochs, nbs = settings["epochs"], settings["nbs"]
        ramp = min(settings["warmup_epochs"], epochs - 1) if settings["accumulate_warmup"] else 0.0
        world = len(record.windows[-1].cut) if record.windows else cut.devices
        return {
            "data": f"{images:,} training images; {settings['data']}",
            "window": window_line(cut, batch, max(world, 1), images, epochs, ramp),
            "nbs": f"{nbs} images are what the rates are tuned for",
            "optimizer": f"{settings['optimizer']}, lr0 {settings['lr0']:g}, momentum {settings['momentum']:g}",
            "decay": decay_line(settings["weight_decay"], cut, nbs),
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}


def _done(record: Record) -> str:
    if not record.windows:
        return ""
    applied = sum(row.applied is True for row in record.windows)
    images = int(np.nansum(record.column("images")))
    most = max(len(one) for row in record.windows for one in row.cut) if any(row.cut for row in record.windows) else 0
    largest = max((number(micro) for row in record.windows for one in row.cut for micro in one), default=0)
    skipped = len(record.windows) - applied
    return (
        f"{applied:,} steps of {images:,} images, {skipped:,} skipped; at most {largest:.0f} images a micro-batch and "
        f"{most} of them accumulated"
    )


# --- settings --------------------------------------------------------------------------------------------------------


def settings_part(record: Record) -> list[str]:
    """What is not as it is by default, then everything."""
    defaults = {name: one.get_default(call_default_factory=True) for name, one in Settings.model_fields.items()}
    rows, alike = [], []
    for name, value in record.settings.items():
        usual = plain(defaults[name]) if name in defaults else "not known here"
        row = (name, shown(value), shown(usual))
        (alike if name in OF_FOLDER or value == usual else rows).append(row)
    if not record.settings:
        return ["<p>settings.yaml cannot be read.</p>"]
    table = "".join(
        f'<tr><td class="name">{escaped(name)}</td><td class="name"><b>{escaped(value)}</b></td>'
        f'<td class="name faint">{escaped(usual)}{_resolved(name)}</td></tr>'
        for name, value, usual in rows
    )
    head = '<tr><th class="name">setting</th><th class="name">this run</th><th class="name">by default</th></tr>'
    every = html_table(("setting", "value"), [row[:2] for row in alike])
    return [
        f'<div class="scroll"><table class="said">{head}{table}</table></div>'
        if rows
        else "<p>All are as by default.</p>",
        f'<details><summary>{len(alike)} settings as by default</summary><div class="scroll">{every}</div></details>',
    ]


def _resolved(name: str) -> str:
    """What a value comes from that nobody need have written: settings.yaml has what `auto` came to."""
    by = CHOSEN_BY.get(name)
    return f"; <i>chosen by {by}: auto, or as written</i>" if by else ""


def shown(value: Any) -> str:
    """A setting as a config file has it, on a line; the home folder is ~."""
    if value is None:
        return "-"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    return private(text.removesuffix("\n").removesuffix("\n..."))


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def private(text: object) -> str:
    """A text that does not tell the user's name: their folder in it is ~."""
    folder = os.path.expanduser("~")
    return str(text).replace(folder, "~") if len(folder) > 1 else str(text)


# --- events ----------------------------------------------------------------------------------------------------------


def timeline(record: Record, running: bool | None) -> str:
    """What happened, when; a kill, which nobody could write down, where it shows. running: see `state_of`."""
    events = with_kills(record, running)
    if not events:
        return "<p>events.jsonl has none.</p>"
    start = next((clock_of(one) for one in events if math.isfinite(clock_of(one))), math.nan)
    rows: Iterable[Event] = events
    hidden = len(events) - EVENTS
    if hidden > 0:
        rows = chain(events[: EVENTS // 2], [Event("", f"{hidden:,} more", 0, 0, math.nan)], events[-EVENTS // 2 :])
    table = "".join(_event_row(one, start) for one in rows)
    heads = '<th class="name">since the start</th><th class="name">UTC</th><th class="name">what</th>'
    return (
        f'<div class="scroll"><table class="said"><tr>{heads}<th>epoch</th><th>step</th><th class="name"></th></tr>'
        f"{table}</table></div>"
    )


def with_kills(record: Record, running: bool | None) -> list[Event]:
    """The events, and `killed` where a session has a beginning and no ending."""
    found: list[Event] = []
    under_way = False
    for one in [*record.events, None]:
        over = one is None and running is False
        if under_way and (over or (one is not None and one.kind in BEGINNINGS)):
            found.append(_kill(record, found, math.inf if one is None else clock_of(one)))
        if one is not None:
            found.append(one)
            under_way = one.kind in BEGINNINGS or (under_way and one.kind not in ENDINGS)
    return found


def _kill(record: Record, before: list[Event], until: float) -> Event:
    """The end of a session that did not say so, at the last that is known of it."""
    last = before[-1]
    rows = [row for row in record.windows if clock_of(last) <= number(row.time) <= until]
    if not rows:
        return Event("killed", "no ending was written", last.epoch, last.step, last.time)
    return Event("killed", "no ending was written; its last window", rows[-1].epoch, rows[-1].step, rows[-1].time)


def _event_row(one: Event, start: float) -> str:
    when = clock_of(one)
    known = math.isfinite(when) and abs(when) < 1e11
    since = clock(max(when - start, 0)) if known else ""
    utc = f"{datetime.fromtimestamp(when, timezone.utc):%Y-%m-%d %H:%M:%S}" if known else ""
    look = "error" if one.kind in BAD else "warning" if one.kind in WARNING else "note"
    kind = f'<span class="mark {look}">{escaped(one.kind)}</span>' if one.kind else ""
    numbers = [number(value) if one.kind else math.nan for value in (one.epoch, one.step)]
    place = "".join(f"<td>{value:,.0f}</td>" if math.isfinite(value) else "<td></td>" for value in numbers)
    text = " ".join(private(one.text).split()).removeprefix(f"{one.kind} ")
    return (
        f'<tr class="event"><td class="name">{since}</td><td class="name faint">{utc}</td>'
        f'<td class="name">{kind}</td>{place}'
        f'<td class="name">{escaped(text)}</td></tr>'
    )


def state_of(record: Record, running: bool | None) -> str:
    """How the run stands: finished, stopped, failed, still going, killed; empty where nothing tells.

    running: whether a process holds its folder; None: that is not known.
    """
    told = [one for one in record.events if one.kind in BEGINNINGS + ENDINGS]
    state = folder_state(record.events, running)
    if state is None:
        return "still going, or killed" if told else ""
    if state in ("running", "killed"):
        return "still going" if running else state
    text = private(told[-1].text)
    if state == "stopped":
        return text if text.startswith("stopped") else f"stopped {text}"
    return f"{state}: {text}" if text else state


# --- environment -----------------------------------------------------------------------------------------------------


def environment(record: Record) -> str:
    """The versions and the device of each session of the run, as it said them; else those of its last checkpoint."""
    told = dict.fromkeys(str(one.text) for one in record.events if one.kind == "machine")
    if told:
        items = "".join(f"<li>{escaped(text)}</li>" for text in told)
        return f"<ul>{items}</ul>"
    versions: Mapping[str, Any] = record.saved.get("versions") or {}
    said = [f"{key} {value}" for key, value in versions.items()]
    precision = record.saved.get("precision")
    if isinstance(precision, (list, tuple)) and len(precision) == 2:
        said.append(f"{precision[1]}, {precision[0]}")
    return f"<p>{escaped(', '.join(said) or 'not known')}</p>"
