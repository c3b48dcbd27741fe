"""What `detector predict` leaves: pictures and videos with boxes, labels, tables, and what is in the boxes."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from detector.drawing import in_colours, save_image
from detector.errors import ConfigError
from detector.files import unfinished, writing
from detector.inference.results import COLUMNS, Result
from detector.inference.sources import Origin
from detector.reporting.video_file import VideoFile


class Wanted(NamedTuple):
    """Which files are written."""

    save: bool = True  # images and videos with the boxes drawn
    save_txt: bool = False
    save_json: bool = False
    save_csv: bool = False
    save_crop: bool = False


class Names:
    """Names of files, of which no two of a call are the same; some file systems do not tell a.jpg from A.jpg."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._numbered: set[str] = set()  # whose frames have names of their own, NAME_000123

    def of(self, origin: Origin) -> str:
        """The name of a file without its ending, or what it comes from; with _2, _3, ... where it is taken."""
        stem = origin.title or (origin.path.stem if origin.path else "")
        stem = stem or re.sub(r"\W+", "_", origin.name).strip("_") or "image"
        name = next(one for one in chain([stem], (f"{stem}_{number}" for number in count(2))) if self._is_free(one))
        self._taken.add(name.casefold())
        if origin.kind != "image":
            self._numbered.add(name.casefold())
        return name

    def _is_free(self, name: str) -> bool:
        name = name.casefold()
        base, _, number = name.rpartition("_")
        return name not in self._taken and not (number.isdecimal() and len(number) >= 6 and base in self._numbered)


class ResultFiles:
    """The files of the results of one call, written one by one; complete, whatever comes, once it is closed.

    create: makes the folder, when there is something to write. Raises ConfigError where that holds the images
    themselves, OutputError where it cannot be written to.
    """

    def __init__(self, create: Callable[[], Path], wanted: Wanted) -> None:
        self._create, self._wanted = create, wanted
        self._names = Names()
        self._origin: Origin | None = None
        self._name = ""
        self._video: VideoFile | None = None
        self._tables: list[Table] = []
        self.folder: Path | None = None

    def keep(self, result: Result) -> None:
        """Write what is wanted of a result."""
        if not any(self._wanted):
            return
        if self.folder is None:
            self.folder = self._create()
            with writing(self.folder):
                self._open_tables()
        if result.path is not None and self.folder.samefile(result.path.parent):
            raise ConfigError(
                f"{self.folder}: pictures would be written among the images themselves; choose another name="
            )
        with writing(self.folder):
            if result.origin is not self._origin:
                self._begin(result.origin)
            name = self._name if result.frame is None else f"{self._name}_{result.frame:06d}"
            self._keep(result, name)

    def close(self) -> None:
        """Finish the video and the tables."""
        with writing(self.folder or Path()):
            self._end_video()
            while self._tables:
                self._tables.pop().close()

    def _begin(self, origin: Origin) -> None:
        assert self.folder is not None
        self._end_video()
        self._origin, self._name = origin, self._names.of(origin)
        labels = self.folder / "labels"  # of an earlier call that wrote into this folder
        (labels / f"{self._name}.txt").unlink(missing_ok=True)
        if origin.kind != "image":
            for file in labels.glob(f"{glob.escape(self._name)}_[0-9][0-9][0-9][0-9][0-9][0-9]*.txt"):
                file.unlink()
        if origin.moves and self._wanted.save:
            self._video = VideoFile(self.folder / f"{self._name}.mp4", origin.rate)

    def _keep(self, result: Result, name: str) -> None:
        assert self.folder is not None
        if self._video is not None:
            self._video.write(result.plot(), result.time)
        elif self._wanted.save:
            save_image(self.folder / f"{name}.jpg", result.plot())
        if self._wanted.save_txt:
            (self.folder / "labels").mkdir(exist_ok=True)
            (self.folder / "labels" / f"{name}.txt").write_text(label_text(result), encoding="utf-8")
        if self._wanted.save_crop:
            for number, (crop, label) in enumerate(zip(result.crops(), result.class_names, strict=True), 1):
                save_image(self.folder / "crops" / file_name(label) / f"{name}_{number}.jpg", in_colours(crop))
        for table in self._tables:
            table.add(result, name)

    def _open_tables(self) -> None:
        assert self.folder is not None
        for kind, wanted in ((JsonTable, self._wanted.save_json), (CsvTable, self._wanted.save_csv)):
            path = self.folder / kind.name
            path.unlink(missing_ok=True)
            if wanted:
                self._tables.append(kind(path))

    def _end_video(self) -> None:
        if self._video is not None:
            video, self._video = self._video, None
            video.close()


class Table:
    """A file that rows are added to, and that takes its place when it is closed."""

    name = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO = unfinished(path).open("w", encoding="utf-8", newline="")
        self.begin()

    def begin(self) -> None:
        """Write what comes before the rows."""

    def add(self, result: Result, name: str) -> None:
        """Write the rows of a result."""
        raise NotImplementedError

    def end(self) -> None:
        """Write what comes after the rows."""

    def close(self) -> None:
        with self.file:
            self.end()
        os.replace(unfinished(self.path), self.path)


class JsonTable(Table):
    """Detections as COCO's tools read them; images go by their names, classes by their numbers."""

    name = "detections.json"
    _first = True

    def begin(self) -> None:
        self.file.write("[")

    def add(self, result: Result, name: str) -> None:
        for row in coco_rows(result, name):
            self.file.write(("\n" if self._first else ",\n") + json.dumps(row))
            self._first = False

    def end(self) -> None:
        self.file.write("\n]\n")


class CsvTable(Table):
    """A row a detection, for a spreadsheet."""

    name = "detections.csv"

    def begin(self) -> None:
        self.writer = csv.DictWriter(self.file, ("image", "frame", "time", *COLUMNS, "track"), restval="")
        self.writer.writeheader()

    def add(self, result: Result, name: str) -> None:
        of = {"image": result.path or result.origin.name, "frame": result.frame}
        time = None if result.time is None else round(result.time, 3)
        self.writer.writerows({**of, "time": time, **row} for row in result.to_dicts())


def coco_rows(result: Result, name: str) -> list[dict[str, Any]]:
    """COCO results, with the number of the track where there is one."""
    rows = []
    for row in result.to_dicts():
        found = coco_row(name, row["class"], [row[side] for side in ("x1", "y1", "x2", "y2")], row["score"])
        rows.append({**found, "track_id": row["track"]} if "track" in row else found)
    return rows


def coco_row(image: Any, category: Any, xyxy: Sequence[float], score: float) -> dict[str, Any]:
    """A detection as COCO's tools read it: its box as corner and size in pixels of the original image."""
    left, top, right, bottom = xyxy
    bbox = [round(value, 3) for value in (left, top, right - left, bottom - top)]
    return {"image_id": image, "category_id": category, "bbox": bbox, "score": round(score, 5)}


def label_text(result: Result) -> str:
    """Lines of `class x y w h score`, as fractions of the image, and the number of the track where there is one."""
    tracks = [""] * len(result) if result.track_ids is None else [f" {track}" for track in result.track_ids.tolist()]
    return "".join(
        f"{label} {x:.6f} {y:.6f} {w:.6f} {h:.6f} {score:.4f}{track}\n"
        for label, (x, y, w, h), score, track in zip(
            result.classes.tolist(), result.boxes_xywhn.tolist(), result.scores.tolist(), tracks, strict=True
        )
    )


def file_name(text: str) -> str:
    """A class name as a folder's: what some system takes for a separator or refuses is a _."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', "_", text).strip(". ") or "_"
