"""Synthetic scenes: circles, squares, triangles and stars over cluttered backgrounds, drawn on first use.

A scene depends on (seed, split, number) alone. Only whole numbers reach the drawing (OpenCV's fixed-point coordinates
with `SHIFT` fractional bits), so that every machine draws the same pixels.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.random import Generator

from detector.data.description import DataDescription
from detector.errors import DataError
from detector.rng import Purpose, generator

NAMES = ("circle", "square", "triangle", "star")
RECORD = "generated.json"  # the parameters that a folder was drawn with
VERSION = 1  # of the drawing; a new one draws old folders anew
SHIFT = 4  # fractional bits of coordinates
ONE = 1 << SHIFT
SPLITS = ("train", "val")
MAX_HIDDEN = 0.4  # share of a shape that others may cover
MIN_SIZE = 64  # pixels, of an image


class Shape(NamedTuple):
    """Something to be drawn."""

    label: int  # its class
    outline: np.ndarray  # (P, 2) int32 corners in 1 / ONE pixels; for a circle (2, 2): its centre and (radius, 0)
    colour: tuple[int, int, int]
    edge: tuple[int, int, int] | None  # colour of its contour, if it has one


class Scene(NamedTuple):
    """A drawn image and its labels."""

    image: np.ndarray  # (size, size, 3) uint8 RGB
    boxes_xyxy: np.ndarray  # (N, 4) int64 pixels, tight around each whole shape, as if nothing covered it
    classes: np.ndarray  # (N,) int64


def draw_scene(size: int, seed: int, split: int, number: int) -> Scene:
    """Scene `number` of a split (0 train, 1 val), size x size pixels."""
    random = generator(seed, Purpose.SCENE, split, number)
    image = _background(size, random)
    shapes = [_shape(size, random) for _ in range(random.integers(2, 8))]
    kept = _uncovered(shapes, size)
    boxes = []
    for shape, mask in kept:
        draw(image, shape)
        boxes.append(extent(mask))
    _grain(image, random)
    classes = np.array([shape.label for shape, _ in kept], dtype=np.int64)
    return Scene(image, np.array(boxes, dtype=np.int64).reshape(-1, 4), classes)


def draw(image: np.ndarray, shape: Shape) -> None:
    """Draws a shape, with smooth edges, onto an (H, W, 3) image."""
    _fill(image, shape, shape.colour)
    if shape.edge is None:
        return
    if len(shape.outline) == 2:
        (x, y), (radius, _) = shape.outline.tolist()
        cv2.circle(image, (x, y), radius - ONE, shape.edge, 2, cv2.LINE_AA, SHIFT)
    else:
        centre = shape.outline.sum(axis=0) // len(shape.outline)
        inner = shape.outline + (centre - shape.outline) // 12  # keeps the contour inside the shape
        cv2.polylines(image, [inner.astype(np.int32)], True, shape.edge, 1, cv2.LINE_AA, SHIFT)


def mask_of(shape: Shape, size: int) -> np.ndarray:
    """(size, size) bool: the pixels that the shape covers at least by half."""
    mask = np.zeros((size, size), dtype=np.uint8)
    _fill(mask, shape, 255)
    return mask >= 128


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """The box xyxy around the True pixels of an (H, W) mask that has some."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def ensure_generated(description: DataDescription) -> None:
    """Draws the data set of a description with `generate`, unless it lies there with these parameters already.

    It is drawn into a temporary folder and renamed, so that two processes at once cannot harm each other. Raises
    DataError when a parameter is wrong or the folder cannot be written or holds anything else.
    """
    if description.generate is None:
        return
    parameters = _checked(description)
    folder = description.root
    if _recorded(folder) == parameters:
        return
    if folder.exists() and _recorded(folder) is None and any(folder.iterdir()):
        raise DataError(
            f"{folder}: holds files but was not drawn by the project; give another `path` in {description.path}"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        drawn = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(description, error) from None
    try:
        _write(drawn, parameters)
        drawn.chmod(0o755)  # temporary folders are private
        _put(drawn, folder, parameters)
    except OSError as error:
        raise _unwritable(description, error) from None
    finally:
        shutil.rmtree(drawn, ignore_errors=True)


def _unwritable(description: DataDescription, error: OSError) -> DataError:
    return DataError(
        f"{description.root}: cannot be written ({error.strerror or error}); copy {description.path.name} to a folder "
        "that can, and use the copy"
    )


def _checked(description: DataDescription) -> dict[str, Any]:
    """The parameters as they are recorded."""
    given, place = dict(description.generate or {}), f"{description.path}: generate"
    scenes = given.pop("scenes", "shapes")
    if scenes != "shapes":
        raise DataError(f"{place}: scenes is {scenes!r}, expected shapes")
    lowest = {"train": 1, "val": 1, "size": MIN_SIZE, "seed": 0}
    for name, value in given.items():
        if name not in lowest:
            raise DataError(f"{place}: {name!r} is not a parameter; there are scenes, {', '.join(lowest)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest[name]:
            raise DataError(f"{place}: {name} is {value!r}, expected a whole number from {lowest[name]}")
    if len(description.names) != len(NAMES):  # they may be called anything
        raise DataError(f"{description.path}: has {len(description.names)} names, expected {', '.join(NAMES)}")
    for split in SPLITS:
        if description.splits[split] != [description.root / "images" / split]:
            raise DataError(f"{description.path}: {split} must be `images/{split}`, where the scenes are drawn")
    return {"version": VERSION, "scenes": scenes, "train": 320, "val": 80, "size": 256, "seed": 0, **given}


def _recorded(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(folder: Path, parameters: dict[str, Any]) -> None:
    size = parameters["size"]
    for split_number, split in enumerate(SPLITS):
        images, labels = folder / "images" / split, folder / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number in range(parameters[split]):
            scene = draw_scene(size, parameters["seed"], split_number, number)
            _, png = cv2.imencode(".png", scene.image[..., ::-1])
            (images / f"{number:04d}.png").write_bytes(png.tobytes())
            rows = zip(scene.classes.tolist(), scene.boxes_xyxy.tolist(), strict=True)
            (labels / f"{number:04d}.txt").write_text(
                "".join(_row(label, box, size) for label, box in rows), encoding="utf-8"
            )
    (folder / RECORD).write_text(json.dumps(parameters) + "\n", encoding="utf-8")


def _row(label: int, box_xyxy: list[int], size: int) -> str:
    left, top, right, bottom = box_xyxy
    fractions = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
    return " ".join((str(label), *(f"{value / size:.9g}" for value in fractions))) + "\n"


def _put(drawn: Path, folder: Path, parameters: dict[str, Any]) -> None:
    """Puts a drawn folder in its place, unless another process was faster."""
    if _recorded(folder) not in (None, parameters):  # drawn with other parameters
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        try:
            os.rename(folder, old / folder.name)
        except FileNotFoundError:  # another process is replacing it
            pass
        finally:
            shutil.rmtree(old, ignore_errors=True)
    try:
        os.rename(drawn, folder)  # replaces an empty folder, fails on a full one
    except OSError:
        if _recorded(folder) != parameters:
            raise


def _fill(image: np.ndarray, shape: Shape, colour: Any) -> None:
    if len(shape.outline) == 2:
        (x, y), (radius, _) = shape.outline.tolist()
        cv2.circle(image, (x, y), radius, colour, cv2.FILLED, cv2.LINE_AA, SHIFT)
    else:
        cv2.fillPoly(image, [shape.outline], colour, cv2.LINE_AA, SHIFT)


def _uncovered(shapes: list[Shape], size: int) -> list[tuple[Shape, np.ndarray]]:
    """The shapes, later ones on top, without those of which over MAX_HIDDEN would be hidden; with their masks."""
    taken = np.zeros((size, size), dtype=bool)
    kept = []
    for shape in reversed(shapes):
        mask = mask_of(shape, size)
        if np.count_nonzero(mask & taken) > MAX_HIDDEN * np.count_nonzero(mask):
            continue
        taken |= mask
        kept.append((shape, mask))
    return kept[::-1]


def _shape(size: int, random: Generator) -> Shape:
    label = int(random.integers(len(NAMES)))
    smallest, largest = size // 12, size // 4
    radius = int(np.exp(random.uniform(np.log(smallest), np.log(largest))) * ONE)
    margin = radius + 2 * ONE
    centre = random.integers(margin, size * ONE - margin, 2)
    angle = random.uniform(0, 2 * np.pi)
    outline = {
        "circle": lambda: np.array((centre, (radius, 0))),
        "square": lambda: _polygon(centre, np.array((radius,) * 4), angle),
        "triangle": lambda: _polygon(centre, np.array((radius,) * 3), angle),
        "star": lambda: _polygon(centre, np.array((radius, radius * 0.42) * 5), angle),
    }[NAMES[label]]()
    edge = _colour(random) if random.random() < 0.3 and radius > 12 * ONE else None
    return Shape(label, outline.astype(np.int32), _colour(random), edge)


def _polygon(centre: np.ndarray, radii: np.ndarray, angle: float) -> np.ndarray:
    """(P, 2) corners at equal angles around a centre."""
    angles = angle + 2 * np.pi * np.arange(len(radii)) / len(radii)
    return centre + np.rint(radii[:, None] * np.stack((np.cos(angles), np.sin(angles)), axis=1)).astype(np.int64)


def _colour(random: Generator) -> tuple[int, int, int]:
    """A vivid colour: one channel strong, one weak, one anything."""
    levels = np.array((random.integers(190, 256), random.integers(0, 90), random.integers(0, 256)))
    red, green, blue = random.permutation(levels).tolist()
    return red, green, blue


def _muted(random: Generator) -> tuple[int, int, int]:
    """A colour near a random grey."""
    red, green, blue = np.clip(random.integers(50, 206) + random.integers(-40, 41, 3), 0, 255).tolist()
    return red, green, blue


def _background(size: int, random: Generator) -> np.ndarray:
    """A gradient between two muted colours with lines, arcs and long blobs on it, none of which is of a class."""
    start, end = np.array(_muted(random)), np.array(_muted(random))
    slope = random.integers(-8, 9, 2)
    ramp = slope[0] * np.arange(size)[None, :] + slope[1] * np.arange(size)[:, None]
    ramp -= ramp.min()
    steps = max(1, int(ramp.max()))
    image = (start + (end - start) * ramp[..., None] // steps).astype(np.uint8)
    for _ in range(random.integers(2, 7)):  # long soft blobs
        axes = random.integers(size // 12, size // 3) * np.array((4, 1)) // 4
        centre, tilt = random.integers(0, size, 2).tolist(), int(random.integers(180))
        cv2.ellipse(image, centre, axes.tolist(), tilt, 0, 360, _muted(random), cv2.FILLED, cv2.LINE_AA)
    image = cv2.blur(image, (9, 9))
    for _ in range(random.integers(3, 10)):  # lines, thin to thick
        start_xy, end_xy = random.integers(0, size, (2, 2)).tolist()
        colour = _colour(random) if random.random() < 0.4 else _muted(random)
        cv2.line(image, start_xy, end_xy, colour, int(random.integers(1, 5)), cv2.LINE_AA)
    for _ in range(random.integers(1, 5)):  # arcs, a circle's contour is not a circle
        centre, radius = random.integers(0, size, 2).tolist(), int(random.integers(size // 16, size // 4))
        begin = int(random.integers(360))
        sweep = int(random.integers(60, 240))
        cv2.ellipse(image, centre, (radius, radius), 0, begin, begin + sweep, _muted(random), 2, cv2.LINE_AA)
    return image


def _grain(image: np.ndarray, random: Generator) -> None:
    """Adds noise of a random strength, the same to all channels, in place."""
    strength = int(random.integers(0, 11))
    noise = random.integers(-strength, strength + 1, image.shape[:2])
    np.copyto(image, np.clip(image + noise[..., None], 0, 255).astype(np.uint8))
