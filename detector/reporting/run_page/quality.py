"""What the best checkpoint finds: average precision, curves, confusion, calibration, and the classes by difficulty.

Legend: C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from detector.evaluation.calibration import Calibration, compute_calibration
from detector.evaluation.coco import GroundTruth
from detector.evaluation.curves import ConfusionMatrix, Curves
from detector.evaluation.evaluate import Evaluation
from detector.evaluation.mistakes import FALSE, MISPLACED, MISSED, RIGHT, WRONG_CLASS, Verdicts
from detector.reporting.page import escaped, html_table
from detector.reporting.samples import SHOWN_CONFIDENCE
from detector.reporting.svg import BOTTOM, Frame, Series, axes, figure, line_chart

LINES = 12  # classes that have a line of their own
CELLS = 30  # classes up to which the confusion matrix is drawn
PAIRS = 16  # confusions that are told of more classes
ROWS = 200  # classes in the table
EVERY = 5  # of the confidences of a curve one is drawn

SIZES = (
    ("small", "area below 32² pixels", "small", "ar_small"),
    ("medium", "32² to 96²", "medium", "ar_medium"),
    ("large", "above 96²", "large", "ar_large"),
    ("all", "", "map50_95", "ar100"),
)


def by_size(evaluation: Evaluation, truth: GroundTruth) -> str:
    """mAP50-95 and recall by the size of the objects."""
    metrics = evaluation.metrics
    rows = []
    for (name, said, precision, recall), count in zip(SIZES, _objects_by_size(truth), strict=True):
        value, found = getattr(metrics, precision), getattr(metrics, recall)
        rows.append(
            f'<tr><td class="name">{name} <span class="faint">{said}</span></td><td>{count:,}</td>'
            f'<td data-size="{name}" data-value="{value:.6f}">{share(value)}</td><td>{share(found)}</td>'
            f"{_bar(value)}</tr>"
        )
    heads = "<th>objects</th><th>mAP50-95</th><th>AR100</th><th></th>"
    table = f'<table><tr><th class="name">objects by size</th>{heads}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll">{table}</div>'


def _objects_by_size(truth: GroundTruth) -> list[int]:
    boxes = truth.boxes_xyxy[~truth.crowd]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    if truth.areas is not None:
        given = truth.areas[~truth.crowd]
        areas = np.where(np.isnan(given), areas, given)
    small, large = int((areas < 32**2).sum()), int((areas > 96**2).sum())
    return [small, len(areas) - small - large, large, len(areas)]


# --- curves ----------------------------------------------------------------------------------------------------------


def curve_charts(curves: Curves, names: Sequence[str]) -> list[str]:
    """Precision against recall, F1 against confidence; of many classes the mean and the hardest."""
    ap50 = curves.pr_precision.mean(axis=1)
    there = np.flatnonzero(~np.isnan(ap50))
    if not len(there):
        return []
    shown = there if len(there) <= LINES else np.sort(there[np.argsort(ap50[there], kind="stable")][:LINES])
    some = "" if len(shown) == len(there) else f"; mean of {len(there)} classes and the {LINES} hardest"
    every = slice(None, None, EVERY)

    def lines(table: np.ndarray, mean: np.ndarray, said: Sequence[str], mean_said: str) -> list[Series]:
        found = [
            Series(names[c], table[c], k, look="" if len(shown) <= LINES // 2 else "thin", note=said[c])
            for k, c in enumerate(shown.tolist())
        ]
        return [*found, Series("mean", mean, look="strong", note=mean_said)] if len(there) > 1 else found

    mean_pr, mean_f1, best = curves.mean_pr_precision, curves.mean_f1, curves.best
    f1 = curves.f1[:, best]
    return [
        line_chart(
            f"Precision against recall at IoU 0.5 (AP50{some})",
            curves.recall_points,
            lines(curves.pr_precision, mean_pr, [f"{one:.3f}" for one in ap50], f"{mean_pr.mean():.3f}"),
            "recall",
            limits=(0, 1),
        ),
        line_chart(
            f"F1 against confidence (F1 at {curves.best_confidence:.2f}{some})",
            curves.confidence[every],
            lines(curves.f1[:, every], mean_f1[every], [f"{one:.3f}" for one in f1], f"{mean_f1[best]:.3f}"),
            "confidence",
            limits=(0, 1),
            mark=curves.best_confidence,
        ),
    ]


# --- confusion -------------------------------------------------------------------------------------------------------


def confusion_part(confusion: ConfusionMatrix, names: Sequence[str]) -> str:
    """The matrix as a table of colours and numbers; of many classes the confusions that are most frequent."""
    at = f"confidence {confusion.confidence:g}, IoU {confusion.iou:g}"
    labels = [*names, "background"]
    counts, shares = confusion.counts, confusion.by_truth
    if len(names) > CELLS:
        return _most_confused(confusion, labels, at)
    heads = "".join(f'<th class="turned"><span>{escaped(name)}</span></th>' for name in labels)
    rows = []
    for name, row, share_row in zip(labels, counts.tolist(), shares.tolist(), strict=True):
        cells = "".join(
            f'<td style="--p:{part:.3f}" class="{"deep" if part > 0.6 else ""}" '
            f'title="{escaped(f"{name} found as {other}: {count:,}, {part:.0%}")}">{count or ""}</td>'
            for other, count, part in zip(labels, row, share_row, strict=True)
        )
        rows.append(f'<tr><th class="name">{escaped(name)}</th>{cells}</tr>')
    small, whole = " tight" if len(names) > 12 else "", " wholerow" if len(names) > 6 else ""
    return (
        f'<figure class="chart{whole}"><figcaption><b>Confusion</b>'
        f'<span class="faint">rows: truth, columns: found as; {at}; '
        f'colour: share of the row</span></figcaption><div class="scroll"><table class="confusion{small}">'
        f"<tr><th></th>{heads}</tr>{''.join(rows)}</table></div></figure>"
    )


def _most_confused(confusion: ConfusionMatrix, labels: Sequence[str], at: str) -> str:
    counts, shares = confusion.counts.copy(), confusion.by_truth
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:PAIRS]
    rows = [
        (labels[t], labels[f], f"{counts[t, f]:,}", f"{shares[t, f]:.0%}")
        for t, f in zip(*np.unravel_index(order, counts.shape), strict=True)
        if counts[t, f]
    ]
    table = html_table(("truth", "found as", "number", "share of the truth"), rows)
    return f'<figure class="chart"><figcaption><b>Most frequent confusions</b> {at}</figcaption>{table}</figure>'


# --- calibration -----------------------------------------------------------------------------------------------------


def calibration_part(truth: GroundTruth, evaluation: Evaluation) -> str:
    """A reliability diagram, and the expected calibration error of all detections and of those one looks at."""
    every = compute_calibration(truth, evaluation.detections)
    shown = compute_calibration(truth, evaluation.detections, SHOWN_CONFIDENCE)
    if not every.counts.sum():
        return ""
    said = "; ".join(
        f'<span data-ece="{name}" data-value="{one.error:.6f}">{share(one.error)}</span> of {one.counts.sum():,} {text}'
        for name, one, text in (
            ("all", every, "detections"),
            ("shown", shown, f"with confidence {SHOWN_CONFIDENCE:g} or more"),
        )
    )
    caption = f"Expected calibration error {said}. Bars on the line: a confidence is the share that is right."
    return figure("Calibration: precision at IoU 0.5 by confidence", _reliability(every), caption=caption)


def _reliability(one: Calibration) -> str:
    frame = Frame(0, 1, 0, 1)
    width, parts = 1 / len(one.counts), [axes(frame, "confidence")]
    floor = frame.height - BOTTOM
    for k, (count, confidence, precision) in enumerate(
        zip(one.counts.tolist(), one.confidence.tolist(), one.precision.tolist(), strict=True)
    ):
        if not count:
            continue
        left, right, top = frame.x(k * width) + 1.5, frame.x((k + 1) * width) - 1.5, frame.y(precision)
        told = f"{count:,} detections, mean confidence {confidence:.3f}: {precision:.3f} right"
        parts.append(
            f'<g><title>{told}</title><rect class="bin" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{floor - top:.1f}" /><circle class="dot strong" cx="{frame.x(confidence):.1f}" cy="{top:.1f}" '
            'r="3" /></g>'
        )
    ends = f'x1="{frame.x(0):.1f}" y1="{frame.y(0):.1f}" x2="{frame.x(1):.1f}" y2="{frame.y(1):.1f}"'
    parts.append(f'<line class="mark" {ends} />')
    told = "Bars: precision of the detections in each tenth of confidence. Dots: at their mean confidence."
    return f'<svg viewBox="0 0 420 {frame.height}" role="img"><title>{told}</title>{"".join(parts)}</svg>'


# --- classes ---------------------------------------------------------------------------------------------------------


def class_table(evaluation: Evaluation, truth: GroundTruth, verdicts: Verdicts, names: Sequence[str]) -> str:
    """The classes that have true boxes, the hardest first: by mAP50-95, with what becomes of their boxes."""
    ap, ap50 = evaluation.metrics.class_map50_95, evaluation.metrics.class_map50
    there = np.flatnonzero(~np.isnan(ap))
    order = there[np.argsort(ap[there], kind="stable")]
    real = ~truth.crowd
    fates = {
        verdict: np.bincount(truth.classes[real & (verdicts.of_truths == verdict)], minlength=len(names))
        for verdict in (RIGHT, MISPLACED, WRONG_CLASS, MISSED)
    }
    false = np.bincount(verdicts.found.classes[verdicts.of_detections == FALSE], minlength=len(names))
    rows = []
    for c in order[:ROWS].tolist():
        numbers = [f"{evaluation.class_images[c]:,}", f"{evaluation.class_instances[c]:,}", share(ap50[c])]
        numbers += [f"{fates[verdict][c]:,}" for verdict in (RIGHT, MISPLACED, WRONG_CLASS, MISSED)]
        cells = "".join(f"<td>{one}</td>" for one in [*numbers, f"{false[c]:,}"])
        rows.append(
            f'<tr><td class="name">{escaped(names[c])}</td><td data-class="{c}" data-value="{ap[c]:.6f}">'
            f"{share(ap[c])}</td>{_bar(ap[c])}{cells}</tr>"
        )
    heads = ("mAP50-95", "", "images", "boxes", "mAP50", "right", "badly placed", "wrong class", "missed", "false")
    head = "".join(f"<th>{one}</th>" for one in heads)
    more = f'<p class="faint">and {len(order) - ROWS:,} easier classes</p>' if len(order) > ROWS else ""
    table = f'<table><tr><th class="name">class</th>{head}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll">{table}</div>{more}'


def share(value: float) -> str:
    """A value in 0..1, a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def _bar(value: float) -> str:
    filled = 0.0 if math.isnan(value) else value
    return f'<td class="bars"><div class="bar" style="width:{filled:.1%}"></div></td>'
