"""Draw the pictures of docs/benchmarks.md from the raw numbers in docs/benchmarks/.

    python scripts/draw_benchmarks.py

ratios.csv: what was measured, here and by the public trainer in the same hour, and whether more is better. curve.csv:
two runs, epoch by epoch: seconds since the command, the box loss and mAP50-95. Both pictures go into docs/images.
"""

import csv
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from detector.reporting.plots import ACCENT, DPI, FAINT, INK, RULE

DOCS = Path(__file__).resolve().parent.parent / "docs"
HERE, THERE = "detector", "public trainer"


def rows(name: str) -> list[dict[str, str]]:
    with (DOCS / "benchmarks" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def draw_ratios(axes: Axes) -> None:
    """How many times as fast as the public trainer, a bar for each line of ratios.csv, the first on top."""
    found = rows("ratios.csv")[::-1]
    for height, row in enumerate(found):
        here, there = float(row["here"]), float(row["there"])
        ratio = here / there if row["better"] == "more" else there / here
        axes.barh(height, ratio, color=ACCENT, height=0.62)
        axes.text(ratio + 0.03, height, f"{ratio:.1f} x", va="center", color=INK, fontsize=9)
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_yticks(range(len(found)), [row["what"] for row in found], fontsize=9)
    axes.set_title(f"times as fast as the {THERE}", loc="left", fontsize=10, color=INK)
    axes.margins(x=0.12)


def draw_curves(loss: Axes, quality: Axes) -> None:
    """Box loss and mAP50-95 against the seconds since the command."""
    found = rows("curve.csv")
    for trainer, name, colour in (("here", HERE, ACCENT), ("there", THERE, FAINT)):
        run = [row for row in found if row["trainer"] == trainer]
        seconds = [float(row["seconds"]) for row in run]
        loss.plot(seconds, [float(row["box"]) for row in run], color=colour, linewidth=1.8, label=name)
        quality.plot(seconds, [float(row["mAP50-95"]) for row in run], color=colour, linewidth=1.8, label=name)
    for axes, title in ((loss, "box loss"), (quality, "mAP50-95 on the validation images")):
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.set_xlabel("seconds", fontsize=9)
        axes.legend(frameon=False, fontsize=9)


def tidied(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)


def main() -> None:
    bars = Figure(figsize=(8, 0.42 * len(rows("ratios.csv")) + 1), layout="constrained")
    draw_ratios(axes := bars.subplots())
    tidied(axes)
    bars.savefig(DOCS / "images" / "ratios.png", dpi=DPI)

    curves = Figure(figsize=(10, 3.6), layout="constrained")
    both = curves.subplots(1, 2)
    draw_curves(*both)
    for axes in both:
        tidied(axes)
    curves.savefig(DOCS / "images" / "curve.png", dpi=DPI)


if __name__ == "__main__":
    main()
