"""The images to look at: the worst and the best, the truth beside what was found, and what is wrong in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from detector.data.dataset import ValidationSet
from detector.drawing import draw_boxes
from detector.errors import DataError
from detector.evaluation.coco import GroundTruth
from detector.evaluation.matching import Flat
from detector.evaluation.mistakes import EXCUSED, FALSE, MISPLACED, MISSED, RIGHT, WRONG_CLASS, Verdicts
from detector.reporting.page import escaped, html_picture

WORST, BEST = 32, 8  # images that are shown
SIDE = 480  # pixels of a picture's long side
BYTES = 39_000  # of a picture at most: 80 of them, in text of four letters for three bytes, are under 5 MB
TOLD = 6  # mistakes under a picture

COLOURS = {
    RIGHT: (52, 168, 83),
    MISSED: (230, 57, 70),
    FALSE: (255, 159, 28),
    MISPLACED: (176, 96, 240),
    WRONG_CLASS: (42, 122, 226),
    EXCUSED: (140, 146, 154),
}
NAMES = {
    RIGHT: "right", MISSED: "missed", FALSE: "false", MISPLACED: "badly placed", WRONG_CLASS: "wrong class",
    EXCUSED: "not judged",
}  # fmt: skip


def pictures(images: ValidationSet, truth: GroundTruth, verdicts: Verdicts, names: Sequence[str]) -> list[str]:
    """The worst images and the best ones, as figures."""
    worst = verdicts.worst(WORST)
    best = verdicts.best(BEST, worst)
    if not worst and not best:
        return ["<p>There is nothing to find, and nothing was found.</p>"]
    legend = "".join(
        f'<span class="key" style="--c: rgb{COLOURS[verdict]}">{NAMES[verdict]}</span>'
        for verdict in (RIGHT, MISSED, FALSE, MISPLACED, WRONG_CLASS)
    )
    body = [
        f'<p class="faint">Of each pair first the truth, then what was found with confidence '
        f"{verdicts.confidence:.3f} or more. "
        f'<span class="keys">{legend}</span></p>'
    ]
    for title, chosen in (("The worst", worst), ("The best", best)):
        figures = "".join(_figure(i, images, truth, verdicts, names) for i in chosen)
        if figures:
            body.append(f'<h3>{title} {len(chosen)}</h3><div class="pairs">{figures}</div>')
    return body


def _figure(i: int, images: ValidationSet, truth: GroundTruth, verdicts: Verdicts, names: Sequence[str]) -> str:
    counts = verdicts.counts[i]
    told = _told(i, truth, verdicts, names)
    right = f"{counts[RIGHT]} right, {verdicts.mistakes[i]} wrong"
    caption = f'<b>{right}</b> <span class="path">{escaped(images.index.path(i).name)}</span>'
    if told:
        caption += f"<br />{escaped('; '.join(told))}"
    shown = _pair(i, images, truth, verdicts, names)
    return f'<figure class="pair" data-image="{i}"><div>{shown}</div><figcaption>{caption}</figcaption></figure>'


def _told(i: int, truth: GroundTruth, verdicts: Verdicts, names: Sequence[str]) -> list[str]:
    """What is wrong in an image, the gravest first; alike mistakes together."""
    first, last = truth.offsets[i : i + 2].tolist()
    missed = truth.classes[first:last][verdicts.of_truths[first:last] == MISSED]
    found, said = verdicts.found, Counter[str]()
    for c in missed.tolist():
        said[f"missed {names[c]}"] += 1
    for verdict in (WRONG_CLASS, MISPLACED, FALSE):
        for k in _rows(found, i):
            if verdicts.of_detections[k] == verdict:
                name = names[found.classes[k]]
                if verdict == WRONG_CLASS:
                    name = f"{names[truth.classes[verdicts.partners[k]]]} found as {name}"
                said[name if verdict == WRONG_CLASS else f"{NAMES[verdict]} {name}"] += 1
    lines = [text + (f" x {number}" if number > 1 else "") for text, number in said.items()]
    return lines[:TOLD] + ([f"and {len(lines) - TOLD} more kinds"] if len(lines) > TOLD else [])


def _rows(found: Flat, i: int) -> range:
    """The detections of an image."""
    return range(int(found.offsets[i]), int(found.offsets[i + 1]))


def _pair(i: int, images: ValidationSet, truth: GroundTruth, verdicts: Verdicts, names: Sequence[str]) -> str:
    """The image twice, with its boxes in the colours of their verdicts; words where it cannot be decoded."""
    try:
        image = images.index.image(i)
    except (DataError, MemoryError):
        return '<div class="none">no picture</div>'
    first, last = truth.offsets[i : i + 2].tolist()
    rows = slice(*verdicts.found.offsets[i : i + 2].tolist())
    found = verdicts.found
    sides = (
        ("truth", truth.boxes_xyxy[first:last], truth.classes[first:last], verdicts.of_truths[first:last], None),
        ("found", found.boxes_xyxy[rows], found.classes[rows], verdicts.of_detections[rows], found.scores[rows]),
    )
    return "".join(
        html_picture(*_small(_drawn(image, boxes, classes, fates, scores, names)), f'title="{side}"')
        for side, boxes, classes, fates, scores in sides
    )


def _drawn(
    image: NDArray[np.uint8],
    boxes: NDArray[np.float64],
    classes: NDArray[np.int64],
    fates: NDArray[np.int64],
    scores: NDArray[np.float64] | None,
    names: Sequence[str],
) -> NDArray[np.uint8]:
    """A small picture with its boxes; mistakes come first, for whose labels there is room then."""
    order = np.argsort(fates == RIGHT, kind="stable")
    colours = [COLOURS[fate] for fate in fates[order].tolist()]
    chosen = None if scores is None else scores[order]
    return draw_boxes(image, boxes[order], classes[order], names, chosen, long_side=SIDE, colours=colours)


def _small(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], str, list[int]]:
    """A picture as JPEG of at most BYTES: of less quality where it must be, and of fewer pixels where that is not
    enough. Returns pixels, suffix and flags."""
    while True:
        for quality in (82, 70, 55, 40):
            flags = [cv2.IMWRITE_JPEG_QUALITY, quality]
            done, data = cv2.imencode(".jpg", np.ascontiguousarray(rgb[..., ::-1]), flags)
            assert done
            if len(data) <= BYTES or max(rgb.shape[:2]) < 64:
                return rgb, ".jpg", flags
        rgb = cv2.resize(rgb, None, fx=0.7, fy=0.7, interpolation=cv2.INTER_AREA)
