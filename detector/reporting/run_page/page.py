"""The report of a run as one HTML page that needs nothing beside it: no other file, no network, and no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from detector.data.dataset import ValidationSet
from detector.evaluation.evaluate import Evaluation, ground_truth_of
from detector.evaluation.mistakes import judge_each
from detector.reporting import svg
from detector.reporting.page import escaped, html_page
from detector.reporting.progress import clock
from detector.reporting.run_files import number
from detector.reporting.run_page.curves import SHOWN_METRICS, curves, times_of, timing
from detector.reporting.run_page.facts import (
    arithmetic,
    environment,
    model_line,
    private,
    settings_part,
    state_of,
    timeline,
)
from detector.reporting.run_page.pictures import pictures
from detector.reporting.run_page.quality import (
    by_size,
    calibration_part,
    class_table,
    confusion_part,
    curve_charts,
    share,
)
from detector.reporting.run_page.record import Record
from detector.reporting.samples import SHOWN_CONFIDENCE

STYLE = """
html { scroll-padding-top: 3.4rem; } body { padding-top: 0; }
h2 { border-top: 1px solid var(--line); padding-top: 1.6rem; font-size: 1.25rem; }
section:first-of-type h2 { border: 0; margin-top: .6rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
header { padding: 1.8rem 0 .4rem; } header p { margin: .3rem 0 0; } .faint { color: var(--faint); }
.state { display: inline-block; border-radius: 99px; padding: .05rem .7rem; font-size: .85rem; vertical-align: middle;
  background: var(--line); font-weight: normal; margin-left: .4rem; }
.state.good { background: #23894b; color: #fff; } .state.bad { background: #d62f3f; color: #fff; }
nav { position: sticky; top: 0; z-index: 5; background: var(--paper); border-bottom: 1px solid var(--line);
  display: flex; gap: 1.1rem; overflow-x: auto; padding: .6rem 0; white-space: nowrap; font-size: .88rem; }
nav a { color: var(--faint); text-decoration: none; } nav a:hover { color: var(--blue); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.4rem, 1fr)); gap: .8rem; margin: 1.1rem 0 0; }
.tile { background: var(--raised); border: 1px solid var(--line); border-radius: 10px; padding: .6rem .9rem; }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
.tile span { color: var(--faint); font-size: .82rem; } .tile.first { border-color: var(--blue); }
.tile.first b { color: var(--blue); } .scroll { overflow-x: auto; }
table { font-size: .92rem; font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid var(--line); }
table.said td { vertical-align: top; overflow-wrap: anywhere; }
table.said td:first-child { white-space: nowrap; overflow-wrap: normal; } .mark { white-space: nowrap; }
.event td:not(:last-child) { white-space: nowrap; }
.event td:last-child { min-width: 16rem; } th { white-space: nowrap; }
td.bars { min-width: 8rem; } .bar { border-radius: 3px; height: .6rem; }
.row.wide { gap: 1rem 4rem; margin-top: .8rem; }
.charts.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); margin-top: 1.8rem;
  gap: 2rem 3rem; }
.notice { border-left: 4px solid #d97a00; background: var(--raised); padding: .6rem 1rem; overflow-wrap: anywhere; }
.stack { display: flex; height: 1.5rem; border-radius: 6px; overflow: hidden; }
.confusion { border-spacing: 2px; border-collapse: separate; }
.confusion td { text-align: center; min-width: 3.2rem; height: 2.5rem; padding: 0 .3rem; border: 0; border-radius: 4px;
  background: color-mix(in srgb, var(--blue) calc(var(--p) * 100%), var(--raised)); }
.confusion td.deep { color: #fff; } .confusion th.turned span { writing-mode: vertical-rl; transform: rotate(180deg); }
.confusion th.name { padding-right: .6rem; } .confusion th { color: var(--ink); text-align: center; }
.confusion th.name { text-align: right; max-width: 11rem; overflow: hidden; text-overflow: ellipsis; }
.confusion.tight td { min-width: 1.5rem; height: 1.5rem; font-size: .7rem; padding: 0; }
.confusion.tight th { font-size: .75rem; } .wholerow { grid-column: 1 / -1; }
.charts.two text { font-size: 10.5px; } .bin { fill: var(--blue); opacity: .75; }
.chart p { font-size: .85rem; margin: .3rem 0 0; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.4rem 1.6rem; }
.pair div { display: flex; gap: 3px; align-items: flex-start; background: var(--line); border-radius: 6px;
  overflow: hidden; } .pair img { width: calc(50% - 1.5px); height: auto; display: block; }
.pair figcaption { margin-top: .3rem; } .none { height: 8rem; justify-content: center; align-items: center; }
.keys { display: inline-flex; flex-wrap: wrap; gap: 0 1rem; }
@media (max-width: 40rem) { body { padding-left: .9rem; padding-right: .9rem; } th, td { padding-right: .5rem; }
  td.bars { min-width: 4rem; } td .key { white-space: normal; }
  .pair div { flex-direction: column; } .pair img { width: 100%; } }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""


class Measured(NamedTuple):
    """The best checkpoint on the validation images."""

    evaluation: Evaluation
    images: ValidationSet
    names: tuple[str, ...]  # of the classes


def page(record: Record, measured: Measured | None, why: str = "", running: bool | None = False) -> str:
    """The whole page, well-formed also as XML.

    measured: None where the best checkpoint cannot be measured, and `why`. running: whether a process is at work on the
    run; None: that is not known.
    """
    parts: list[tuple[str, str, Sequence[str]]] = [
        ("run", "The run", [arithmetic(record)]),
        ("curves", "Curves", curves(record)),
    ]
    if measured is None:
        parts.append(("quality", "What it finds", [f'<p class="notice">{escaped(_without(why))}</p>']))
    else:
        parts += _measured_parts(record, measured)
    parts += [
        ("time", "Time", timing(record)),
        ("events", "Events", [timeline(record, running)]),
        ("settings", "Settings", settings_part(record)),
        ("environment", "Environment", [environment(record)]),
    ]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in parts)
    body = [_head(record, measured, running), f"<nav>{links}</nav>"]
    for key, title, elements in parts:
        body += [f'<section id="{key}"><h2>{title}</h2>', *elements, "</section>"]
    return html_page(
        f"{record.folder.name}: training run", [*body, f"<script>{svg.SCRIPT}</script>"], svg.STYLE + STYLE
    )


def _without(why: str) -> str:
    return (
        "Left out: what the best checkpoint finds, its curves, confusion, calibration and images. "
        f"{private(why) or 'It was not measured'}"
    )


def _measured_parts(record: Record, measured: Measured) -> list[tuple[str, str, Sequence[str]]]:
    evaluation, images, names = measured
    truth = ground_truth_of(images.index)
    f1 = evaluation.curves.mean_f1[evaluation.curves.best]
    confidence = evaluation.curves.best_confidence if f1 > 0 else SHOWN_CONFIDENCE
    verdicts = judge_each(truth, evaluation.detections, confidence)
    epoch = number(record.best.get("epoch"))
    of = f" of epoch {epoch:.0f}" if math.isfinite(epoch) else ""
    missing = f"; {len(evaluation.missing)} of them damaged" if evaluation.missing else ""
    said = f"weights/best.pt{of} on {evaluation.images:,} validation images at {images.imgsz} pixels{missing}."
    charts = [
        *curve_charts(evaluation.curves, names),
        calibration_part(truth, evaluation),
        confusion_part(evaluation.confusion, names),
    ]
    return [
        (
            "quality",
            "What it finds",
            [
                f'<p class="faint">{said}</p>',
                by_size(evaluation, truth),
                f'<div class="charts two">{"".join(charts)}</div>',
            ],
        ),
        (
            "classes",
            "Classes",
            [
                class_table(evaluation, truth, verdicts, names),
                f'<p class="faint">right to false: boxes at confidence {confidence:.3f}.</p>',
            ],
        ),
        ("images", "Images", pictures(images, truth, verdicts, names)),
    ]


# --- the head --------------------------------------------------------------------------------------------------------


def _head(record: Record, measured: Measured | None, running: bool | None) -> str:
    state = state_of(record, running)
    look = {"finished": "good", "failed": "bad", "killed": "bad"}.get(state.partition(":")[0], "")
    badge = f' <span class="state {look}">{escaped(state)}</span>' if state else ""
    tiles = "".join(
        f'<div class="tile{" first" if k == 0 else ""}"><b data-metric="{escaped(name)}">{escaped(value)}</b>'
        f"<span>{escaped(name)}</span></div>"
        for k, (name, value) in enumerate(_tiles(record, measured).items())
    )
    return (
        f"<header><h1>{escaped(record.folder.name)}{badge}</h1>"
        f'<p class="faint">{escaped(private(model_line(record)))}</p>'
        f'<div class="tiles">{tiles}</div></header>'
    )


def _tiles(record: Record, measured: Measured | None) -> dict[str, str]:
    """The numbers that one looks for first."""
    row = measured.evaluation.row() if measured else record.best
    tiles = {name: share(number(row[name])) for name in SHOWN_METRICS if name in row}
    planned = number(record.settings.get("epochs"))
    of = f" / {planned:.0f}" if math.isfinite(planned) else ""
    tiles["epochs"] = f"{len(record.epochs)}{of}"
    best = number(record.best.get("epoch"))
    if math.isfinite(best):
        tiles["best epoch"] = f"{best:.0f}"
    total = sum(times_of(record))
    if total:
        tiles["time"] = clock(total)
        seconds = np.nansum(record.column("seconds"))
        if seconds:
            tiles["images / s"] = f"{np.nansum(record.column('images')) / seconds:,.1f}"
    return tiles
