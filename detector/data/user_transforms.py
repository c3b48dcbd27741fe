"""Transforms of the albumentations package that the user lists, applied to a sample's image and boxes.

The package is an extra. Its archived releases and albumentationsx, which takes their place under a licence of its own,
have one interface, and what is installed is taken.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.random import Generator

from detector.data.augment import Example
from detector.errors import ConfigError, DataError

# Before the import: it asks the network for newer releases, and its successor reports what is used.
QUIET = {"NO_ALBUMENTATIONS_UPDATE": "1", "ALBUMENTATIONS_OFFLINE": "1", "ALBUMENTATIONS_NO_TELEMETRY": "1"}

Listed = Sequence[str | Mapping[str, Mapping[str, Any] | None]]  # names, or names with arguments


class UserTransforms:
    """The transforms of a list, in its order. In another process they are made anew."""

    def __init__(self, listed: Listed) -> None:
        """Raises ConfigError where the package is missing or too old, or a transform or an argument is unknown."""
        self.listed = listed
        self._compose = composed(listed)

    def __call__(self, example: Example, generator: Generator) -> Example:
        """The image and its boxes after the transforms, seeded by the generator.

        Raises DataError where they make an image of another size, type or number of channels.
        """
        self._compose.set_random_seed(int(generator.integers(2**31)))
        out = self._compose(image=example.image, bboxes=example.boxes_xyxy, classes=example.classes)
        image = np.asarray(out["image"]).reshape(*out["image"].shape[:2], -1)
        if image.shape != example.image.shape or image.dtype != np.uint8:
            raise DataError(
                f"albumentations: they make {image.dtype} {image.shape} of uint8 {example.image.shape}; take out what "
                "changes the size, the channels or the type"
            )
        boxes_xyxy = np.asarray(out["bboxes"], dtype=np.float64).reshape(-1, 4)
        return Example(image, boxes_xyxy, np.asarray(out["classes"], dtype=np.int64))

    def __reduce__(self) -> tuple[type["UserTransforms"], tuple[Listed]]:
        return UserTransforms, (self.listed,)


def composed(listed: Listed) -> Any:
    """The package's own pipeline of the transforms."""
    package = _package()
    transforms = [_transform(package, *_named(entry)) for entry in listed]
    boxes = package.BboxParams(format="pascal_voc", label_fields=["classes"], min_area=1.0, clip=True)
    made = package.Compose(transforms, bbox_params=boxes)
    if not hasattr(made, "set_random_seed"):
        raise ConfigError(
            f"albumentations: release {package.__version__} draws from a global generator; install 1.4.21 or later"
        )
    return made


def _package() -> ModuleType:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import albumentations
    except ImportError as error:
        raise ConfigError(
            f"albumentations: the package cannot be imported ({error}); `pip install 'detector[albumentations]'`"
        ) from None
    return albumentations


def _named(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a transform."""
    if isinstance(entry, str):
        return entry, {}
    if len(entry) != 1:
        raise ConfigError(f"albumentations: {dict(entry)} is not one transform; write `- Name: {{argument: value}}`")
    ((name, arguments),) = entry.items()
    return name, dict(arguments or {})


def _transform(package: ModuleType, name: str, arguments: Mapping[str, Any]) -> Any:
    kind = getattr(package, name, None)
    if not (isinstance(kind, type) and issubclass(kind, package.BasicTransform)):
        raise ConfigError(f"albumentations: '{name}' is not a transform of release {package.__version__}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # what the package says of an argument that it does not know
            return kind(**arguments)
    except Exception as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"albumentations: {name}: {problem}") from None
