"""Small charts as SVG within a page of HTML: readable without a script, with values to hover where there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from detector.reporting.page import escaped

WIDTH, HEIGHT = 420, 240  # of a chart, in its own units; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # around what is drawn
COLOURS = 12  # of series; a page has them as --s0 to --s11, for light and dark
POINTS = 400  # of a line; longer ones are thinned

STYLE = """
:root { --s0: #2a7ae2; --s1: #d97a00; --s2: #23894b; --s3: #8e44c8; --s4: #d62f3f; --s5: #00869a; --s6: #c9418f;
  --s7: #6d8600; --s8: #8a5a33; --s9: #5a6ef0; --s10: #b8860b; --s11: #4b7f7f; }
@media (prefers-color-scheme: dark) { :root { --s0: #5b9bf0; --s1: #ffab40; --s2: #4fc07a; --s3: #bd90ec;
  --s4: #ff6b76; --s5: #3cc8d4; --s6: #f07cc0; --s7: #a9c940; --s8: #cf9d70; --s9: #93a0ff; --s10: #e0b94a;
  --s11: #84baba; } }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1.4rem 1.6rem; }
.chart svg { width: 100%; height: auto; display: block; overflow: visible; touch-action: pan-y; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: 0 .9rem; align-items: baseline; margin-bottom: .2rem; }
.chart figcaption b { font-size: .92rem; font-weight: 600; } .key { white-space: nowrap; color: var(--faint); }
.key::before { content: ""; display: inline-block; width: .9rem; height: 3px; border-radius: 2px; margin-right: .35rem;
  vertical-align: middle; background: var(--c); }
.chart text { font-size: 12px; fill: var(--faint); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--faint); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.strong { stroke: var(--ink); stroke-width: 2.6; } .strong.key, .strong { --c: var(--ink); }
.thin { stroke-width: 1.1; opacity: .8; } .band { fill: var(--c); opacity: .17; } .dot { fill: var(--c); }
.mark { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 4 3; }
.cursor { stroke: var(--ink); stroke-width: 1; opacity: 0; }
#tip { position: fixed; z-index: 9; pointer-events: none; background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; padding: .35rem .6rem; font-size: .8rem; box-shadow: 0 3px 14px #0003; display: none;
  max-width: 20rem; font-variant-numeric: tabular-nums; }
#tip div { display: flex; gap: 1rem; justify-content: space-between; } #tip .key { overflow: hidden; }
"""

# Well-formed also as XML: no less-than sign and no ampersand. Names are set as text, never as HTML.
SCRIPT = """
(() => {
  const tip = document.createElement('div'); tip.id = 'tip'; document.body.append(tip);
  const row = (name, value, colour) => {
    const [line, key, said] = ['div', 'span', 'b'].map(kind => document.createElement(kind));
    key.textContent = name; said.textContent = value;
    if (colour) { key.className = 'key'; key.style.setProperty('--c', colour); }
    line.append(key, said); return line;
  };
  for (const plot of document.querySelectorAll('svg.plot')) {
    const at = plot.dataset.at.split(' ').map(Number), said = plot.dataset.said.split('|');
    const lines = [...plot.querySelectorAll('[data-y]')].map(one => [one, one.dataset.y.split(' ')]);
    const cursor = plot.querySelector('.cursor');
    plot.setAttribute('aria-label', plot.querySelector('title').textContent);
    plot.querySelectorAll('title').forEach(one => one.remove());  // or a second box would open over the first
    const hide = () => { tip.style.display = 'none'; cursor.style.opacity = 0; };
    plot.addEventListener('pointerleave', hide);
    plot.addEventListener('pointermove', event => {
      const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH;
      let near = 0;
      at.forEach((one, i) => { if (Math.abs(at[near] - x) > Math.abs(one - x)) near = i; });
      cursor.setAttribute('x1', at[near]); cursor.setAttribute('x2', at[near]); cursor.style.opacity = .5;
      tip.replaceChildren(row(plot.dataset.axis, said[near]));
      for (const [line, values] of lines)
        if (values[near] !== '-')
          tip.append(row(line.dataset.name, values[near], getComputedStyle(line).getPropertyValue('--c')));
      tip.style.display = 'block';
      const left = event.clientX + 16, room = innerWidth - tip.offsetWidth - 8;
      tip.style.left = Math.max(4, left > room ? event.clientX - tip.offsetWidth - 16 : left) + 'px';
      tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)) + 'px';
    });
  }
})();
""".replace("WIDTH", str(WIDTH))


@dataclass(frozen=True)
class Series:
    """A line of a chart. `y` is (P,), NaN where there is no value; `low` and `high` of a band around it, if there."""

    name: str
    y: NDArray[np.float64]
    colour: int = 0
    low: NDArray[np.float64] | None = None
    high: NDArray[np.float64] | None = None
    look: str = ""  # strong or thin
    note: str = ""  # what stands beside the name above the chart


class Frame(NamedTuple):
    """Where values lie in a chart: the limits of its axes, of which y may be logarithmic."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool = False
    whole: bool = False  # whether x counts something
    height: int = HEIGHT

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high, value = (math.log10(one) if self.log else one for one in (self.y0, self.y1, value))
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)


def line_chart(
    title: str,
    x: NDArray[np.float64],
    series: Sequence[Series],
    axis: str,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    mark: float | None = None,
    said: Sequence[str] | None = None,
) -> str:
    """Lines over (P,) ascending x, as a figure; nothing where no line has a value.

    axis: what x is. limits: of y. mark: an x that is marked. said: what the points are called, in place of their x.
    """
    series = [one for one in series if np.isfinite(one.y).any()]
    if not series:
        return ""
    frame = _frame(x, series, log, limits)
    parts = [axes(frame, axis)]
    if mark is not None:
        parts.append(f'<line class="mark" x1="{frame.x(mark):.1f}" x2="{frame.x(mark):.1f}" {_down(frame)} />')
    parts += [_band(frame, x, one) for one in series] + [_line(frame, x, one) for one in series]
    parts.append(f'<line class="cursor" x1="0" x2="0" {_down(frame)} />')
    at = " ".join(f"{frame.x(one):.1f}" for one in x.tolist())
    names = "|".join(said if said is not None else map(brief, x.tolist())).replace('"', "")
    told = f"{title}. " + "; ".join(_told(one) for one in series)
    svg = (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-axis="{escaped(axis)}" data-at="{at}" '
        f'data-said="{escaped(names)}"><title>{escaped(told)}</title>{"".join(parts)}</svg>'
    )
    return figure(title, svg, series)


def figure(title: str, svg: str, series: Sequence[Series] = (), caption: str = "") -> str:
    """A drawing under its title and, where there are several, the names of its lines; over a caption of HTML."""
    keys = "".join(
        f'<span class="key {one.look}" style="{_colour(one)}">{escaped(f"{one.name} {one.note}".rstrip())}</span>'
        for one in series
        if len(series) > 1 or one.note
    )
    below = f'<p class="faint">{caption}</p>' if caption else ""
    return f'<figure class="chart"><figcaption><b>{escaped(title)}</b>{keys}</figcaption>{svg}{below}</figure>'


def axes(frame: Frame, axis: str) -> str:
    """Fine lines at round values of y, with their numbers, and numbers along x."""
    parts = []
    for value in decades(frame.y0, frame.y1) if frame.log else ticks(frame.y0, frame.y1, 5):
        y = f"{frame.y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" />')
        parts.append(f'<text x="{LEFT - 6}" y="{frame.y(value) + 4:.1f}" text-anchor="end">{brief(value)}</text>')
    floor = frame.height - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}" />')
    for value in ticks(frame.x0, frame.x1, 5):
        if frame.whole and value != round(value):
            continue
        parts.append(f'<text x="{frame.x(value):.1f}" y="{floor + 15}" text-anchor="middle">{brief(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{frame.height - 4}" text-anchor="middle">{escaped(axis)}</text>')
    return "".join(parts)


def thinned(x: NDArray[np.float64], y: NDArray[np.float64], name: str, colour: int, most: int = POINTS) -> Series:
    """A line through the means of runs of neighbouring points, in a band from their least to their largest.

    Where there are no more than `most` points, the line through them.
    """
    if len(x) <= most:
        return Series(name, y, colour)
    parts = [part[np.isfinite(part)] for part in np.array_split(y, most)]
    mean, low, high = (
        np.array([reduce(part) if len(part) else math.nan for part in parts]) for reduce in (np.mean, np.min, np.max)
    )
    return Series(name, mean, colour, low, high)


def thinned_x(x: NDArray[np.float64], most: int = POINTS) -> tuple[NDArray[np.float64], list[str]]:
    """The middles of the runs of `thinned`, and what they are called."""
    if len(x) <= most:
        return x, [f"{one:g}" for one in x.tolist()]
    parts = np.array_split(x, most)
    return np.array([part.mean() for part in parts]), [f"{part[0]:.0f} to {part[-1]:.0f}" for part in parts]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values between two, about so many."""
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = power * next(one for one in (1, 2, 5, 10) if one * power >= raw * 0.8)
    return [round(number * step, 12) for number in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """The powers of ten between two positive values; where there are few, 2 and 5 times them, too."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = -(-len(powers) // 6)
    for factors in ((1,), (1, 2, 5)):
        found = [f * 10.0**power for power in powers if power % every == 0 for f in factors]
        found = [one for one in found if low <= one * 1.0001 and one <= high * 1.0001]
        if len(found) > 2:
            break
    return found


def brief(value: float) -> str:
    """A number in few letters: 12500 as 12.5k, 0.00012 as 1.2e-4."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.4g}{letter}"
    if size >= 1e-3:
        return f"{value:.4g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _frame(x: NDArray[np.float64], series: Sequence[Series], log: bool, limits: tuple[float, float] | None) -> Frame:
    parts = [part for one in series for part in (one.y, one.low, one.high) if part is not None]
    values = np.concatenate(parts)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = limits or (float(values.min(initial=math.inf)), float(values.max(initial=-math.inf)))
    if not low <= high:  # on a log axis, where nothing is positive
        low, high = 0.1, 1.0
    if log:
        low, high = (low / 1.2, high * 1.2) if low < high else (low / 3, high * 3)
        low = max(low, high * 1e-12)
    elif limits is None:
        low = min(low, 0.0) if low < 0.5 * high else low
        room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        low, high = (low - room if low else 0.0), high + room
    first, last = float(x.min()), float(x.max())
    if first == last:
        first, last = first - 1, last + 1
    return Frame(first, last, low, high, log, bool((x == x.round()).all()))


def _points(frame: Frame, x: NDArray[np.float64], y: NDArray[np.float64]) -> list[list[str]]:
    """The stretches of a line without a gap, as points of the drawing."""
    stretches: list[list[str]] = [[]]
    for one, value in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(value) and (value > 0 or not frame.log):
            stretches[-1].append(f"{frame.x(one):.1f},{min(max(frame.y(value), -99), 999):.1f}")
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _line(frame: Frame, x: NDArray[np.float64], one: Series) -> str:
    parts = []
    for stretch in _points(frame, x, one.y):
        if len(stretch) == 1:  # which a line would not show
            left, _, top = stretch[0].partition(",")
            parts.append(f'<circle class="dot" cx="{left}" cy="{top}" r="3.2" />')
        else:
            parts.append(f'<polyline class="line {one.look}" points="{" ".join(stretch)}" />')
    values = " ".join(brief(value) if math.isfinite(value) else "-" for value in one.y.tolist())
    name = escaped(one.name)
    return (
        f'<g class="{one.look}" style="{_colour(one)}" data-name="{name}" data-y="{values}">'
        f"<title>{escaped(_told(one))}</title>{''.join(parts)}</g>"
    )


def _band(frame: Frame, x: NDArray[np.float64], one: Series) -> str:
    if one.low is None or one.high is None:
        return ""
    there = np.isfinite(one.low) & np.isfinite(one.high) & ((one.low > 0) | (not frame.log))
    above, below = (
        [point for stretch in _points(frame, x[there], y[there]) for point in stretch] for y in (one.high, one.low)
    )
    return f'<polygon class="band" style="{_colour(one)}" points="{" ".join([*above, *below[::-1]])}" />'


def _colour(one: Series) -> str:
    return "" if one.look == "strong" else f"--c: var(--s{one.colour % COLOURS})"


def _told(one: Series) -> str:
    """A line in words."""
    values = one.y[np.isfinite(one.y)]
    first, last, least, most = map(brief, (values[0], values[-1], values.min(), values.max()))
    return f"{one.name}: {first} to {last}, least {least}, most {most}"


def _down(frame: Frame) -> str:
    return f'y1="{TOP}" y2="{frame.height - BOTTOM}"'
