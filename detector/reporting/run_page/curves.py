"""How a run went: its curves, and where its time went."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from detector.reporting.journal import BEGINNINGS, ENDINGS
from detector.reporting.page import escaped, html_table
from detector.reporting.progress import clock
from detector.reporting.run_files import number
from detector.reporting.run_page.record import Record, clock_of
from detector.reporting.svg import line_chart, thinned, thinned_x

SHOWN_METRICS = ("mAP50-95", "mAP50", "precision", "recall", "F1")


def curves(record: Record) -> list[str]:
    """The curves of a run, by epoch and by window."""
    charts = [*_by_epoch(record), *_by_window(record)]
    if not any(charts):
        return ["<p>No window is trained yet.</p>"]
    most = len(record.windows)
    said = f"{most:,} windows (optimizer steps)" + (
        ": lines are means of neighbours, the bands around them go from least to most" if _is_long(record) else ""
    )
    return [f'<p class="faint">{said}.</p>', f'<div class="charts">{"".join(charts)}</div>']


def _is_long(record: Record) -> bool:
    return len(thinned_x(record.column("window"))[0]) < len(record.windows)


def _by_epoch(record: Record) -> list[str]:
    epochs = record.of_epochs("epoch")
    if not len(epochs):
        return []
    x, said = thinned_x(epochs)

    def chart(title: str, names: Iterable[str], mark: float | None = None) -> str:
        lines = [thinned(epochs, record.of_epochs(name), name, number) for number, name in enumerate(names)]
        return line_chart(title, x, lines, "epoch", mark=mark, said=said)

    best = number(record.best.get("epoch"))
    return [
        chart("Metrics by epoch", SHOWN_METRICS, best if math.isfinite(best) else None),
        chart("Losses by epoch", record.terms),
    ]


def _by_window(record: Record) -> list[str]:
    if not record.windows:
        return []
    windows = record.column("window")
    x, said = thinned_x(windows)
    accumulate = np.array([max(map(len, row.cut), default=0) for row in record.windows], dtype=np.float64)
    seconds = record.column("seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(seconds > 0, record.column("images") / seconds, math.nan)
    scale = record.column("loss_scale")

    def chart(title: str, lines: dict[str, np.ndarray], log: bool = False) -> str:
        series = [thinned(windows, y, name, number) for number, (name, y) in enumerate(lines.items())]
        return line_chart(title, x, series, "window", log, said=said)

    return [
        chart("Losses by window", {term: record.losses(term) for term in record.terms}),
        chart("Learning rate", {"lr": record.column("lr")}),
        chart("Gradient norm, before clipping", {"norm": record.column("norm")}, log=True),
        chart("Images of a step", {"images": record.column("images"), "micro-batches a device": accumulate}),
        chart("Images a second", {"images a second": speed}),
        chart("Memory, GiB", {"memory": record.column("memory") / 2**30}),
        chart("Loss scale (fp16)", {"scale": scale}, log=True) if np.nanmax(scale, initial=1) > 1 else "",
    ]


# --- time ------------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of a run by what they went to; of all its sessions, without the pauses between them."""

    training: float  # computing, and all that is not one of the others
    waiting: float  # for images
    between: float  # the windows of two epochs: validation, tables and checkpoints
    starting: float  # from the beginning of a session to its first window
    ending: float  # from the last window of a session on: its validation, the last measuring, pictures


NAMES = {
    "training": "training",
    "waiting": "waiting for images",
    "between": "validation and saving between epochs",
    "starting": "from the start to the first window",
    "ending": "after the last window",
}


def times_of(record: Record) -> Times:
    """Where the time went. A window's seconds end with it; what lies between two is told from the clock."""
    seconds, share = np.nan_to_num(record.column("seconds")), np.nan_to_num(record.column("waited"))
    waiting = float((seconds * share).sum())
    spans = {"between": 0.0, "starting": 0.0, "ending": 0.0}
    events = [(clock_of(event), event.kind, 0.0) for event in record.events]
    ends = zip(record.column("time").tolist(), seconds.tolist(), strict=True)
    marks = [mark for mark in [*events, *((end, "window", took) for end, took in ends)] if math.isfinite(mark[0])]
    before, last = "", 0.0  # what the last mark was that counts, and when
    for when, kind, took in sorted(marks, key=lambda mark: mark[0]):
        if kind in BEGINNINGS:
            before, last = "begun", when
        elif kind == "window":
            if before:
                spans["starting" if before == "begun" else "between"] += max(when - took - last, 0.0)
            before, last = "window", when
        elif kind in ENDINGS:
            spans["ending" if before == "window" else "starting"] += max(when - last, 0.0) if before else 0.0
            before = ""
    return Times(float(seconds.sum()) - waiting, waiting, **spans)


def timing(record: Record) -> list[str]:
    """A bar and a table of where the time went, and how fast it was."""
    times = times_of(record)
    total = sum(times)
    if not total:
        return ["<p>No window is trained yet.</p>"]
    shares = {name: value / total for name, value in zip(times._fields, times, strict=True)}
    parts = "".join(
        f'<div style="width:{share:.2%};background:var(--s{k})" title="{escaped(NAMES[name])}: {share:.0%}"></div>'
        for k, (name, share) in enumerate(shares.items())
    )
    rows = "".join(
        f'<tr><td class="name"><span class="key" style="--c: var(--s{k})">{escaped(NAMES[name])}</span></td>'
        f"<td>{clock(value)}</td><td>{shares[name]:.1%}</td></tr>"
        for k, (name, value) in enumerate(zip(times._fields, times, strict=True))
    )
    seconds, images = record.column("seconds"), np.nan_to_num(record.column("images"))
    known = seconds[np.isfinite(seconds)]
    facts = [("in all", clock(total)), ("windows", f"{len(record.windows):,}")]
    if known.sum() > 0:
        facts += [
            ("images a second", f"{images.sum() / known.sum():,.1f}"),
            ("seconds a window, median", f"{np.median(known):.3g}"),
            ("seconds a window, slowest 1 in 20", f"{np.quantile(known, 0.95):.3g}"),
        ]
    table = f'<table class="chart"><tr><th class="name">time</th><th></th><th>share</th></tr>{rows}</table>'
    return [
        f'<div class="stack">{parts}</div>',
        f'<div class="row wide">{table}{html_table(("speed", ""), facts)}</div>',
    ]
