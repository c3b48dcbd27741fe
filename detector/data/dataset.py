"""The images of an index as training and validation see them."""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.random import Generator

from detector.data.augment import Augmentation, Example, cutmix, mixup, random_flips, random_hsv, random_perspective
from detector.data.batch import Sample
from detector.data.cache import ImageCache
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
from detector.data.public_letterbox import batch_shapes, public_letterbox
from detector.data.sampling import Sampling
from detector.errors import DataError
from detector.rng import Purpose, generator

__all__ = ["Letterbox", "TrainingSet", "ValidationSet"]

BadImages = Literal["skip", "error"]  # what becomes of damaged images: they count for nothing, or stop the run


class TrainingSet:
    """Augmented images of imgsz x imgsz.

    What `training_set[(epoch, slot)]` looks like depends on (seed, epoch, slot) alone. The slots of an epoch hold the
    images that `sampling` draws: each image its own slot, unless some are to come more often. In the last
    `close_mosaic` of `epochs` epochs there is no mosaic, mixup and cutmix: training ends on images that look like
    those of validation.

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
        cache: bool | Literal["auto"] = "auto",
        bad_images: BadImages = "skip",
        sampling: Sampling | None = None,
    ) -> None:
        self.index, self.imgsz, self.seed, self.bad_images = index, imgsz, seed, bad_images
        self.sampling = sampling or Sampling(np.ones(len(index)), seed)
        self.drawn = self.sampling.drawn  # epoch -> (n,) the image in each slot
        self.first_plain_epoch = epochs - close_mosaic
        self.augmentation = augmentation
        self.plain = replace(augmentation, mosaic=0.0, mixup=0.0, cutmix=0.0)
        self.cache = ImageCache(index, imgsz, cache)
        self._damaged: set[int] = set()  # as far as this process has come upon them: it decodes them once

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: tuple[int, int]) -> Sample:
        """The sample (epoch, slot): mosaic, perspective, mixup, cutmix, HSV and flips, in this order."""
        epoch, slot = position
        drawn = self.drawn(epoch)
        strengths = self.plain if epoch >= self.first_plain_epoch else self.augmentation
        random = generator(self.seed, Purpose.SAMPLE, epoch, slot)
        own = self._fitted(int(drawn[slot]))
        if own is None:
            grey = _grey(self.imgsz, self.imgsz)
            return Sample(grey.image, grey.boxes_xyxy.astype(np.float32), grey.classes, slot, good=False)
        example = self._composed(own, drawn, strengths, random)
        if random.random() < strengths.mixup:
            example = mixup(example, self._composed(self._partner(drawn, random), drawn, strengths, random), random)
        if random.random() < strengths.cutmix:
            example = cutmix(example, self._composed(self._partner(drawn, random), drawn, strengths, random), random)
        example = example._replace(image=random_hsv(example.image, strengths, random))
        example = random_flips(example, strengths, random)
        return Sample(example.image, example.boxes_xyxy.astype(np.float32), example.classes, slot)

    def _composed(self, example: Example, drawn: np.ndarray, strengths: Augmentation, random: Generator) -> Example:
        """An image after mosaic and perspective, imgsz x imgsz."""
        if random.random() < strengths.mosaic:
            tiles = [example, *(self._partner(drawn, random) for _ in range(3))]
            example = mosaic(tiles, self.imgsz, mosaic_centre(self.imgsz, random))
        # Without: its long side is imgsz already, and the warp's grey border is the padding of a letterbox.
        return random_perspective(example, self.imgsz, strengths, random)

    def _partner(self, drawn: np.ndarray, random: Generator) -> Example:
        """The image of a random slot of the epoch; a damaged one is grey and has no boxes."""
        i = int(drawn[random.integers(len(drawn))])
        example = self._fitted(i)
        return _grey(*fitted_size(*self.index.size(i), self.imgsz)) if example is None else example

    def _fitted(self, i: int) -> Example | None:
        """Image i with its long side imgsz; None where it is damaged and `bad_images` says to skip it."""
        if i in self._damaged:
            return None
        try:
            image = self.cache[i]
        except DamagedImageError:
            if self.bad_images == "error":
                raise
            self._damaged.add(i)
            return None
        ratio = np.array((image.shape[1] / self.index.widths[i], image.shape[0] / self.index.heights[i]))
        return Example(image, self.index.boxes_xyxy(i) * np.tile(ratio, 2), self.index.labels(i))


def _grey(height: int, width: int) -> Example:
    """A grey image without boxes."""
    image = np.full((height, width, 3), PADDING, dtype=np.uint8)
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
        try:
            image = self.index.image(i)
        except DamagedImageError:
            if self.bad_images == "error":
                raise
            return None
        if self._public is not None:
            return *public_letterbox(image, self.imgsz, self.shape(i)), i
        return *letterbox(image, self.imgsz, self.stride, self.rect), i

    def shape(self, i: int) -> tuple[int, int]:
        """(height, width) of image i once letterboxed, without decoding it."""
        if self._public is not None:
            return tuple(self._public[i].tolist())
        return letterbox_geometry(*self.index.size(i), self.imgsz, self.stride, self.rect)[0]
