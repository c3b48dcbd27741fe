"""The images that an export is compared on: given ones, those of the checkpoint's data set, or drawn ones."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.data.description import load_description
from detector.data.reading import Reading, build_index
from detector.errors import ConfigError, DetectorError
from detector.inference.sources import Reading as Looking
from detector.inference.sources import find_sources, read_sources
from detector.model.network import Network

COUNT = 8
Images = list[NDArray[np.uint8]]


def some_images(
    network: Network, saved: dict[str, Any], given: Path | None, described: Path | None = None
) -> tuple[Images, str]:
    """Up to 8 images that fit the network, and in words which: given ones, those of a described data set's validation
    split, of the checkpoint's, or drawn ones. Raises DataError for what is named and cannot be read."""
    if given is not None:
        frames = read_sources(find_sources(str(given)), Looking(network.channels, network.value_range))
        images = [frame.image for frame in islice(frames, COUNT)]
        return images, f"{len(images)} of {given}"
    if described is not None:
        return _of_data(network, described), f"{described}, val"
    data = saved.get("settings", {}).get("data")
    if data is not None:
        try:
            return _of_data(network, Path(data)), f"{data}, val"
        except (DetectorError, OSError) as error:
            why = str(error).splitlines()[0]
    else:
        why = "the checkpoint names no data set"
    return drawn(network.channels), f"drawn ({why}; images=FOLDER takes real ones)"


def _of_data(network: Network, data: Path) -> Images:
    """Images of the validation split, from all over it. Raises DataError, or OSError, where they cannot be had."""
    description = load_description(data)
    if description.channels != network.channels:
        raise ConfigError(f"{data}: has other channels than the network")
    index = build_index(description, "val", Reading(max_missing_labels=1.0))
    chosen = np.unique(np.linspace(0, len(index) - 1, COUNT).round().astype(int))
    return [index.image(int(i)) for i in chosen]


def drawn(channels: int) -> Images:
    """8 images of squares on noise, of several shapes."""
    random = np.random.default_rng(8)
    images = []
    for number in range(COUNT):
        height, width = ((480, 640), (640, 480), (512, 512), (360, 640))[number % 4]
        image = random.integers(90, 160, (height, width, channels), dtype=np.uint8)
        for _ in range(6):
            side = int(random.integers(30, 200))
            y, x = int(random.integers(height - side)), int(random.integers(width - side))
            image[y : y + side, x : x + side] = random.integers(0, 256, channels)
        images.append(image)
    return images
