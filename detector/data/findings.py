"""What is noticed about a data set: values, on which verdicts (a run's policy, a report) are passed elsewhere."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """A kind of finding: how bad it is where nothing else is said, and how several of it are told."""

    severity: Severity
    told: str  # after their number: "3 ..."


# An error cannot be trained on as it stands; of a warning something was left out or changed; a note is worth a look.
KINDS = {
    "bad row": Kind("error", "labels break a rule"),
    "bad file": Kind("error", "label files cannot be read"),
    "no image": Kind("warning", "annotated images are not there and were left out"),
    "unreadable image": Kind("warning", "unreadable images were left out"),
    "listed twice": Kind("warning", "images are listed more than once and count once"),
    "flat box": Kind("warning", "boxes without width or height were dropped"),
    "repeated box": Kind("warning", "rows that repeat another were dropped"),
    "outside box": Kind("warning", "boxes lie outside their image and were dropped"),
    "clipped box": Kind("warning", "boxes reach outside their image and were clipped"),
    "dropped box": Kind("warning", "boxes reach outside their image and were dropped"),
    "dropped row": Kind("warning", "rows break a rule and were dropped"),
    "dropped image": Kind("warning", "images were left out for what is wrong with their labels"),
    "other size": Kind("warning", "images are not of the size that their annotation says"),
    "no picture": Kind("warning", "label files belong to no image"),
}
OF_BOXES = ("bad row", "flat box", "outside box", "clipped box")  # what `bad_boxes` is about


class Finding(NamedTuple):
    """One thing that was noticed."""

    kind: str  # of KINDS
    place: str  # file, or file:line
    text: str = ""  # what is wrong there, and what to do; nothing where the kind says it all
    image: str = ""  # the path of the image concerned, if it is one
    row: int = 0  # the line or object in its annotation, from 1; 0: the whole of it

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind].severity

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place


def of_kind(findings: Iterable[Finding], *kinds: str) -> list[Finding]:
    return [finding for finding in findings if finding.kind in kinds]


def summary(findings: Sequence[Finding], told: str | None = None) -> str:
    """A line for findings of one kind: how many there are, and the first."""
    return f"{len(findings):,} {told or KINDS[findings[0].kind].told} (first: {findings[0]})"
