"""Objects followed through a video, by the trackers package: each keeps a number from frame to frame.

Zhang et al., "ByteTrack: multi-object tracking by associating every detection box" (2022).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from detector.errors import ConfigError
from detector.inference.results import Result
from detector.inference.sources.frame import Origin

Tracking = Literal["bytetrack"] | None

INSTALL = "pip install trackers"
LOW = 0.1  # the least score of a box that can continue a track, as in the paper
RATE = 30.0  # images a second where nothing tells


def check_tracker(track: object) -> None:
    """Raise ConfigError unless objects can be tracked so here."""
    if track is None:
        return
    if track != "bytetrack":
        raise ConfigError(f"track={track!r}: should be 'bytetrack', or left out")
    if importlib.util.find_spec("trackers") is None:
        raise ConfigError(f"track=bytetrack: the trackers package does it; `{INSTALL}`")


def tracked(results: Iterator[Result], conf: float) -> Iterator[Result]:
    """The results with `track_ids`; -1 has what was not seen twice yet.

    They come with boxes down to LOW: one below `conf` stays where it continues a track, which is what ByteTrack is for,
    and goes otherwise. Each video has tracks of its own; single images are taken for one sequence.
    """
    tracker = None
    last: Origin | None = None
    for result in results:
        one_sequence = last is not None and last.kind == result.origin.kind == "image"
        if last is not result.origin and not one_sequence:
            tracker = _tracker(result.origin, conf)
        last = result.origin
        yield _followed(result, tracker, conf)


def _tracker(origin: Origin, conf: float) -> Any:
    kind = importlib.import_module("trackers").ByteTrackTracker
    return kind(frame_rate=origin.rate or RATE, track_activation_threshold=conf, high_conf_det_threshold=conf)


def _followed(result: Result, tracker: Any, conf: float) -> Result:
    detections = result.to_supervision()
    detections.data = {"number": np.arange(len(result))}
    found = tracker.update(detections)
    ids = np.full(len(result), -1, dtype=np.int64)
    if len(found):
        ids[found.data["number"]] = found.tracker_id
    kept = (result.scores >= conf) | (ids >= 0)
    return replace(
        result,
        boxes=result.boxes[kept],
        scores=result.scores[kept],
        classes=result.classes[kept],
        track_ids=ids[kept],
    )
