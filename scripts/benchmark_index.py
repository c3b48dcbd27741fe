"""How long the index of many images takes, read and kept, and its memory.

    python scripts/benchmark_index.py --images 1000000

The data set is made of links to a few images and label files, ten boxes each, in a temporary folder.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

SOURCES = 100  # files that are linked to; file systems bound the links to one
PER_FOLDER = 10_000


def make(root: Path, images: int) -> Path:
    """A description of `images` training images and a few for validation."""
    random = np.random.default_rng(0)
    sources = root / "sources"
    sources.mkdir()
    for number in range(SOURCES):
        picture = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        cv2.imwrite(str(sources / f"{number}.jpg"), picture)
        rows = [f"{random.integers(80)} .5 .5 {w:.6f} {h:.6f}" for w, h in random.uniform(0.01, 0.9, (10, 2))]
        (sources / f"{number}.txt").write_text("\n".join(rows) + "\n")
    for split, count in (("train", images), ("val", 100)):
        for number in range(count):
            part = f"{split}/{number // PER_FOLDER:03d}"
            if number % PER_FOLDER == 0:
                (root / "images" / part).mkdir(parents=True)
                (root / "labels" / part).mkdir(parents=True)
            os.link(sources / f"{number % SOURCES}.jpg", root / "images" / part / f"{number:08d}.jpg")
            os.link(sources / f"{number % SOURCES}.txt", root / "labels" / part / f"{number:08d}.txt")
    names = [f"class {number}" for number in range(80)]
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: {names}\n")
    return root / "data.yaml"


def measure(data: Path) -> None:
    """Build the training index and tell the time and memory it took."""
    from detector.data.description import load_description
    from detector.data.reading import build_index

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start, cpu = time.perf_counter(), time.process_time()
    index = build_index(load_description(data), "train")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    arrays = [value for value in index.__dict__.values() if isinstance(value, np.ndarray)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(
        f"{len(index):,} images, {len(index.classes):,} boxes: {seconds:.1f} s ({cpu:.1f} of the CPU, "
        f"{len(index) / seconds:,.0f} images/s), {sum(a.nbytes for a in arrays) / 2**20:,.0f} MiB, "
        f"{peak / 2**20:,.0f} MiB more at its peak"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to make the data set, on a disk that has links")
    parser.add_argument("--data", type=Path, help="measure this data set alone")
    options = parser.parse_args()
    if options.data:
        measure(options.data)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = make(Path(folder), options.images)
        for title in ("read", "kept"):
            print(f"{title:6}", end=" ", flush=True)
            subprocess.run([sys.executable, __file__, "--data", str(data)], check=True)


if __name__ == "__main__":
    main()
