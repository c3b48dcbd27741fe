"""Which images, boxes and classes of a data set a run takes: functions from an index to an index."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detector.data.index import Index
from detector.errors import ConfigError
from detector.rng import Purpose, generator

ITEM = "item"  # what the only class is called where all of a data set's are one; public checkpoints call it so, too


def fraction_of(index: Index, fraction: float, seed: int) -> Index:
    """The index of a fraction of the images, at least of one, drawn by the seed and in the order that they had.

    It grows: with one seed the images of a smaller fraction are among those of a larger one.
    """
    if fraction == 1:
        return index
    count = max(1, round(fraction * len(index)))
    drawn = generator(seed, Purpose.FRACTION).permutation(len(index))
    return index.take(np.sort(drawn[:count]))


def of_classes(index: Index, classes: Sequence[int | str] | None, single: bool) -> Index:
    """The index with the boxes of these classes alone (None: of all), which with `single` become the one class ITEM.

    `classes` are names, or numbers in `index.names`, and without `single` the classes keep their numbers. ConfigError
    for one that is none of the index's.
    """
    if classes is not None:
        numbers = class_numbers(classes, index.names)
        index = index.keep(np.isin(index.classes, list(numbers)))
    return as_one_class(index) if single else index


def class_numbers(classes: Sequence[int | str], names: Sequence[str]) -> frozenset[int]:
    """The numbers of the classes that are named, or numbered, in `classes`. ConfigError for what is no class."""
    numbers: set[int] = set()
    for one in classes:
        found = {number for number, name in enumerate(names) if name == one}
        if not found and str(one).isdecimal() and int(one) < len(names):
            found = {int(one)}
        if not found:
            raise ConfigError(
                f"classes={list(classes)}: {one!r} is no class of {list(names)}; write names of these, or their "
                f"numbers, 0 to {len(names) - 1}. (What the classes are called is `names`.)"
            )
        numbers |= found
    return frozenset(numbers)


def as_one_class(index: Index) -> Index:
    """The index with ITEM as its only class. A box that was there once for each of several classes stays once."""
    rows = np.column_stack((index.image_of_box, index.boxes_xywh, index.ignored_boxes))
    keep = np.zeros(len(rows), dtype=bool)
    keep[np.unique(rows, axis=0, return_index=True)[1]] = True
    kept = index.keep(keep)
    return replace(kept, names=(ITEM,), classes=np.zeros_like(kept.classes), category_ids=())
