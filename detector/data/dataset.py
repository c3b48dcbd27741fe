"""The images of an index as training and validation see them."""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.random import Generator

from detector.data.augment import Augmentation, Example, cutmix, mixup, random_flips, random_hsv, random_perspective
from detector.data.batch import Sample
from detector.data.cache import ImageCache
from detector.data.image import Letterbox, letterbox, letterbox_geometry, read_rgb
from detector.data.index import Index
from detector.data.mosaic import mosaic, mosaic_centre
from detector.rng import Purpose, generator

__all__ = ["Letterbox", "TrainingSet", "ValidationSet"]


class TrainingSet:
    """Augmented images of imgsz x imgsz.

    What `training_set[(epoch, i)]` looks like depends on (seed, epoch, i) alone. In the last `close_mosaic` of `epochs`
    epochs there is no mosaic, mixup and cutmix: training ends on images that look like those of validation.
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
    ) -> None:
        self.index, self.imgsz, self.seed = index, imgsz, seed
        self.first_plain_epoch = epochs - close_mosaic
        self.augmentation = augmentation
        self.plain = replace(augmentation, mosaic=0.0, mixup=0.0, cutmix=0.0)
        self.cache = ImageCache(index, imgsz, cache)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: tuple[int, int]) -> Sample:
        """The sample (epoch, i): mosaic, perspective, mixup, cutmix, HSV and flips, in this order."""
        epoch, i = position
        strengths = self.plain if epoch >= self.first_plain_epoch else self.augmentation
        random = generator(self.seed, Purpose.SAMPLE, epoch, i)
        example = self._composed(i, strengths, random)
        if random.random() < strengths.mixup:
            example = mixup(example, self._composed(self._partner(random), strengths, random), random)
        if random.random() < strengths.cutmix:
            example = cutmix(example, self._composed(self._partner(random), strengths, random), random)
        example = example._replace(image=random_hsv(example.image, strengths, random))
        example = random_flips(example, strengths, random)
        return Sample(example.image, example.boxes_xyxy.astype(np.float32), example.classes, i)

    def _composed(self, i: int, strengths: Augmentation, random: Generator) -> Example:
        """Image i after mosaic and perspective, imgsz x imgsz."""
        if random.random() < strengths.mosaic:
            tiles = [self._fitted(j) for j in (i, *(self._partner(random) for _ in range(3)))]
            example = mosaic(tiles, self.imgsz, mosaic_centre(self.imgsz, random))
        else:
            # its long side is imgsz already, and the warp's grey border is the padding that a letterbox would add
            example = self._fitted(i)
        return random_perspective(example, self.imgsz, strengths, random)

    def _fitted(self, i: int) -> Example:
        image = self.cache[i]
        ratio = np.array((image.shape[1] / self.index.widths[i], image.shape[0] / self.index.heights[i]))
        return Example(image, self.index.boxes_xyxy(i) * np.tile(ratio, 2), self.index.labels(i))

    def _partner(self, random: Generator) -> int:
        return int(random.integers(len(self.index)))


class ValidationSet:
    """Letterboxed images whose shape depends on each image alone; see `letterbox`."""

    def __init__(self, index: Index, imgsz: int, stride: int = 32, rect: bool = True) -> None:
        self.index, self.imgsz, self.stride, self.rect = index, imgsz, stride, rect

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[np.ndarray, Letterbox, int]:
        """(H, W, 3) uint8 RGB, how it was put in, and i."""
        image, mapping = letterbox(read_rgb(self.index.path(i)), self.imgsz, self.stride, self.rect)
        return image, mapping, i

    def shape(self, i: int) -> tuple[int, int]:
        """(height, width) of image i once letterboxed, without decoding it."""
        height, width = int(self.index.heights[i]), int(self.index.widths[i])
        return letterbox_geometry(height, width, self.imgsz, self.stride, self.rect)[0]
