"""The table of cards in docs/small-gpus.md: which micro-batch each model is estimated to take on which GPU.

    OMP_NUM_THREADS=1 python scripts/cards.py [--models v11n v11s] [--imgsz 640] [--cards 2 4 6] [--boxes 100]

Nothing is run on a GPU: what `detector tune --estimate` counts, for 80 classes and images with many boxes.
"""

import argparse
from functools import cache

import numpy as np

from detector.config.settings import Settings
from detector.data.batch import Sample
from detector.fitting.estimate import Estimate
from detector.fitting.fit import CUDA_CONTEXT, LEAST_NORM_BATCH
from detector.fitting.search import SPARE, Trial, recommend, search
from detector.step.plan import Cut

CLASSES, IMAGES = 80, 100_000


def crowded(size: int, boxes: int) -> Sample:
    """A grey image with boxes of 8 to 200 pixels."""
    random = np.random.default_rng(0)
    side = random.uniform(8, min(200, size / 2), (boxes, 2))
    low = random.uniform(0, 1, (boxes, 2)) * (size - side)
    boxes_xyxy = np.concatenate((low, low + side), axis=1).astype(np.float32)
    return Sample(np.full((size, size, 3), 114, np.uint8), boxes_xyxy, random.integers(0, CLASSES, boxes), 0)


def row(model: str, options: argparse.Namespace) -> list[str]:
    """What to write for a model on each of the cards."""
    settings = Settings(data="none.yaml", model=model, imgsz=options.imgsz, nbs=64)
    run = Estimate(settings, "cuda", "bf16", 2**62, 1, CLASSES, IMAGES, crowded(options.imgsz, options.boxes))
    counted = cache(run.measure)
    cells = []
    for card in options.cards:
        memory = card * 2**30 - CUDA_CONTEXT

        def measure(mode: str, cut: Cut, memory: int = memory) -> Trial:
            one = counted(mode, cut)
            return one._replace(fits=(one.peak or 0) <= memory * (1 - SPARE))

        trials = [
            trial
            for mode in run.modes()
            for trial in search(settings, run.planned(), lambda cut, mode=mode: measure(mode, cut))
        ]
        cells.append(written(recommend(trials, settings.norm, LEAST_NORM_BATCH)))
    return cells


def written(chosen: Trial | None) -> str:
    """The settings of a recommendation, those that are no defaults."""
    if chosen is None:
        return "-"
    values = chosen.settings()
    words = [f"{key}={str(value).lower()}" for key, value in values.items() if value not in ("off", False)]
    return "`" + " ".join(words) + "`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["v11n", "v11s", "v11m", "v11l", "v11x"])
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--cards", nargs="*", type=int, default=[2, 4, 6, 8, 12, 16, 24], help="their memory, GiB")
    parser.add_argument("--boxes", type=int, default=100, help="of each image")
    options = parser.parse_args()
    rows = {model: row(model, options) for model in options.models}
    print("| card | " + " | ".join(rows) + " |\n|---|" + "---|" * len(rows))
    for number, card in enumerate(options.cards):
        print(f"| {card} GB | " + " | ".join(cells[number] for cells in rows.values()) + " |")


if __name__ == "__main__":
    main()
