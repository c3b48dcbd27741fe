"""What is noticed about a data set: values, on which verdicts (a run's policy, a report) are passed elsewhere."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """A kind of finding: how bad it is where nothing else is said, and how several of it are told."""

    severity: Severity
    told: str  # after their number: "3 ..."


# An error cannot be trained on as it stands; of a warning something was left out or changed, or a result would not be
# what it seems; a note is worth a look.
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
    # What `detector check` looks for beside; a run tells those of whole classes, too.
    "bad split": Kind("error", "splits cannot be read"),
    "no test": Kind("warning", "splits cannot be read, which no training needs"),
    "missing labels": Kind("error", "splits have too few label files"),
    "nameless class": Kind("error", "classes of labels are not among the names"),
    "ids from 1": Kind("warning", "sets of labels seem to count their classes from 1"),
    "in pixels": Kind("error", "splits have labels in pixels"),
    "as corners": Kind("warning", "splits seem to have corners in place of centre and size"),
    "untrained class": Kind("warning", "classes are looked for and never trained"),
    "damaged image": Kind("warning", "images cannot be decoded to their end and count for nothing"),
    "leaked image": Kind("warning", "images are in another split, too"),
    "leaked scene": Kind("warning", "images show what an image of another split shows"),
    "contradiction": Kind("warning", "images are there twice, with other boxes"),
    "same image": Kind("note", "images are there twice"),
    "same scene": Kind("note", "images are nearly the same as another of their split"),
    "no label": Kind("note", "images have no label file and count as background"),
    "turned image": Kind("note", "images are turned by their EXIF orientation"),
    "tiny box": Kind("note", "boxes have a side of less than 2 pixels"),
    "doubled box": Kind("note", "boxes lie on another of their class"),
    "two classes": Kind("note", "boxes lie on one of another class"),
    "unmeasured class": Kind("note", "classes are trained and not looked for"),
    "empty class": Kind("note", "classes have no box"),
    "alike names": Kind("note", "names of classes differ in case or blanks alone"),
}
SEVERITIES = ("error", "warning", "note")
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


def summaries(findings: Sequence[Finding]) -> tuple[str, ...]:
    """A line for each kind of finding that is not fine."""
    groups = [of_kind(findings, kind) for kind in KINDS if KINDS[kind].severity != "note"]
    return tuple(summary(group) for group in groups if group)


def summary(findings: Sequence[Finding], told: str | None = None) -> str:
    """A line for findings of one kind: how many there are, and the first."""
    return f"{len(findings):,} {told or KINDS[findings[0].kind].told} (first: {findings[0]})"
