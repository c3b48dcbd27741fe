"""Feeds micro-batches that the plan has decided, and validation batches of equal shape, from worker processes.

The loader decides nothing: neither order nor size, and what a batch holds does not depend on the number of workers.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from detector import distributed
from detector.data.batch import Batch, training_batch
from detector.data.dataset import Letterbox, TrainingSet, ValidationSet
from detector.data.workers import Make, Plan, Workers, go_on, start_method

MicroBatch = tuple[int, Sequence[int]]  # epoch, indices of the images
ValidationBatch = tuple[Tensor, list[Letterbox], list[int]]  # (B, H, W, 3) uint8, mappings, indices


class _Loader:
    """Batches of a data set; the workers start with the first and live until `close`, or as long as the loader."""

    def __init__(self, dataset: Any, make: Make, workers: int, start: str) -> None:
        self._dataset, self._make = dataset, make
        self._count, self._method = workers, start_method(start) if workers else ""
        self._workers: Workers | None = None

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return self._workers.pids if self._workers and not self._workers.closed else []

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        if self._workers:
            self._workers.close()

    def _batches(
        self, plans: Sequence[Plan], batch_bytes: int, own: Callable[[Any], Any], waiting: Callable[[], None]
    ) -> Iterator[Any]:
        """The batches of the plans, whose images take at most `batch_bytes` each."""
        if not self._count or not plans:
            yield from self._made_here(plans, batch_bytes, waiting)
            return
        count, present = min(self._count, len(plans)), self._workers
        if present is None or present.closed or present.count < count or present.batch_bytes < batch_bytes:
            self.close()
            self._workers = Workers(self._dataset, self._make, count, batch_bytes, self._method, waiting)
        yield from self._workers.batches(plans, own, waiting)

    def _made_here(self, plans: Sequence[Plan], batch_bytes: int, waiting: Callable[[], None]) -> Iterator[Any]:
        for plan in plans:
            yield self._make(self._dataset, plan, np.empty(batch_bytes, dtype=np.uint8), waiting)


class TrainingLoader(_Loader):
    """Training micro-batches, in pinned memory if asked."""

    def __init__(self, dataset: TrainingSet, workers: int, pin_memory: bool, start: str = "auto") -> None:
        super().__init__(dataset, training_batch, workers, start)
        self._pin = pin_memory

    def batches(self, micro_batches: Iterable[MicroBatch], waiting: Callable[[], None] = go_on) -> Iterator[Batch]:
        """The micro-batches (epoch, samples), in this order.

        `waiting` is called several times a second while there is nothing but to wait, and may raise. DataError when an
        image cannot be read, TrainingError when a worker has died or falls silent.
        """
        plans = [[(epoch, int(i)) for i in samples] for epoch, samples in micro_batches]
        largest = self._dataset.channels * self._dataset.imgsz**2 * max(map(len, plans), default=0)
        for batch in self._batches(plans, largest, self._own, waiting):
            yield self._own(batch) if self._pin and not self._count else batch

    def _own(self, batch: Batch) -> Batch:
        return Batch(*(tensor.pin_memory() if self._pin else tensor.clone() for tensor in batch))


class ValidationLoader(_Loader):
    """Validation batches of images of one letterboxed shape, so that no image is padded for another's sake."""

    def __init__(self, dataset: ValidationSet, workers: int, start: str = "auto") -> None:
        super().__init__(dataset, _stacked, workers, start)

    def batches(
        self, batch: int, part: int = 0, parts: int = 1, waiting: Callable[[], None] = go_on
    ) -> Iterator[ValidationBatch]:
        """All images, up to `batch` at a time; `waiting` and errors are those of training.

        Damaged ones, of which the data set makes None, are left out.
        With `parts`, only every parts-th batch from number `part` on: the share of one rank.
        """
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in range(len(self._dataset)):
            by_shape[self._dataset.shape(i)].append(i)
        groups = [
            (shape, indices[start : start + batch])
            for shape, indices in by_shape.items()
            for start in range(0, len(indices), batch)
        ][part::parts]
        largest = max((3 * height * width * len(indices) for (height, width), indices in groups), default=0)
        batches = self._batches([indices for _, indices in groups], largest, _own, waiting)
        yield from (batch for batch in batches if batch is not None)


class Loaders(NamedTuple):
    """The loaders of a run."""

    training: TrainingLoader
    validation: ValidationLoader


@contextmanager
def loading(
    training: TrainingSet, validation: ValidationSet, workers: int, pin_memory: bool, start: str
) -> Iterator[Loaders]:
    """A context with a run's loaders, each of that many worker processes, which end with it."""
    loaders = Loaders(
        TrainingLoader(training, workers, pin_memory, start), ValidationLoader(validation, workers, start)
    )
    try:
        yield loaders
    finally:
        for loader in loaders:
            loader.close()


def validation_batches(
    dataset: ValidationSet,
    batch: int,
    workers: int,
    part: int = 0,
    parts: int = 1,
    start: str = "auto",
    waiting: Callable[[], None] = go_on,
) -> Iterator[ValidationBatch]:
    """One pass over all images, by workers that end with it; see `ValidationLoader.batches`."""
    loader = ValidationLoader(dataset, workers, start)
    try:
        yield from loader.batches(batch, part, parts, waiting)
    finally:
        loader.close()


def _stacked(
    dataset: ValidationSet, plan: Plan, memory: np.ndarray, before: Callable[[], None]
) -> ValidationBatch | None:
    whole = []
    for i in plan:
        before()
        if (item := dataset[i]) is not None:
            whole.append(item)
    if not whole:
        return None
    images, mappings, indices = zip(*whole, strict=True)
    return torch.from_numpy(np.stack(images)), list(mappings), list(indices)


def _own(batch: ValidationBatch | None) -> ValidationBatch | None:
    if batch is None:
        return None
    images, mappings, indices = batch
    return images.clone(), mappings, indices


def worker_count(workers: int | str) -> int:
    """Loader processes of this process: as asked, or its share of the cores, at most 8."""
    if workers != "auto":
        return int(workers)
    here = distributed.local_world_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // here, 1), 8)
