"""What a network finds in an image that it looks at in tiles: for prediction and for validation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detector.inference.infer import Limits, Runtime, find_objects, within_memory
from detector.inference.tiles import Tile, cut_by, merged, taken_of_whole, tiles_of
from detector.model.selection import Detections

OVERLAP = 0.2  # where none is asked for


class Slicing(NamedTuple):
    """How images are looked at in tiles."""

    side: int  # pixels of the image
    overlap: float  # the part of it that neighbours share, at least
    imgsz: int  # side of the network's input, which each tile is letterboxed to
    batch: int  # tiles that the network looks at at once
    rect: bool = True  # whether a tile is padded no further than the stride asks, see `letterbox`


def slicing_by(side: int, overlap: float | None, imgsz: int, batch: int, rect: bool = True) -> Slicing:
    """The slicing of a user's tile= and overlap=, which may be left out."""
    return Slicing(int(side), OVERLAP if overlap is None else overlap, imgsz, batch, rect)


def find_in_tiles(
    runtime: Runtime, image: NDArray[np.uint8], slicing: Slicing, limits: Limits, most: int | None = None
) -> tuple[Detections, int | None]:
    """The detections in an (H, W, C) image, best first and in its pixels; `most` is that of `within_memory`.

    An image that one tile holds is looked at as without tiles.
    """
    height, width = image.shape[:2]
    tiles = tiles_of(height, width, slicing.side, slicing.overlap)
    if len(tiles) == 1:
        (found,), most = _in_group(runtime, image, tiles, slicing, limits, most)
        return found, most
    parts, whole = tiles[:-1], tiles[-1:]
    boxes, scores, classes, cut = [], [], [], []
    for group in [*(parts[start : start + slicing.batch] for start in range(0, len(parts), slicing.batch)), whole]:
        found, most = _in_group(runtime, image, group, slicing, limits, most)
        for tile, one in zip(group, found, strict=True):
            moved = one.boxes_xyxy.numpy() + np.array((tile.left, tile.top) * 2, np.float32)
            counts = taken_of_whole(moved, slicing.side, slicing.overlap) if group is whole else np.s_[:]
            boxes.append(moved[counts])
            scores.append(one.scores.numpy()[counts])
            classes.append(one.classes.numpy()[counts])
            cut.append(cut_by(moved, tile, height, width)[counts])
    together = [np.concatenate(rows) for rows in (boxes, scores, classes, cut)]
    kept = merged(*together, limits.iou, limits.max_det)
    return Detections(*(torch.from_numpy(rows[kept]) for rows in together[:3])), most


def _in_group(
    runtime: Runtime, image: NDArray[np.uint8], group: list[Tile], slicing: Slicing, limits: Limits, most: int | None
) -> tuple[list[Detections], int | None]:
    """What is in tiles of one shape, in their own pixels."""
    from detector.data.image import letterbox

    looks = [
        letterbox(image[top:bottom, left:right], slicing.imgsz, runtime.stride, slicing.rect)
        for left, top, right, bottom in group
    ]
    images = torch.from_numpy(np.stack([look for look, _ in looks]))
    placements = [place for _, place in looks]
    return within_memory(lambda part: find_objects(runtime, images[part], placements[part], limits), len(group), most)
