"""The doctor's report as one HTML page that needs nothing beside it: no script, no other file, no network."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import cv2
import numpy as np

from detector.data.counts import BOX_EDGES, IMAGE_EDGES, histogram
from detector.data.doctor import Examination, Noticed
from detector.data.findings import KINDS, Finding
from detector.data.index import Index
from detector.data.pixels import decoded
from detector.drawing import draw_boxes
from detector.errors import DataError
from detector.reporting.data_report import by_kind, verdict, without
from detector.reporting.page import escaped, html_page, html_picture, html_table

WORST = 16  # images that are shown
LISTED = 100  # findings of a kind
OF_NOTES = 4  # of these, for one kind of note
TOLD = 4  # findings under a picture
SIDE = 480  # pixels of a picture's long side
QUALITY = 80  # of JPEG
MAP = 256  # pixels of a map of boxes

STYLE = """
.worst figure { width: 21rem; } .worst img { max-width: 100%; max-height: 21rem; }
.none { height: 8rem; background: var(--line); display: grid; place-items: center; }
.map { border: 1px solid var(--line); }
"""


def page(found: Examination) -> str:
    """The whole page, well-formed also as XML."""
    description = found.description
    body = [
        f"<h1>{escaped(description.path.name)}</h1>",
        f'<p><span class="path">{escaped(str(description.path))}</span><br />{escaped(description.format)}, '
        f"{len(description.names)} classes; sizes at imgsz {found.imgsz}<br /><b>{escaped(verdict(found))}</b></p>",
        "<h2>Splits</h2>",
        _splits(found),
        "<h2>What was found</h2>",
        *(_kind(kind, several, found) for kind, several in by_kind(found.findings)),
        *([] if found.findings else ["<p>Nothing.</p>"]),
        *_worst(found),
        "<h2>Boxes of each class</h2>",
        _classes(found),
        f"<h2>Sizes of boxes: root of the area, pixels at imgsz {found.imgsz}</h2>",
        _charts({split: histogram(one.box_sides, BOX_EDGES) for split, one in found.counts.items()}, BOX_EDGES),
        "<h2>Sizes of images: longer side, pixels</h2>",
        _charts({split: histogram(one.image_sides, IMAGE_EDGES) for split, one in found.counts.items()}, IMAGE_EDGES),
        "<h2>Where boxes lie</h2>",
        f'<div class="row">{"".join(_map(split, one.coverage) for split, one in found.counts.items())}</div>',
    ]
    return html_page(f"{description.path.name}: data check", body, STYLE)


def _splits(found: Examination) -> str:
    heads = ("split", "images", "background", "no label file", "boxes", "ignored", "small", "medium", "large")
    rows = []
    for split, one in found.counts.items():
        sizes = [f"{number / max(one.boxes, 1):.0%}" for number in one.by_size]
        numbers = (one.images, one.background, one.unlabelled, one.boxes, one.ignored)
        rows.append((split, *(f"{number:,}" for number in numbers), *sizes))
    return html_table(heads, rows)


def _kind(kind: str, several: Sequence[Noticed], found: Examination) -> str:
    severity, told = KINDS[kind]
    rows = [f"<li>{_located(split, finding, found)}</li>" for split, finding in several[:LISTED]]
    if len(several) > LISTED:
        rows.append(f"<li>and {len(several) - LISTED:,} more: report.json has all</li>")
    opened = ' open="open"' if severity == "error" else ""
    return (
        f'<details{opened}><summary><span class="mark {severity}">{severity}</span>{escaped(told)}: '
        f"<b>{len(several):,}</b></summary><ul>{''.join(rows)}</ul></details>"
    )


def _located(split: str, finding: Finding, found: Examination) -> str:
    root = str(found.description.root)
    place = without(finding.place, root)
    text = f": {escaped(without(finding.text, root))}" if finding.text else ""
    return f'<span class="path">{escaped(place)}</span>{text}' + (f" [{split}]" if split else "")


# --- pictures --------------------------------------------------------------------------------------------------------


def worst_images(findings: Sequence[Noticed], most: int = WORST) -> list[tuple[str, str, list[Finding]]]:
    """(split, path, what was found there) of the images with the worst findings, each kind in its turn.

    Within a kind come the images with most findings; sixteen of one kind would say no more than one.
    """
    of_image: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for split, finding in findings:
        if finding.image:
            of_image[split, finding.image].append(finding)
    queues = []
    for kind, several in by_kind(findings):
        numbers = Counter((split, finding.image) for split, finding in several if finding.image)
        queues.append([image for image, _ in numbers.most_common(OF_NOTES if KINDS[kind].severity == "note" else most)])
    chosen: dict[tuple[str, str], None] = {}
    while any(queues) and len(chosen) < most:
        for queue in queues:
            while queue and queue[0] in chosen:
                queue.pop(0)
            if queue and len(chosen) < most:
                chosen[queue.pop(0)] = None
    return [(split, path, of_image[split, path]) for split, path in chosen]


def _worst(found: Examination) -> list[str]:
    chosen = worst_images(found.findings)
    if not chosen:
        return []
    numbers = {split: {index.place(i): i for i in range(len(index))} for split, index in found.indices.items()}
    figures, root = [], str(found.description.root)
    for split, path, findings in chosen:
        i = numbers.get(split, {}).get(path)
        picture = '<div class="none">no picture</div>'
        if i is not None:
            picture = _picture(found.indices[split], i, findings) or picture
        told = [without(_told(finding), root) for finding in findings[:TOLD]]
        if len(findings) > TOLD:
            told.append(f"and {len(findings) - TOLD} more")
        name = without(path, root)
        figures.append(
            f'<figure>{picture}<figcaption><span class="path">{escaped(name)}</span><br />{escaped("; ".join(told))}'
            "</figcaption></figure>"
        )
    return [
        "<h2>The images to look at first</h2>",
        "<p>Boxes as they are read; those with a finding have a black and yellow frame.</p>",
        f'<div class="row worst">{"".join(figures)}</div>',
    ]


def _told(finding: Finding) -> str:
    """A finding under its picture, which says where it is."""
    return (
        finding.kind + (f", row {finding.row}" if finding.row else "") + (f": {finding.text}" if finding.text else "")
    )


def _picture(index: Index, i: int, findings: Sequence[Finding]) -> str:
    """The image with its boxes, as HTML; nothing where it cannot be decoded."""
    try:
        image = decoded(index, i)
    except (DataError, MemoryError):
        return ""
    if image.shape[2] != 3:  # a picture of other channels is shown by their mean
        image = np.repeat(image.mean(axis=2, keepdims=True).astype(np.uint8), 3, axis=2)
    factor = SIDE / max(image.shape[:2])
    boxes = index.boxes_xyxy(i)
    picture = draw_boxes(image, boxes, index.labels(i), index.names, long_side=SIDE)
    rows = index.rows[index.box_offsets[i] : index.box_offsets[i + 1]]
    bad = np.isin(rows, [finding.row for finding in findings if finding.row])
    for left, top, right, bottom in (boxes[bad] * factor).tolist():
        corners = (round(left) - 4, round(top) - 4), (round(right) + 3, round(bottom) + 3)
        for colour, width in (((0, 0, 0), 5), ((255, 230, 0), 2)):
            cv2.rectangle(picture, *corners, colour, width)
    return html_picture(picture, ".jpg", [cv2.IMWRITE_JPEG_QUALITY, QUALITY])


def _map(split: str, coverage: np.ndarray) -> str:
    """How many boxes lie over each part of an image, from white to dark blue."""
    share = coverage / max(coverage.max(), 1)
    low, high = np.array((255, 255, 255)), np.array((8, 48, 107))
    rgb = (low + (high - low) * share[..., None] ** 0.7).round().astype(np.uint8)
    rgb = cv2.resize(rgb, (MAP, MAP), interpolation=cv2.INTER_LINEAR)
    picture = html_picture(rgb, ".png", attributes='class="map"')
    caption = f"{split}: at most {int(coverage.max()):,} boxes at one place"
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


# --- charts ----------------------------------------------------------------------------------------------------------


def _classes(found: Examination) -> str:
    """A row a class: its boxes in each split, and a bar for each, as a share of the split's largest class."""
    counts = found.counts
    heads = "".join(f"<th>{split}</th>" for split in counts)
    rows = []
    for number, name in enumerate(found.description.names):
        cells = "".join(f"<td>{one.class_boxes[number]:,}</td>" for one in counts.values())
        shares = [one.class_boxes[number] / max(one.class_boxes.max(), 1) for one in counts.values()]
        bars = "".join(f'<div class="bar" style="width:{share:.1%};opacity:{1 - 0.3 * k:.1f}"></div>'
                       for k, share in enumerate(shares))  # fmt: skip
        rows.append(f'<tr><td class="name">{number} {escaped(name)}</td>{cells}<td class="bars">{bars}</td></tr>')
    return f'<table><tr><th class="name">class</th>{heads}<th></th></tr>{"".join(rows)}</table>'


def _charts(tables: Mapping[str, np.ndarray], edges: Sequence[int]) -> str:
    return f'<div class="row">{"".join(_chart(split, table, edges) for split, table in tables.items())}</div>'


def _chart(title: str, numbers: np.ndarray, edges: Sequence[int], width: int = 340, height: int = 150) -> str:
    """Bars of a histogram, with the lower edge of each under it and its number over it."""
    step, most = width / len(edges), max(int(numbers.max()), 1)
    parts = []
    for k, (number, edge) in enumerate(zip(numbers.tolist(), edges, strict=True)):
        tall = number / most * (height - 40)
        left, top = k * step, height - 20 - tall
        bar = f'x="{left + 1:.1f}" y="{top:.1f}" width="{step - 2:.1f}" height="{tall:.1f}"'
        parts.append(f'<rect {bar} fill="#2a7ae2" /><text x="{left:.1f}" y="{height - 6}">{edge}</text>')
        if number:
            place = f'x="{left + step / 2:.1f}" y="{top - 3:.1f}"'
            parts.append(f'<text {place} text-anchor="middle">{_brief(number)}</text>')
    drawn = f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'
    return f"<figure>{drawn}<figcaption>{escaped(title)}</figcaption></figure>"


def _brief(number: int) -> str:
    """1234 as 1.2k: bars are narrow."""
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2g}{letter}" if number < 100 * limit else f"{number / limit:.0f}{letter}"
    return str(number)
