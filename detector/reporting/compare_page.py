"""The comparison of runs as one HTML page that needs nothing beside it: no other file, no network, and no script."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from detector.data.index import Index
from detector.data.pixels import decoded
from detector.drawing import in_colours
from detector.errors import DataError
from detector.evaluation.comparing import METRICS, Comparison, Contender
from detector.reporting import svg
from detector.reporting.compare_text import (
    Rows,
    caveats,
    class_rows,
    facts,
    image_name,
    image_rows,
    interval_title,
    metric_rows,
    missed_by,
    object_rows,
    one_line,
    same_settings,
    settings_rows,
    signed,
    told,
)
from detector.reporting.page import escaped, html_page, html_picture

WORST = 16  # images that are shown
LISTED = 200  # images that are listed
MOST_CLASSES = 40  # beyond which their table is folded
SIDE = 520  # pixels of a picture's long side
QUALITY = 82  # of JPEG
# Of the runs and their lines, told apart on white and on black, and none that boxes have; further runs begin again.
COLOURS = ("#8064f0", "#0f9d8f", "#c9752c", "#6b7f99", "#b5468f", "#8a9a1b")
FOUND, MISSED, WRONG = (70, 160, 255), (255, 176, 0), (235, 60, 160)  # RGB of boxes
CURVES = ("mAP50-95", "mAP50", "box", "cls", "dfl", "l1")

STYLE = """
.scroll { overflow-x: auto; } .tables { gap: 0 3rem; } .tables section { max-width: 100%; }
td, th { vertical-align: baseline; } tr + tr td { border-top: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; } td.text, th.text { text-align: left; }
td.delta { color: var(--faint); } .settings td.text { max-width: 16rem; overflow-wrap: break-word; }
td.name { min-width: 5.5rem; } td.name, th { max-width: 14rem; overflow-wrap: break-word; }
td:last-child, th:last-child { padding-right: 0; }
.square { display: inline-block; width: .75rem; height: .75rem; border-radius: 3px; margin-right: .45rem; }
.runs { list-style: none; padding: 0; } .runs li { margin: .35rem 0; }
.verdicts { display: grid; gap: .8rem; } .verdict { background: var(--raised); border: 1px solid var(--line);
  border-radius: 8px; padding: .7rem 1rem; display: grid; grid-template-columns: minmax(0, 1fr) 14rem;
  gap: .2rem 1.2rem; align-items: center; }
.verdict b { overflow-wrap: anywhere; } .verdict .numbers { color: var(--faint); font-variant-numeric: tabular-nums; }
.interval { width: 100%; } .interval .grid { stroke: var(--line); } .zero { stroke: var(--faint); }
.range { stroke-width: 8; stroke-linecap: round; opacity: .5; } .dot { stroke: var(--raised); stroke-width: 1.5; }
.range.better { stroke: #2ea05a; } .range.worse { stroke: #d6456b; } .range { stroke: #8b929c; }
.dot.better { fill: #2ea05a; } .dot.worse { fill: #d6456b; } .dot.open, .dot.equal { fill: #8b929c; }
.legend { margin: .2rem 0 .8rem; } .legend span.of { margin-right: 1.2rem; white-space: nowrap; }
.swatch { display: inline-block; width: .9rem; height: .9rem; margin-right: .4rem; vertical-align: -.1rem;
  border: 3px solid; box-sizing: border-box; }
.image { border-top: 1px solid var(--line); padding: .9rem 0; } .image h3 { font-size: .92rem; font-weight: 600;
  margin: 0 0 .5rem; overflow-wrap: anywhere; } .image h3 span { font-weight: normal; color: var(--faint); }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 33rem)); gap: .8rem; }
.beside img { width: 100%; display: block; border-radius: 4px; } .faint { color: var(--faint); }
.none { height: 8rem; background: var(--line); display: grid; place-items: center; }
@media (max-width: 40rem) { body { padding: 1rem; } .verdict { grid-template-columns: minmax(0, 1fr); } }
"""


RUNS = f":root {{ {' '.join(f'--s{k}: {colour};' for k, colour in enumerate(COLOURS))} }}"


def page(found: Comparison, index: Index) -> str:
    """The whole page, well-formed also as XML. `index` holds the images of the comparison."""
    title = " and ".join(one.label for one in found.runs) if len(found.runs) == 2 else f"{len(found.runs)} runs"
    runs = [f'<li>{_key(k)}<b>{escaped(one.label)}</b> <span class="path">{escaped(facts(one))}</span></li>'
            for k, one in enumerate(found.runs)]  # fmt: skip
    body = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="path">measured on {escaped(one_line(found.data))}</p><ul class="runs">{"".join(runs)}</ul>',
        "<h2>More than noise?</h2>",
        f"<p>{escaped(interval_title(found))}.</p>",
        f'<div class="verdicts">{_verdicts(found)}</div>',
        f'<p class="faint">{escaped(" ".join(caveats(found)))}</p>',
        '<div class="row tables">',
        f"<section><h2>Metrics</h2>{_measures(metric_rows(found), found.runs)}</section>",
        f"<section><h2>AP50-95 by class</h2>{_classes(found)}</section>",
        f"<section><h2>Settings that differ</h2>{_settings(found.runs)}</section></div>",
        *_curves(found.runs),
        "<h2>Objects found and missed</h2>",
        "<p>Matched at IoU 0.5, each run at the confidence of its best F1. <i>Wrong</i> is what was found where no "
        "object of that class is.</p>",
        _table(object_rows(found)),
        *_images(found, index),
    ]
    return html_page(f"{title}: compared", [*body, f"<script>{svg.SCRIPT}</script>"], svg.STYLE + RUNS + STYLE)


def _key(run: int) -> str:
    """A square in the colour of a run."""
    return f'<span class="square" style="background:{_colour(run)}"></span>'


def _colour(run: int) -> str:
    return COLOURS[run % len(COLOURS)]


def _table(rows: Rows, text: Sequence[int] = (), kind: str = "", delta: Sequence[int] = ()) -> str:
    """A table that can be scrolled sideways; columns of `text` begin at the left, those of `delta` are faint."""

    def cell(tag: str, column: int, value: str) -> str:
        kinds = (
            ["name"]
            if column == 0
            else [*(["text"] if column in text else []), *(["delta"] if column in delta else [])]
        )
        of_class = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{tag}{of_class}>{escaped(value)}</{tag}>"

    lines = [
        f"<tr>{''.join(cell('td' if number else 'th', column, value) for column, value in enumerate(row))}</tr>"
        for number, row in enumerate(rows)
    ]
    return f'<div class="scroll"><table class="{kind}">{"".join(lines)}</table></div>'


def _settings(runs: Sequence[Contender]) -> str:
    rows = settings_rows(runs)
    return (
        _table(rows, range(1, len(rows[0])), "settings") if len(rows) > 1 else f"<p>{escaped(same_settings(runs))}</p>"
    )


def _measures(rows: Rows, runs: Sequence[Contender]) -> str:
    return _table(rows, delta=range(3, 1 + 2 * len(runs), 2))


def _classes(found: Comparison) -> str:
    rows = class_rows(found)
    table = _measures(rows, found.runs)
    if len(rows) <= MOST_CLASSES:
        return table
    return f"<details><summary>{len(rows) - 1:,} classes</summary>{table}</details>"


def _verdicts(found: Comparison) -> str:
    """A card a difference: in words, in numbers, and drawn."""
    first, cards = found.runs[0].label, []
    ends = [
        value for several in found.intervals.values() for one in several for value in one[:3] if math.isfinite(value)
    ]
    reach = max(map(abs, ends), default=0.0) * 1.1 or 1.0
    for k, run in enumerate(found.runs[1:]):
        for metric in METRICS:
            one = found.intervals[metric][k]
            numbers = f"{signed(one.difference)}, from {signed(one.low)} to {signed(one.high)}"
            drawn = "" if one.verdict == "unknown" else range_chart(
                Range(one.difference, one.low, one.high, one.verdict), reach
            )  # fmt: skip
            cards.append(
                f'<div class="verdict"><div>{_key(k + 1)}<b>{escaped(run.label)}</b> against {_key(0)}'
                f"<b>{escaped(first)}</b>, {metric}: {escaped(told(one))}"
                f'<div class="numbers">{escaped(numbers)}</div></div>{drawn}</div>'
            )
    return "".join(cards)


class Range(NamedTuple):
    """A row of `range_chart`: where it lies, its ends, and its class of CSS."""

    middle: float
    low: float
    high: float
    kind: str


def range_chart(row: Range, reach: float) -> str:
    """A range on an axis from -reach to reach with 0 marked, for a cell of a table."""
    width, height = 220, 22

    def x_of(value: float) -> float:
        return width / 2 + value / reach * (width / 2 - 8)

    middle, low, high = height / 2, x_of(row.low), x_of(row.high)
    parts = [
        f'<line class="grid" x1="0" x2="{width}" y1="{middle}" y2="{middle}" />',
        f'<line class="zero" x1="{width / 2}" x2="{width / 2}" y1="0" y2="{height}" />',
        f'<line class="range {row.kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" />',
        f'<circle class="dot {row.kind}" cx="{x_of(row.middle):.1f}" cy="{middle}" r="4" />',
    ]
    return f'<svg class="interval" viewBox="0 0 {width} {height}" aria-hidden="true">{"".join(parts)}</svg>'


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves(runs: Sequence[Contender]) -> list[str]:
    """A chart of each column of the tables of metrics that a run has; nothing where none has a table."""
    epochs = np.array(sorted({row["epoch"] for run in runs for row in run.history}))
    charts = []
    for column in CURVES:
        values = [{row["epoch"]: row.get(column, math.nan) for row in run.history} for run in runs]
        series = [
            svg.Series(run.label, np.array([of_run.get(epoch, math.nan) for epoch in epochs.tolist()]), k)
            for k, (run, of_run) in enumerate(zip(runs, values, strict=True))
        ]
        title = column if column.startswith("mAP") else f"training loss: {column}"
        charts += [chart] if len(epochs) and (chart := svg.line_chart(title, epochs, series, "epoch")) else []
    if not charts:
        return []
    without = [one.label for one in runs if not one.history]
    missing = f'<p class="faint">Without a table of epochs: {escaped(", ".join(without))}.</p>' if without else ""
    return [
        f'<h2>Training</h2>{missing}<div class="charts">{"".join(charts)}</div>',
        '<p class="faint">As each run measured itself after an epoch, by the average of its weights.</p>',
    ]


# --- images ----------------------------------------------------------------------------------------------------------


def _images(found: Comparison, index: Index) -> list[str]:
    worst = found.worst()
    if not worst:
        return ["<p>There is no object that one finds and another misses.</p>"]
    swatches = [
        f'<span class="of"><span class="swatch" style="border-color:rgb{colour}"></span>{told}</span>'
        for colour, told in ((FOUND, "found"), (MISSED, "missed"), (WRONG, "wrong"))
    ]
    shown = [_image(found, index, i) for i in worst[:WORST]]
    several = f"The {len(shown)} images" if len(shown) > 1 else "The image"
    rows = image_rows(found, index, LISTED)
    more = f"<p>and {len(worst) - LISTED:,} more</p>" if len(worst) > LISTED else ""
    return [
        f"<h2>{several} that differ most</h2>" if len(shown) > 1 else "<h2>The image that differs</h2>",
        "<p>Thick: objects that one run finds and another misses. Thin: the rest.</p>",
        f'<p class="legend">{" ".join(swatches)}</p>',
        *shown,
        f"<h2>All images that differ: {len(worst):,} of {len(found.truth):,}</h2>",
        f"<details><summary>{len(rows) - 1:,} images</summary>{_table(rows)}{more}</details>",
    ]


def _image(found: Comparison, index: Index, i: int) -> str:
    """An image as each run sees it, beside each other."""
    figures = []
    try:
        image = in_colours(decoded(index, i))
    except (DataError, MemoryError):
        image = None
    for k, (run, missed) in enumerate(zip(found.runs, missed_by(found, i), strict=True)):
        picture = '<div class="none">no picture</div>'
        if image is not None:
            picture = html_picture(_seen(found, k, i, image), ".jpg", [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        told = f"misses {missed}" if missed else "misses none of them"
        figures.append(f"<figure>{picture}<figcaption>{_key(k)}{escaped(run.label)}: {told}</figcaption></figure>")
    number = int(found.apart[i])
    objects = f"{number:,} {'object' if number == 1 else 'objects'} of {int((~found.truth.of_image(i)[2]).sum()):,}"
    return (
        f'<div class="image"><h3>{escaped(image_name(index, i))} <span>{objects} found by one and missed by another'
        f'</span></h3><div class="beside">{"".join(figures)}</div></div>'
    )


def _seen(found: Comparison, run: int, i: int, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image with its objects as a run finds them, and what it finds where there are none."""
    factor = SIDE / max(image.shape[:2])
    size = max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor))
    picture = cv2.resize(image, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC)
    rows = slice(found.truth.offsets[i], found.truth.offsets[i + 1])
    boxes, crowd = found.truth.boxes_xyxy[rows] * factor, found.truth.crowd[rows]
    mine, everybody = found.found[run, rows], found.found[:, rows]
    apart = everybody.any(axis=0) & ~everybody.all(axis=0)
    for box in found.sightings[run].wrong[i] * factor:
        _frame(picture, box, WRONG, 1)
    for box, hit in zip(boxes[~apart & ~crowd], mine[~apart & ~crowd], strict=True):
        _frame(picture, box, FOUND if hit else MISSED, 1)
    for box, hit in zip(boxes[apart], mine[apart], strict=True):
        _frame(picture, box, (0, 0, 0), 5)
        _frame(picture, box, FOUND if hit else MISSED, 3)
    return picture


def _frame(picture: NDArray[np.uint8], box: NDArray[np.float64], colour: tuple[int, int, int], width: int) -> None:
    height, across = picture.shape[:2]
    x1, y1, x2, y2 = (
        round(min(max(side, 0), most - 1)) for side, most in zip(box.tolist(), (across, height) * 2, strict=True)
    )
    cv2.rectangle(picture, (x1, y1), (x2, y2), colour, width)
