"""The images of an index as training and validation see them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.random import Generator

from detector.data.augment import Augmentation, Example, cutmix, mixup, random_flips
from detector.data.batch import Sample
from detector.data.cache import ImageCache, Mode
from detector.data.colours import Colours, random_colours, recolour
from detector.data.compose import Plane, random_perspective
from detector.data.copy_paste import copy_paste
from detector.data.image import (
    PADDING,
    DamagedImageError,
    Letterbox,
    fitted_size,
    letterbox,
    letterbox_geometry,
)
from detector.data.index import Index
from detector.data.mosaic import mosaic, mosaic_centre
from detector.data.neighbours import Neighbours
from detector.data.public_letterbox import batch_shapes, public_letterbox
from detector.data.sampling import Sampling
from detector.data.user_transforms import UserTransforms
from detector.errors import DataError
from detector.rng import Purpose, generator

__all__ = ["Letterbox", "TrainingSet", "ValidationSet", "WholeImages"]

LATELY = 1024  # images whose resized boxes are at hand

Boxes = tuple[np.ndarray, np.ndarray, tuple[np.ndarray | None, ...]]
BadImages = Literal["skip", "error"]  # what becomes of damaged images: they count for nothing, or stop the run


class TrainingSet:
    """Augmented images of imgsz x imgsz.

    What `training_set[(epoch, slot)]` looks like depends on (seed, epoch, slot) alone. The slots of an epoch hold the
    images that `sampling` draws: each image its own slot, unless some are to come more often. In the last
    `close_mosaic` of `epochs` epochs there is no mosaic, copy-paste, mixup and cutmix: training ends on images that
    look like those of validation.

    With `bad_images` "skip" the sample of a damaged image is not good (see `Sample`), and as another's partner in a
    mosaic, mixup or cutmix the image is grey and without boxes; with "error" it raises DamagedImageError.
    """

    def __init__(
        self,
        index: Index,
        imgsz: int,
        augmentation: Augmentation,
        seed: int,
        epochs: int,
        close_mosaic: int,
        cache: Mode | ImageCache = "auto",
        bad_images: BadImages = "skip",
        sampling: Sampling | None = None,
        *,
        budget: int | None = None,
        cache_folder: Path | None = None,
        processes: int = 0,
        transforms: UserTransforms | None = None,
        colours_later: bool = False,
    ) -> None:
        """`cache`: how it keeps images, or one that was made for this index and imgsz before, whose memory is shared.

        budget: bytes of a new cache, cache_folder: of its file, processes: that make samples (`ImageCache`).

        colours_later: samples carry their change of colours, for `Batch.network_input` to make it.
        """
        self.index, self.imgsz, self.seed, self.bad_images = index, imgsz, seed, bad_images
        self.sampling = sampling or Sampling(np.ones(len(index)), seed)
        self.drawn = self.sampling.drawn  # epoch -> (n,) the image in each slot
        self.first_plain_epoch = epochs - close_mosaic
        self.augmentation, self.transforms = augmentation, transforms
        self.colours_later = colours_later
        self.plain = replace(augmentation, mosaic=0.0, mixup=0.0, cutmix=0.0, copy_paste=0.0)
        if isinstance(cache, ImageCache):
            self.cache = copy.copy(cache)  # nothing was seen yet, as in another process
        else:
            self.cache = ImageCache(index, imgsz, cache, budget, cache_folder, processes)
        self.neighbours = Neighbours(len(index), seed)
        self._lately: dict[int, Boxes] = {}  # boxes that were asked for lately
        self._damaged: set[int] = set()  # as far as this process has come upon them: it decodes them once

    def __len__(self) -> int:
        return len(self.index)

    @property
    def channels(self) -> int:
        return self.cache.channels

    def __getitem__(self, position: tuple[int, int]) -> Sample:
        """The sample (epoch, slot)."""
        return self.draw(position, np.empty((self.imgsz, self.imgsz, self.channels), dtype=np.uint8))

    def draw(self, position: tuple[int, int], out: np.ndarray) -> Sample:
        """The same, its image in `out`: mosaic, copy-paste, perspective, mixup, cutmix, the user's, HSV, flips."""
        epoch, slot = position
        strengths = self.plain if epoch >= self.first_plain_epoch else self.augmentation
        draw = _Draw(self, epoch, slot, strengths, generator(self.seed, Purpose.SAMPLE, epoch, slot))
        own, random = self.fitted(int(draw.drawn[slot]), draw.place), draw.random
        if own is None:
            out.fill(PADDING)
            return Sample(out, np.zeros((0, 4), dtype=np.float32), np.zeros(0, dtype=np.int64), slot, good=False)
        example = draw.view(own, out)
        if random.random() < strengths.mixup:
            example = mixup(example, draw.view(draw.partner(), np.empty_like(out)), random)
        if random.random() < strengths.cutmix:
            example = cutmix(example, draw.view(draw.partner(), np.empty_like(out)), random)
        if self.transforms:
            example = self.transforms(example, random)
            out[:] = example.image
            example = example._replace(image=out)
        colours = random_colours(strengths, random)
        if colours and not self.colours_later:
            recolour(out, colours)
        example = random_flips(example, strengths, random)
        later = (colours or Colours()) if self.colours_later else None
        return Sample(out, example.boxes_xyxy.astype(np.float32, order="C"), example.classes, slot, colours=later)

    def fitted(self, i: int, place: int) -> Example | None:
        """Image i, which stands at a place of the order of all epochs, with its long side imgsz.

        None where it is damaged and `bad_images` says to skip it.
        """
        if i in self._damaged:
            return None
        try:
            image = self.cache.image(i, place)
        except DamagedImageError:
            if self.bad_images == "error":
                raise
            self._damaged.add(i)
            return None
        return Example(image, *self._boxes(i))

    def _boxes(self, i: int) -> Boxes:
        """(N, 4) boxes of image i in pixels of the resized one, (N,) classes, and polygons."""
        if (found := self._lately.get(i)) is None:
            (height, width), (new_height, new_width) = self.index.size(i), self.cache.shape(i)[:2]
            ratios = np.array((new_width / width, new_height / height) * 2)
            polygons = self.index.polygons(i)
            if any(polygon is not None for polygon in polygons):
                polygons = tuple(polygon if polygon is None else polygon * ratios[:2] for polygon in polygons)
            else:
                polygons = ()
            found = self.index.boxes_xyxy(i) * ratios, self.index.labels(i), polygons
            if len(self._lately) >= LATELY:
                self._lately.clear()
            self._lately[i] = found
        return found


class _Draw:
    """What is random about one sample."""

    def __init__(self, images: TrainingSet, epoch: int, slot: int, strengths: Augmentation, random: Generator) -> None:
        self.images, self.strengths, self.random = images, strengths, random
        self.drawn = images.drawn(epoch)  # the image in each slot
        self.place = images.neighbours.place(epoch, slot)

    def view(self, example: Example, out: np.ndarray) -> Example:
        """An image after mosaic and perspective, in `out`."""
        size = self.images.imgsz
        if self.random.random() < self.strengths.mosaic:
            tiles = [example, *(self.partner() for _ in range(3))]
            plane = mosaic(tiles, size, mosaic_centre(size, self.random))
        else:  # its long side is imgsz already, and the grey around it is the padding of a letterbox
            plane = Plane.of(example)
        if self.strengths.copy_paste:
            plane = copy_paste(plane, self.strengths.copy_paste, self.random)
        return random_perspective(plane, out, self.strengths, self.random)

    def partner(self) -> Example:
        """A random one of the near images; a damaged one is grey and has no boxes."""
        images, near = self.images, self.images.neighbours
        place, slot = near.partner(self.place, int(self.random.integers(near.near)))
        i = int(self.drawn[slot])
        example = images.fitted(i, place)
        if example is None:
            return _grey(*fitted_size(*images.index.size(i), images.imgsz), images.channels)
        return example


def _grey(height: int, width: int, channels: int) -> Example:
    """A grey image without boxes."""
    image = np.full((height, width, channels), PADDING, dtype=np.uint8)
    return Example(image, np.zeros((0, 4)), np.zeros(0, dtype=np.int64))


def damage(index: Index, i: int) -> str:
    """What is wrong with an image that was found damaged: one line that names it."""
    try:
        index.image(i)
    except DataError as error:
        return str(error)
    return f"{index.path(i)}: was damaged when it was read before"


class ValidationSet:
    """Letterboxed images whose shape depends on each image alone; see `letterbox`.

    With `public_batch` their shapes are those of the public trainer's validation in batches of so many.
    With `bad_images` "skip" a damaged image is None; with "error" it raises DamagedImageError.
    """

    def __init__(
        self,
        index: Index,
        imgsz: int,
        stride: int = 32,
        rect: bool = True,
        bad_images: BadImages = "skip",
        public_batch: int | None = None,
    ) -> None:
        self.index, self.imgsz, self.stride, self.rect, self.bad_images = index, imgsz, stride, rect, bad_images
        self._public: np.ndarray | None = None  # (images, 2) shapes by the public rule
        if public_batch is not None:
            self._public = batch_shapes(index.heights, index.widths, imgsz, public_batch, stride)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[np.ndarray, Letterbox, int] | None:
        """(H, W, 3) uint8 RGB, how it was put in, and i."""
        image = self._image(i)
        if image is None:
            return None
        if self._public is not None:
            return *public_letterbox(image, self.imgsz, self.shape(i)), i
        return *letterbox(image, self.imgsz, self.stride, self.rect), i

    def _image(self, i: int) -> np.ndarray | None:
        """Image i, or None of one that is damaged and may be."""
        try:
            return self.index.image(i)
        except DamagedImageError:
            if self.bad_images == "error":
                raise
            return None

    def shape(self, i: int) -> tuple[int, int]:
        """(height, width) of image i once letterboxed, without decoding it."""
        if self._public is not None:
            return tuple(self._public[i].tolist())
        return letterbox_geometry(*self.index.size(i), self.imgsz, self.stride, self.rect)[0]


class WholeImages(ValidationSet):
    """The same images as they are, in their own pixels: who looks at them in tiles letterboxes each tile."""

    def __getitem__(self, i: int) -> tuple[np.ndarray, Letterbox, int] | None:
        """(H, W, C) uint8, the mapping that changes nothing, and i."""
        image = self._image(i)
        return None if image is None else (image, Letterbox(*image.shape[:2], 1.0, 1.0, 0, 0), i)

    def shape(self, i: int) -> tuple[int, int]:
        """(height, width) of image i."""
        return self.index.size(i)
