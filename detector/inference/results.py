"""What was found in an image, and the forms that other programs take it in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import ConfigError
from detector.inference.sources.frame import Origin

if TYPE_CHECKING:
    import pandas
    import supervision

UNKNOWN = Origin("an array", "image")
COLUMNS = ("class", "name", "score", "x1", "y1", "x2", "y2")  # of a detection in `to_dicts`, then track if tracked


@dataclass(frozen=True)
class Result:
    """The detections in one image, best first."""

    boxes: NDArray[np.float32]  # (N, 4) x1, y1, x2, y2 in the image's own pixels
    scores: NDArray[np.float32]  # (N,)
    classes: NDArray[np.int64]  # (N,)
    names: tuple[str, ...]  # of all classes
    path: Path | None  # of the image's or video's file; None for what comes from elsewhere
    image: NDArray[np.uint8]  # (H, W, 3) RGB, or as many channels as the network takes
    frame: int | None = None  # its number in a video, a stream or a file of pages, from 0
    time: float | None = None  # seconds since a video's first frame, or since a stream began
    track_ids: NDArray[np.int64] | None = None  # (N,) where objects are tracked; -1: none yet
    origin: Origin = field(default=UNKNOWN, repr=False)  # what results of one video have in common

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the image, pixels."""
        return self.image.shape[0], self.image.shape[1]

    @property
    def boxes_xyxy(self) -> NDArray[np.float32]:
        """(N, 4) corners in pixels: `boxes`."""
        return self.boxes

    @property
    def boxes_xywh(self) -> NDArray[np.float32]:
        """(N, 4) centre x, centre y, width, height in pixels."""
        low, high = self.boxes[:, :2], self.boxes[:, 2:]
        return np.concatenate(((low + high) / 2, high - low), axis=1)

    @property
    def boxes_xyxyn(self) -> NDArray[np.float32]:
        """(N, 4) corners as fractions of the image's width and height."""
        return self.boxes / self._sides

    @property
    def boxes_xywhn(self) -> NDArray[np.float32]:
        """(N, 4) centre x, centre y, width, height as fractions of the image's width and height: as in YOLO labels."""
        return self.boxes_xywh / self._sides

    @property
    def class_names(self) -> list[str]:
        """The name of each detection's class."""
        return [self.names[label] for label in self.classes.tolist()]

    @property
    def _sides(self) -> NDArray[np.float32]:
        height, width = self.size
        return np.array((width, height, width, height), np.float32)

    def summary(self) -> str:
        """For example '3 dog, 1 cat', or 'nothing'."""
        counts = np.bincount(self.classes, minlength=len(self.names))
        return (
            ", ".join(f"{count} {name}" for name, count in zip(self.names, counts, strict=True) if count) or "nothing"
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict a detection of plain numbers and texts: class, name, score, x1, y1, x2, y2, and track if tracked."""
        rows = []
        for number, (box, label, score) in enumerate(
            zip(self.boxes.tolist(), self.classes.tolist(), self.scores.tolist(), strict=True)
        ):
            row = {"class": label, "name": self.names[label], "score": round(score, 5)}
            row.update(zip(("x1", "y1", "x2", "y2"), (round(side, 3) for side in box), strict=True))
            if self.track_ids is not None:
                row["track"] = int(self.track_ids[number])
            rows.append(row)
        return rows

    def to_json(self) -> str:
        """A JSON object: path, frame, time, height and width of the image, and `detections` as `to_dicts` has them."""
        height, width = self.size
        head = {"path": None if self.path is None else str(self.path), "frame": self.frame, "time": self.time}
        return json.dumps({**head, "height": height, "width": width, "detections": self.to_dicts()})

    def to_pandas(self) -> pandas.DataFrame:
        """A table with a row a detection. Raises ConfigError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas needs pandas; `pip install pandas`, or use to_dicts()") from None
        columns = [*COLUMNS, *(["track"] if self.track_ids is not None else [])]
        return pandas.DataFrame(self.to_dicts(), columns=columns)

    def to_supervision(self) -> supervision.Detections:
        """Detections of the supervision package. Raises ConfigError where that is not installed."""
        try:
            import supervision
        except ImportError:
            raise ConfigError("to_supervision needs supervision; `pip install supervision`") from None
        return supervision.Detections(
            xyxy=self.boxes.astype(np.float32),
            confidence=self.scores.astype(np.float32),
            class_id=self.classes.astype(int),
            tracker_id=None if self.track_ids is None else self.track_ids.astype(int),
            data={"class_name": np.array(self.class_names, dtype=object)},
        )

    def plot(self) -> NDArray[np.uint8]:
        """(H, W, 3) RGB: a copy of the image with its boxes; a small image is enlarged so that text can be read."""
        from detector.drawing import draw_boxes

        return draw_boxes(self.image, self.boxes, self.classes, self.names, self.scores, ids=self.track_ids)

    def crops(self) -> Iterator[NDArray[np.uint8]]:
        """What is in each box, (h, w, C): the pixels that it touches, and at least one."""
        height, width = self.size
        for x1, y1, x2, y2 in self.boxes.tolist():
            left, top = min(int(x1), width - 1), min(int(y1), height - 1)
            right, bottom = max(left + 1, int(np.ceil(x2))), max(top + 1, int(np.ceil(y2)))
            yield self.image[top:bottom, left:right].copy()
