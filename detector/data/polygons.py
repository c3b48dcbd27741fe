"""Polygons: (P, 2) float64 corners in pixels."""

import numpy as np

Window = tuple[float, float, float, float]  # xyxy


def clipped_polygon(polygon: np.ndarray, window_xyxy: Window) -> np.ndarray:
    """(Q, 2) the part inside a window; Q may be 0. One cut after the other, after Sutherland and Hodgman (1974)."""
    left, top, right, bottom = window_xyxy
    for axis, limit, side in ((0, left, 1), (1, top, 1), (0, right, -1), (1, bottom, -1)):
        polygon = _cut(polygon, axis, limit, side)
    return polygon


def _cut(polygon: np.ndarray, axis: int, limit: float, side: int) -> np.ndarray:
    """What is not below a limit along an axis, or with `side` -1 not above it."""
    if not len(polygon):
        return polygon
    after = np.roll(polygon, -1, axis=0)
    here, there = ((points[:, axis] - limit) * side for points in (polygon, after))
    crosses = (here >= 0) != (there >= 0)
    share = np.divide(here, here - there, out=np.zeros_like(here), where=crosses)
    crossings = polygon + share[:, None] * (after - polygon)
    crossings[:, axis] = limit
    # Of each edge the crossing, then its end, where they are there.
    points = np.stack((crossings, after), axis=1).reshape(-1, 2)
    return points[np.stack((crosses, there >= 0), axis=1).reshape(-1)]


def box_around(polygon: np.ndarray) -> np.ndarray:
    """(4,) xyxy; without area where there is nothing."""
    if not len(polygon):
        return np.zeros(4)
    return np.concatenate((polygon.min(axis=0), polygon.max(axis=0)))


def moved_polygon(polygon: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """(P, 2) under a (3, 3) map of continuous pixels; NaN where a corner is behind the viewer."""
    moved = polygon @ matrix[:, :2].T + matrix[:, 2]
    return moved[:, :2] / moved[:, 2:] if np.all(moved[:, 2] > 0) else np.full((1, 2), np.nan)
