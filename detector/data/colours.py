"""Random colours: hue, saturation and brightness of an image, changed where it is drawn or on the device.

A loader process spends more time on them than on anything else, and a GPU none to speak of. So where training runs on
one, a sample carries its change of colours along, and they are made of the network's input. Both ways are one rule, to
the rounding of 8-bit hue and saturation.
"""

from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from detector.data.augment import Augmentation

LEVELS = np.arange(256)
STRIP = 32 * 1024  # pixels whose colours are changed at once


class Colours(NamedTuple):
    """A change of colours. Of images that are not RGB, whose channels have no hue, it changes the brightness alone."""

    hue: float = 0.0  # turned by so much of the circle
    saturation: float = 1.0  # times this
    value: float = 1.0  # brightness times this


def random_colours(strengths: Augmentation, generator: Generator) -> Colours | None:
    """Hue by r_h of the circle, saturation and brightness times 1 + r, r ~ U(-1, 1) * (hsv_h, hsv_s, hsv_v).

    None where the strengths are all 0; then nothing is drawn from the generator.
    """
    if not (strengths.hsv_h or strengths.hsv_s or strengths.hsv_v):
        return None
    hue, saturation, value = generator.uniform(-1, 1, 3) * (strengths.hsv_h, strengths.hsv_s, strengths.hsv_v)
    return Colours(float(hue), 1 + float(saturation), 1 + float(value))


def recolour(image: np.ndarray, colours: Colours) -> None:
    """Change the colours of an (H, W, C) uint8 image where it lies."""
    if image.shape[2] != 3:
        cv2.convertScaleAbs(image, image, colours.value)
        return
    turned = (np.rint(LEVELS + 180 * colours.hue) % 180).astype(np.uint8)  # OpenCV's 8-bit hue: units of 2 degrees
    # So few rows that they stay in the CPU's cache, and plane by plane: half the time of the whole in one piece.
    rows = min(len(image), max(1, STRIP // image.shape[1]))
    hsv = np.empty((rows, image.shape[1], 3), dtype=np.uint8)
    planes = list(np.empty((3, rows, image.shape[1]), dtype=np.uint8))
    for top in range(0, len(image), rows):
        strip = image[top : top + rows]
        if len(strip) < rows:
            hsv, planes = hsv[: len(strip)], [plane[: len(strip)] for plane in planes]
        cv2.cvtColor(strip, cv2.COLOR_RGB2HSV, dst=hsv)
        cv2.split(hsv, planes)
        cv2.LUT(planes[0], turned, dst=planes[0])
        cv2.convertScaleAbs(planes[1], planes[1], colours.saturation)
        cv2.convertScaleAbs(planes[2], planes[2], colours.value)
        cv2.merge(planes, hsv)
        cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=strip)


def recoloured(images: Tensor, colours: Tensor) -> Tensor:
    """(B, C, H, W) images in 0..1 with the (B, 3) `Colours` of each, where they lie.

    One after the other, so that little memory is taken, and any cut gives the same.
    """
    for image, change in zip(images, colours.to(images.dtype), strict=True):
        if len(image) == 3:
            image.copy_(_recoloured(image, *change))
        else:
            image.mul_(change[2]).clamp_(max=1)
    return images


def _recoloured(image: Tensor, turn: Tensor, gain_s: Tensor, gain_v: Tensor) -> Tensor:
    """A (3, H, W) image with another hue, saturation and value.

    In hexagonal HSV a channel is v - v s clip(min(k, 4 - k), 0, 1), k = (n + 6 h) mod 6, n = 5, 3, 1 for R, G, B.
    """
    red, green, blue = image
    value, least = image.amax(0), image.amin(0)
    chroma = value - least
    some = chroma.clamp(min=1e-6)  # grey has no hue, and needs none
    hue = torch.where(value == green, 2 + (blue - red) / some, 4 + (red - green) / some)
    hue = torch.where(value == red, (green - blue) / some, hue) + 6 * turn
    saturation = (gain_s * chroma / value.clamp(min=1e-6)).clamp_(max=1)
    value = (gain_v * value).clamp_(max=1)
    k = (hue + hue.new_tensor((5, 3, 1)).view(3, 1, 1)) % 6
    return value - value * saturation * torch.minimum(k, 4 - k).clamp_(0, 1)
