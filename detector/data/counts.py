"""What there is in a split, in numbers: images and boxes, their sizes, their classes, and where boxes lie."""

from dataclasses import dataclass

import numpy as np

from detector.data.index import Index

# Sides in pixels; the last bin has no end. COCO's small, medium and large part at 32 and 96.
SMALL, LARGE = 32, 96
BOX_EDGES = (0, 2, 4, 8, 16, SMALL, 64, LARGE, 192, 384, 768)
IMAGE_EDGES = (0, 160, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120)
CELLS = 64  # of the map, along each side


@dataclass(frozen=True, eq=False)
class Counts:
    """Of a split with n images and m boxes, crowds and difficult objects apart; C classes."""

    images: int
    unlabelled: int  # have no label file
    background: int  # have no box, whatever the reason
    boxes: int
    ignored: int
    class_boxes: np.ndarray  # (C,)
    class_images: np.ndarray  # (C,) images with at least one box of it
    image_sides: np.ndarray  # (n,) the longer side of each image, pixels
    box_sides: np.ndarray  # (m,) root of each box's area, pixels at imgsz
    most_boxes: int  # in one image
    common_size: tuple[int, int, int]  # (height, width) that most images have, and how many these are
    coverage: np.ndarray  # (CELLS, CELLS) how many boxes lie over each place of an image

    @property
    def by_size(self) -> tuple[int, int, int]:
        """Boxes that are small, medium and large by COCO's limits, at imgsz."""
        small, large = int((self.box_sides < SMALL).sum()), int((self.box_sides >= LARGE).sum())
        return small, self.boxes - small - large, large


def count(index: Index, imgsz: int) -> Counts:
    """The numbers of a split whose images' long side is resized to imgsz."""
    learnt = ~index.ignored_boxes
    owner, classes = index.image_of_box[learnt], index.classes[learnt]
    per_image = np.bincount(owner, minlength=len(index))
    classes_of_images = np.unique(owner * len(index.names) + classes) % len(index.names)
    sizes, images_of_size = np.unique(np.stack((index.heights, index.widths)), axis=1, return_counts=True)
    common = int(images_of_size.argmax())
    sides = box_sides(index, imgsz)[learnt]
    return Counts(
        images=len(index),
        unlabelled=int((~index.labelled).sum()),
        background=int((np.diff(index.box_offsets) == 0).sum()),
        boxes=len(classes),
        ignored=int(index.ignored_boxes.sum()),
        class_boxes=np.bincount(classes, minlength=len(index.names)),
        class_images=np.bincount(classes_of_images, minlength=len(index.names)),
        image_sides=np.maximum(index.heights, index.widths),
        box_sides=np.sqrt(sides.prod(axis=1)),
        most_boxes=int(per_image.max(initial=0)),
        common_size=(*sizes[:, common].tolist(), int(images_of_size[common])),
        coverage=_coverage(index.boxes_xywh[learnt]),
    )


def box_sides(index: Index, imgsz: int) -> np.ndarray:
    """(m, 2) width and height of all boxes, pixels once the long side of their image is imgsz."""
    size = np.stack((index.widths, index.heights), axis=1)
    scaled = size * (imgsz / size.max(axis=1, keepdims=True, initial=1))
    return index.boxes_xywh[:, 2:] * scaled[index.image_of_box]


def histogram(sides: np.ndarray, edges: tuple[int, ...]) -> np.ndarray:
    """(bins,) how many sides lie in each bin; the last one has no end."""
    return np.bincount(np.searchsorted(edges, sides, side="right") - 1, minlength=len(edges))


def _coverage(boxes_xywh: np.ndarray) -> np.ndarray:
    """(CELLS, CELLS) how many boxes lie over each cell of an image: the sums of what begins and ends there."""
    half = boxes_xywh[:, 2:] / 2
    low = np.floor((boxes_xywh[:, :2] - half) * CELLS).clip(0, CELLS - 1).astype(np.int64)
    high = np.ceil((boxes_xywh[:, :2] + half) * CELLS).astype(np.int64).clip(low + 1, CELLS)
    edges = np.zeros((CELLS + 1, CELLS + 1), dtype=np.int64)
    for y, x, sign in ((low, low, 1), (low, high, -1), (high, low, -1), (high, high, 1)):
        np.add.at(edges, (y[:, 1], x[:, 0]), sign)
    return edges.cumsum(axis=0).cumsum(axis=1)[:CELLS, :CELLS]
