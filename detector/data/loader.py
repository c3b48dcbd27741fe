"""Feeds micro-batches that the plan has decided, and validation batches of equal shape, from worker processes.

The loader decides nothing: neither order nor size, and what a batch holds does not depend on the number of workers.
"""

import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from detector import distributed
from detector.data.batch import Batch, collate
from detector.data.dataset import Letterbox, TrainingSet, ValidationSet
from detector.errors import DataError

MicroBatch = tuple[int, Sequence[int]]  # epoch, indices of the images
ValidationBatch = tuple[Tensor, list[Letterbox], list[int]]  # (B, H, W, 3) uint8, mappings, indices


class _Fetched(Dataset):
    """A data set whose errors travel as values, so that they arrive as they were raised."""

    def __init__(self, dataset: TrainingSet | ValidationSet) -> None:
        self.dataset = dataset

    def __getitems__(self, positions: Sequence[Any]) -> list[Any] | DataError:
        try:
            return [self.dataset[position] for position in positions]
        except DataError as error:
            return error


class _Collated:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, fetched: list[Any] | DataError) -> Any:
        return fetched if isinstance(fetched, DataError) else self.function(fetched)


class _Positions(Sampler):
    """A batch sampler whose list of batches is swapped before each pass."""

    def __init__(self, batches: list[list[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class TrainingLoader:
    """Training micro-batches; the workers start with the first epoch and live as long as the loader."""

    def __init__(self, dataset: TrainingSet, workers: int, pin_memory: bool) -> None:
        self._positions = _Positions([])
        self._loader = _loader(dataset, self._positions, collate, workers, pin_memory, persistent=True)

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Batch]:
        """The micro-batches (epoch, samples), in this order. Raises DataError when an image cannot be read."""
        self._positions.batches = [[(epoch, int(i)) for i in samples] for epoch, samples in micro_batches]
        yield from _raised(self._loader)


def training_loader(dataset: TrainingSet, workers: int, pin_memory: bool) -> TrainingLoader:
    """A loader with that many worker processes; 0 loads in this process."""
    return TrainingLoader(dataset, workers, pin_memory)


def validation_batches(
    dataset: ValidationSet, batch: int, workers: int, part: int = 0, parts: int = 1
) -> Iterator[ValidationBatch]:
    """All images, up to `batch` of one letterboxed shape at a time, so that no image is padded for another's sake.

    Damaged ones, of which the data set makes None, are left out.
    With `parts`, only every parts-th batch from number `part` on: the share of one rank.
    """
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in range(len(dataset)):
        by_shape[dataset.shape(i)].append(i)
    groups = [
        indices[start : start + batch] for indices in by_shape.values() for start in range(0, len(indices), batch)
    ]
    groups = groups[part::parts]
    workers = min(workers, len(groups))
    batches = _raised(_loader(dataset, _Positions(groups), _stacked, workers, pin_memory=False, persistent=False))
    yield from (batch for batch in batches if batch is not None)


def _stacked(items: Sequence[tuple[np.ndarray, Letterbox, int] | None]) -> ValidationBatch | None:
    whole = [item for item in items if item is not None]
    if not whole:
        return None
    images, mappings, indices = zip(*whole, strict=True)
    return torch.from_numpy(np.stack(images)), list(mappings), list(indices)


def _loader(
    dataset: TrainingSet | ValidationSet,
    positions: _Positions,
    function: Any,
    workers: int,
    pin_memory: bool,
    persistent: bool,
) -> DataLoader:
    context = "fork" if workers and "fork" in multiprocessing.get_all_start_methods() else None
    return DataLoader(
        _Fetched(dataset),
        batch_sampler=positions,
        collate_fn=_Collated(function),
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=persistent and workers > 0,
        multiprocessing_context=context,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # DataLoader draws a seed for its workers; not from the global generator
    )


def _start_worker(worker: int) -> None:
    cv2.setNumThreads(0)  # the workers are the parallelism; OpenCV's threads do not survive a fork either
    # Ctrl-C and a SIGTERM to the run's process group are for the parent, which still wants the batches of its step. A
    # SIGTERM to the worker itself, the parent's way to end one, works as ever.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _raised(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        if isinstance(batch, DataError):
            raise batch
        yield batch


def worker_count(workers: int | str) -> int:
    """Loader processes of this process: as asked, or its share of the cores, at most 8."""
    if workers != "auto":
        return int(workers)
    here = distributed.local_world_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // here, 1), 8)
