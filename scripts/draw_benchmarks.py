"""Draw the picture of docs/benchmarks.md from the raw numbers in docs/benchmarks/ratios.csv.

    python scripts/draw_benchmarks.py [docs/images/ratios.png]

A line of the file is what was measured, here and by the public trainer, and whether more of it is better.
"""

import csv
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from detector.reporting.plots import ACCENT, DPI, FAINT, INK, RULE

DOCS = Path(__file__).resolve().parent.parent / "docs"


def ratios() -> dict[str, float]:
    """By what was measured, how many times as fast as the public trainer."""
    with (DOCS / "benchmarks" / "ratios.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["what"], float(row["here"]), float(row["there"]), row["better"]) for row in csv.DictReader(file)]
    return {what: here / there if better == "more" else there / here for what, here, there, better in rows}


def draw(axes: Axes, found: dict[str, float]) -> None:
    """A bar a measurement, the first on top."""
    for height, ratio in enumerate(reversed(found.values())):
        axes.barh(height, ratio, color=ACCENT, height=0.62)
        axes.text(ratio + 0.03, height, f"{ratio:.1f} x", va="center", color=INK, fontsize=9)
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_yticks(range(len(found)), list(found)[::-1], fontsize=9)
    axes.set_title("times as fast as the public trainer", loc="left", fontsize=10, color=INK)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)


def main() -> None:
    found = ratios()
    figure = Figure(figsize=(8, 0.42 * len(found) + 1), layout="constrained")
    draw(figure.subplots(), found)
    figure.savefig(sys.argv[1] if len(sys.argv) > 1 else DOCS / "images" / "ratios.png", dpi=DPI)


if __name__ == "__main__":
    main()
