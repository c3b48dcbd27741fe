"""Images that are in memory already: arrays, tensors and PIL images, by the rules by which files are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from detector.errors import DataError
from detector.inference.sources.frame import Reading

if TYPE_CHECKING:
    from PIL.Image import Image


def image_of_array(values: NDArray[Any], reading: Reading) -> NDArray[np.uint8]:
    """(H, W, C) uint8 RGB of an (H, W) or (H, W, K) array, as of a file that holds these values.

    Alpha is left out, grey repeated for a network of colours and colours made grey for one of grey, and uint16 scaled
    as `decoding.scaled` says. Raises DataError for all else, with what would make an image of it.
    """
    from detector.data.decoding import in_channels
    from detector.data.faults import DamagedError

    check_image(values, reading)
    if reading.order == "bgr" and values.ndim == 3 and values.shape[2] in (3, 4):
        values = values[:, :, [2, 1, 0, 3][: values.shape[2]]]
    try:
        return np.ascontiguousarray(in_channels(values, reading.channels, reading.value_range))
    except DamagedError as error:
        raise DataError(f"an array of shape {values.shape}: {error}") from None


def check_image(image: NDArray[Any], reading: Reading) -> None:
    """Raise DataError unless an array is taken for an image, with what would make it one."""
    channels = reading.channels
    planes = {2: 1, 3: image.shape[2] if image.ndim == 3 else 0}.get(image.ndim, 0)
    fits = planes == channels or (channels in (1, 3) and 1 <= planes <= 4)
    numbers = image.dtype in (np.uint8, np.uint16) or (reading.value_range is not None and image.dtype.kind in "uif")
    if image.size and fits and numbers:
        return
    if not image.size:
        remedy = "; this one has no pixels"
    elif image.ndim == 4:
        remedy = "; give several as a list, list(images)"
    elif image.ndim == 3 and not fits and image.shape[0] in (channels, 1, 3, 4):
        remedy = "; move the channels to the end by image.transpose(1, 2, 0)"
    elif image.dtype.kind == "f":
        remedy = "; numbers in 0..1 become uint8 by (image * 255).round().astype(np.uint8)"
    elif image.dtype == bool:
        remedy = "; a mask becomes black and white by image.astype(np.uint8) * 255"
    elif image.dtype.kind in "ui" and fits:
        remedy = "; numbers in 0..255 become uint8 by image.astype(np.uint8)"
    else:
        remedy = ""
    others = {1: ", and (H, W), RGB", 3: ", and (H, W), (H, W, 1), RGBA"}.get(channels, "")
    form = f"(H, W, {channels}) uint8{' RGB' if channels == 3 else ''}{others} and uint16"
    raise DataError(f"an array of shape {image.shape} and type {image.dtype}: images are {form}{remedy}")


def image_of_pillow(image: Image, reading: Reading) -> NDArray[np.uint8]:
    """(H, W, C) uint8 of a PIL image, as of the file that it was read from: its EXIF orientation is applied, too."""
    from detector.data.decoding import from_pillow, in_channels
    from detector.data.faults import DamagedError
    from detector.data.orientation import orientation_in, upright

    if not all(image.size):
        raise DataError(f"a PIL image of {image.size[0]} x {image.size[1]} pixels: it has none to look at")
    try:
        values = from_pillow(image.copy(), reading.channels)
        check_image(values.astype(np.uint8) if values.dtype == bool else values, reading)
        pixels = in_channels(values, reading.channels, reading.value_range)
    except (DamagedError, OSError) as error:  # it may be read from its file only now
        raise DataError(f"a PIL image of mode {image.mode}: cannot be decoded ({error})") from None
    return upright(pixels, orientation_in(image.info.get("exif", b"")))


def images_of_tensor(tensor: torch.Tensor, reading: Reading) -> Iterator[NDArray[np.uint8]]:
    """(H, W, C) uint8 images of a (C, H, W) or (B, C, H, W) tensor of uint8, or of floats in 0..1, on any device."""
    shape, kind = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    told = f"a tensor of shape {shape} and type {kind}: tensors are (C, H, W) or (B, C, H, W), uint8 or floats in 0..1"
    if tensor.ndim not in (3, 4) or not tensor.numel():
        raise DataError(told)
    planes = shape[-3]
    if planes != reading.channels and not (reading.channels in (1, 3) and planes in (1, 3, 4)):
        last = shape[-1] in (reading.channels, 1, 3, 4)
        order = "(2, 0, 1)" if tensor.ndim == 3 else "(0, 3, 1, 2)"
        raise DataError(f"{told}; {planes} channels do not fit" + (f", tensor.permute{order} moves them" * last))
    if not (tensor.is_floating_point() or tensor.dtype == torch.uint8):
        raise DataError(f"{told}; numbers in 0..255 become uint8 by tensor.to(torch.uint8)")
    for one in tensor if tensor.ndim == 4 else (tensor,):
        one = one.detach().cpu()
        if one.is_floating_point():
            one = one.float()
            low, high = (float(value) for value in one.aminmax())
            if not (low >= 0 and high <= 1):
                raise DataError(f"{told}; these go from {low:g} to {high:g}: divide by 255, or undo what normalised it")
            one = (one * 255).round().to(torch.uint8)
        yield image_of_array(one.permute(1, 2, 0).numpy(), reading)
