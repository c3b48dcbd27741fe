"""Plots of a run and of an evaluation, written as PNG or whatever the path's suffix says.

matplotlib is imported when the first plot is made, and only its object interface is used: no pyplot, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from detector.drawing import class_colour
from detector.evaluation.curves import ConfusionMatrix, Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#262a30"
FAINT = "#9aa0a8"
RULE = "#e4e6e9"
ACCENT = "#2a7ae2"
SECOND = "#e63946"
LOSS_COLOURS = ("#2a7ae2", "#ff9f1c", "#2ea05a", "#8e44c8", "#00b0be")
MOST_LINES_NAMED = 12  # classes beyond which curves are drawn faint and without names
MOST_CELLS_WRITTEN = 20  # classes beyond which the confusion matrix shows colours only
DPI = 140

Row = Mapping[str, Any]


def plot_history(rows: Sequence[Row], path: str | Path, losses: Sequence[str] = ("box", "cls", "dfl")) -> None:
    """The run so far: training losses, mAP50-95 and mAP50 with the best of each marked, learning rate.

    `rows` are those of metrics.csv, one per epoch; read are `epoch`, the `losses`, `mAP50-95`, `mAP50` and keys that
    begin with `lr`. A value that is missing, empty or NaN (an epoch without validation) is passed over.
    """
    figure = _figure(12, 3.9)
    loss_axes, map_axes, rate_axes = figure.subplots(1, 3)

    for name, colour in zip(losses, LOSS_COLOURS, strict=False):
        epochs, values = _series(rows, name)
        if len(values):
            loss_axes.plot(epochs, values, color=colour, linewidth=1.8, label=name, **_dot(values))
    _finish(loss_axes, "training loss", "epoch")

    for name, colour in (("mAP50-95", ACCENT), ("mAP50", FAINT)):
        epochs, values = _series(rows, name)
        if not len(values):
            continue
        best = int(np.argmax(values))
        label = f"{name}  {values[best]:.3f} at {epochs[best]:g}"
        map_axes.plot(epochs, values, color=colour, linewidth=1.8, label=label, **_dot(values))
        map_axes.plot(epochs[best], values[best], "o", color=colour, markersize=7, markeredgecolor="white", zorder=5)
    map_axes.set_ylim(0, 1.02)
    _finish(map_axes, "validation (best marked)", "epoch", legend="best")

    for name, colour in zip(_keys_from(rows, "lr"), LOSS_COLOURS, strict=False):
        epochs, values = _series(rows, name)
        if len(values):
            rate_axes.plot(epochs, values, color=colour, linewidth=1.8, label=name, **_dot(values))
    rate_axes.set_ylim(bottom=0)
    rate_axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _finish(rate_axes, "learning rate", "epoch")
    for axes in (loss_axes, map_axes, rate_axes):
        axes.xaxis.get_major_locator().set_params(integer=True)
    _save(figure, path)


def plot_pr(curves: Curves, names: Sequence[str], path: str | Path) -> None:
    """Precision against recall at IoU 0.5, per class and in the mean; the area under a curve is its AP50."""
    ap50 = curves.pr_precision.mean(axis=1)
    mean = curves.mean_pr_precision
    figure, axes = _curve_axes()
    _class_lines(
        axes, curves.recall_points, curves.pr_precision, mean, names,
        lambda c: f"{ap50[c]:.3f}", f"{mean.mean():.3f}",
    )  # fmt: skip
    axes.set_ylabel("precision", color=INK)
    _finish(axes, "precision against recall at IoU 0.5 (legend: AP50)", "recall", legend="outside")
    _save(figure, path)


def plot_f1(curves: Curves, names: Sequence[str], path: str | Path) -> None:
    """F1 against confidence at IoU 0.5, per class and in the mean, with the best confidence marked."""
    mean = curves.mean_f1
    figure, axes = _curve_axes()
    _class_lines(
        axes, curves.confidence, curves.f1, mean, names,
        lambda c: f"{curves.f1[c, curves.best]:.3f}", f"{mean[curves.best]:.3f}",
    )  # fmt: skip
    if not math.isnan(mean[curves.best]):
        axes.axvline(curves.best_confidence, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.plot(curves.best_confidence, mean[curves.best], "o", color=INK, markersize=7, markeredgecolor="white")
    axes.set_ylabel("F1", color=INK)
    title = f"F1 against confidence at IoU 0.5 (legend: F1 at {curves.best_confidence:.2f})"
    _finish(axes, title, "confidence", legend="outside")
    _save(figure, path)


def plot_confusion(confusion: ConfusionMatrix, names: Sequence[str], path: str | Path) -> None:
    """What true boxes were detected as: colour is the share of the row, the number is the count."""
    share, counts = confusion.by_truth, confusion.counts
    classes = len(names)
    labels = [*names, "background"]
    written = classes <= MOST_CELLS_WRITTEN
    side = min(15.0, max(4.6, 2.4 + (0.55 if written else 0.14) * (classes + 1)))
    figure = _figure(side + 0.7, side)
    axes = figure.add_subplot()
    picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="equal")
    text_size = 9 if written else 6.5
    axes.set_xticks(range(classes + 1), labels, rotation=90 if classes > 4 else 0, fontsize=text_size)
    axes.set_yticks(range(classes + 1), labels, fontsize=text_size)
    axes.hlines(classes - 0.5, -0.5, classes + 0.5, color=FAINT, linewidth=0.8)
    axes.vlines(classes - 0.5, -0.5, classes + 0.5, color=FAINT, linewidth=0.8)
    for row, column in zip(*np.nonzero(counts), strict=True) if written else ():
        colour = "white" if share[row, column] > 0.55 else INK
        axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour, fontsize=8.5)
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("detected as", color=INK)
    axes.set_ylabel("truth", color=INK)
    title = f"confusion at confidence {confusion.confidence:g}, IoU {confusion.iou:g}"
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=10)
    bar = figure.colorbar(picture, ax=axes, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    bar.set_label("share of the row", color=INK, fontsize=9)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    """An empty figure in inches; a Figure of its own saves through Agg without touching pyplot or a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    return figure


def _save(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _curve_axes() -> tuple[Figure, Axes]:
    """A plot of the unit square."""
    figure = _figure(8.2, 5)
    axes = figure.add_subplot()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    return figure, axes


def _class_lines(
    axes: Axes,
    x: NDArray[np.float64],
    table: NDArray[np.float64],
    mean: NDArray[np.float64],
    names: Sequence[str],
    value: Callable[[int], str],
    mean_value: str,
) -> None:
    """One line per class with ground truth and a strong one for the mean; many classes are drawn faint, unnamed."""
    classes = np.flatnonzero(~np.isnan(table).all(axis=1))
    many = len(classes) > MOST_LINES_NAMED
    for c in classes:
        red, green, blue = class_colour(int(c))
        axes.plot(
            x,
            table[c],
            color=(red / 255, green / 255, blue / 255),
            alpha=0.28 if many else 0.9,
            linewidth=0.9 if many else 1.5,
            label=None if many else f"{names[c]}  {value(int(c))}",
        )
    if len(classes) > 1:
        label = f"mean of {len(classes)} classes  {mean_value}"
        axes.plot(x, mean, color=INK, linewidth=2.6, label=label)


def _finish(axes: Axes, title: str, x_label: str, legend: str = "upper right") -> None:
    """The common look: quiet frame, fine horizontal rules, title to the left."""
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=10)
    axes.set_xlabel(x_label, color=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if legend == "outside" else {"loc": legend}
        axes.legend(frameon=legend == "best", framealpha=0.8, edgecolor="none", fontsize=9, labelcolor=INK, **place)


def _dot(values: NDArray[np.float64]) -> dict[str, Any]:
    """A marker where a line of one point would not be seen."""
    return {"marker": "o", "markersize": 5} if len(values) == 1 else {}


def _series(rows: Sequence[Row], key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Epochs and values of a column where it has a value."""
    points = [(float(row["epoch"]), float(row[key])) for row in rows if row.get(key) not in (None, "")]
    finite = np.array([point for point in points if math.isfinite(point[1])], dtype=np.float64).reshape(-1, 2)
    return finite[:, 0], finite[:, 1]


def _keys_from(rows: Sequence[Row], prefix: str) -> list[str]:
    """Keys that begin with a prefix, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row if key.startswith(prefix)))
