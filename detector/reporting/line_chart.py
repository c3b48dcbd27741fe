"""Charts of a page, as SVG that takes the page's colours and width: no script, no picture file."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from detector.reporting.page import escaped

WIDTH, HEIGHT = 340, 210  # of a chart's own units
LEFT, RIGHT, TOP, BOTTOM = 38, 8, 10, 34  # margins
STEPS = (1, 2, 2.5, 5, 10)


class Series(NamedTuple):
    """A line: its points with finite values, its colour, and the point to mark, if there is one."""

    points: Sequence[tuple[float, float]]
    colour: str
    marked: int | None = None


def line_chart(title: str, series: Sequence[Series], x_title: str = "epoch") -> str:
    """Lines over a common pair of axes. Series without points are left out; at least one has some."""
    points = [point for one in series for point in one.points]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), whole=True)
    y_ticks = ticks(min(0.0, min(y for _, y in points)), max(y for _, y in points))
    x_low, x_high = min(x for x, _ in points), max(max(x for x, _ in points), x_ticks[-1])
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x_of(x: float) -> float:
        return LEFT + (x - x_low) / max(x_high - x_low, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (1 - (y - y_low) / max(y_high - y_low, 1e-9)) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" />')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escaped(x_title)}</text>')
    for one in series:
        places = [(x_of(x), y_of(y)) for x, y in one.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{one.colour}" stroke-width="2" />')
        marked = 0 if len(places) == 1 else one.marked
        if marked is not None:
            x, y = places[marked]
            parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{one.colour}" />')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(title)}"'
    return f'<figure class="chart"><figcaption>{escaped(title)}</figcaption><svg {box}>{"".join(parts)}</svg></figure>'


def ticks(low: float, high: float, whole: bool = False, most: int = 5) -> list[float]:
    """Round numbers that span a range of finite numbers, about `most` of them; with `whole` whole ones inside it."""
    span = max(high - low, 1.0) if whole else high - low or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * power for step in STEPS if step * power * most >= span * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
        first, last = math.ceil(low / step), math.floor(high / step)
        return [number * step for number in range(first, last + 1)] or [low]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


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
