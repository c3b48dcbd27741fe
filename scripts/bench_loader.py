"""How many training images a second one loader process makes, from files to micro-batches, and where its time goes.

    python scripts/bench_loader.py data=bccd/data.yaml imgsz=640 [cache=off] [workers=1] [batch=16] ...

Takes the settings of `detector train`. `cache` is off unless it is given; with another one, all images are kept before
the measurement. On a machine that others use, trust images per second of CPU time, which is printed too.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import torch

from detector.config.settings import Settings, load_settings
from detector.data import dataset
from detector.data.dataset import TrainingSet
from detector.data.index import Index
from detector.data.loader import TrainingLoader, worker_count
from detector.device import choose_device
from detector.rng import epoch_order
from detector.run.build import indices, training_set

IMAGES = 600  # at least, in a measurement
PARTS = {
    "read and decode": (Index, "fitted"),
    "crop, resize, warp": (dataset, "random_perspective"),
    "mixup": (dataset, "mixup"),
    "cutmix": (dataset, "cutmix"),
    "colours": (dataset, "recolour"),
    "flips": (dataset, "random_flips"),
}


def micro_batches(images: TrainingSet, batch: int, epoch: int) -> list[tuple[int, list[int]]]:
    order = epoch_order(len(images), images.seed, epoch).tolist()
    return [(epoch, order[start : start + batch]) for start in range(0, len(order), batch)]


def end_to_end(images: TrainingSet, settings: Settings) -> None:
    """Print the speed of the shipped loader."""
    workers = worker_count(settings.workers)
    loader = TrainingLoader(images, workers, pin_memory=False, start=settings.multiprocessing_start)
    for _ in loader.batches(micro_batches(images, settings.batch, 0)):
        pass  # starts the processes and fills the cache
    pids = loader.pids or [os.getpid()]
    before, start, count, epoch = busy(pids), time.perf_counter(), 0, 1
    while count < IMAGES:
        count += sum(len(batch.samples) for batch in loader.batches(micro_batches(images, settings.batch, epoch)))
        epoch += 1
    seconds, cpu = time.perf_counter() - start, busy(pids) - before
    loader.close()
    print(f"{count / seconds:.0f} images/s, {workers} loader {'process' if workers == 1 else 'processes'}")
    if cpu:
        print(f"{count / cpu:.0f} images per second of CPU time")


def busy(pids: list[int]) -> float:
    """Seconds that processes have computed; 0 where the system does not tell (not Linux)."""
    try:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in pids)
    except OSError:
        return 0.0


@contextmanager
def timed(spent: dict[str, float], calls: dict[str, int]) -> Iterator[None]:
    """Adds up the CPU time of each part, and how often it is taken, while it lasts."""

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            start = time.process_time()
            try:
                return function(*arguments)
            finally:
                spent[name] += time.process_time() - start

        return call

    whole = {name: getattr(*place) for name, place in PARTS.items()}
    for name, (module, attribute) in PARTS.items():
        setattr(module, attribute, around(name, whole[name]))
    try:
        yield
    finally:
        for name, (module, attribute) in PARTS.items():
            setattr(module, attribute, whole[name])


def where_it_goes(images: TrainingSet, settings: Settings) -> None:
    """Print the parts of a sample's time, in this process, and how often an image is decoded."""
    loader = TrainingLoader(images, 0, pin_memory=False)
    for _ in loader.batches(micro_batches(images, settings.batch, 0)):
        pass
    spent, calls, count = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0), 0
    start, epoch = time.process_time(), 1
    with timed(spent, calls):
        while count < IMAGES:
            count += sum(len(one.samples) for one in loader.batches(micro_batches(images, settings.batch, epoch)))
            epoch += 1
    total = time.process_time() - start
    print(f"{calls['read and decode'] / count:.2f} images decoded a sample")
    for name, seconds in {**spent, "all else": total - sum(spent.values())}.items():
        if seconds:
            print(f"{1000 * seconds / count:6.2f} ms an image, {seconds / total:4.0%}  {name}")


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    given = {word.partition("=")[0] for word in words}
    defaults = [word for word in ("cache=off", "workers=1") if word.partition("=")[0] not in given]
    settings = load_settings(Settings, None, [*defaults, *words])
    index, _ = indices(settings, print)
    print(f"{len(index):,} images at imgsz {settings.imgsz}, cache {settings.cache}, batch {settings.batch}")
    on_gpu = choose_device(settings.device).type != "cpu"  # then colours are made there
    end_to_end(training_set(index, settings, on_gpu), settings)
    where_it_goes(training_set(index, settings.model_copy(update={"workers": 0}), on_gpu), settings)


if __name__ == "__main__":
    main(sys.argv[1:])
