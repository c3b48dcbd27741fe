"""What many wrong YOLO rows have in common: classes counted from 1, pixels, corners in place of centre and size."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from detector.data.findings import Finding, of_kind
from detector.data.index import Index

MOST = 0.9  # share of a split's rows that is nearly all of them
IN_PIXELS = 2.0  # a coordinate above it is no fraction that was rounded or annotated carelessly
FEWEST = 20  # rows from which their form is judged
REACHING = 0.25  # share of boxes outside their image at which the form is doubted

Row = list[float]  # the numbers of a line of a label file


def conventions(indices: Mapping[str, Index], description: Path) -> list[tuple[str, Finding]]:
    """(split, finding) for what is the matter with whole splits; with the classes of all of them the split is ""."""
    wrong = {split: list(_rows(of_kind(index.findings, "bad row"))) for split, index in indices.items()}
    rows = [row for several in wrong.values() for _, row in several]
    found = [("", finding) for finding in _classes(list(indices.values()), rows, description)]
    for split, index in indices.items():
        form = _pixels(index, wrong[split]) or _corners(index)
        if form:
            found.append((split, form))
    return found


def ids_from_one(indices: Sequence[Index], description: Path, beyond: int = 0) -> list[Finding]:
    """A finding where the labels seem to count classes from 1: no box has class 0, and all others have some.

    beyond: rows whose class is one more than the last.
    """
    names = indices[0].names
    used = set(np.unique(np.concatenate([index.classes for index in indices])).tolist())
    if 0 in used or not (beyond or (len(names) > 1 and used == set(range(1, len(names))))):
        return []
    text = f"no label has class 0 ({names[0]}), "
    text += f"and {beyond:,} have class {len(names)}" if beyond else "and all other classes have some"
    return [Finding("ids from 1", str(description), f"{text}: if they count from 1, subtract 1 from each")]


def _classes(indices: Sequence[Index], wrong: Sequence[Row], description: Path) -> list[Finding]:
    count = len(indices[0].names)
    outside = Counter(int(row[0]) for row in wrong if row[0].is_integer() and not 0 <= row[0] < count)
    found = [
        Finding("nameless class", str(description), f"labels of class {number}: {rows:,}; `names` ends at {count - 1}")
        for number, rows in sorted(outside.items())
    ]  # fmt: skip
    if any(row[0] == 0 for row in wrong):
        return found
    return found + ids_from_one(indices, description, outside[count])


def _pixels(index: Index, wrong: Sequence[tuple[Finding, Row]]) -> Finding | None:
    """A finding at the first row in pixels, where nearly all of the split are."""
    large = [(finding, max(row[1:], default=0)) for finding, row in wrong if max(row[1:], default=0) > IN_PIXELS]
    total = len(index.classes) + len(wrong)
    if not large or len(large) < MOST * total:
        return None
    first = large[0][0]
    text = (
        f"{len(large):,} of {total:,} labels have numbers up to {max(value for _, value in large):g}: they are in "
        "pixels; divide x and width by the image's width, y and height by its height"
    )
    return Finding("in pixels", first.place, text, first.image)


def _corners(index: Index) -> Finding | None:
    """A finding at the first box that reaches outside its image, where x1 y1 x2 y2 would explain all of them."""
    reaching = of_kind(index.findings, "clipped box", "outside box")
    written = [(finding, row[1:]) for finding, row in _rows(reaching) if len(row) == 5]
    clipped = {(finding.image, finding.row) for finding in reaching}
    if len(written) < max(REACHING * (len(index.classes) + len(reaching)), 1):
        return None
    inside = [
        box
        for i, row, box in zip(index.image_of_box.tolist(), index.rows.tolist(), index.boxes_xywh, strict=True)
        if (index.place(i), row) not in clipped
    ]
    table = np.array([*(row for _, row in written), *inside], dtype=np.float64).reshape(-1, 4)
    if len(table) < FEWEST or not (table[:, 2:] > table[:, :2]).all():
        return None
    first = written[0][0]
    text = (
        f"{len(written):,} of {len(table):,} boxes reach outside their image, and in all the third number is larger "
        "than the first and the fourth than the second, as in x1 y1 x2 y2; write centre and size"
    )
    return Finding("as corners", first.place, text, first.image)


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[Finding, Row]]:
    """The numbers of the rows that findings are about; those that are no numbers are left out."""
    files = defaultdict(list)
    for finding in findings:
        files[finding.place.rpartition(":")[0]].append(finding)
    for file, several in files.items():
        try:
            lines = Path(file).read_text(encoding="utf-8-sig", errors="replace").splitlines()
        except OSError:  # it has gone meanwhile
            continue
        for finding in several:
            words = lines[finding.row - 1].split() if finding.row <= len(lines) else []
            try:
                row = [float(word) for word in words]
            except ValueError:
                continue
            if row and all(map(math.isfinite, row)):
                yield finding, row
