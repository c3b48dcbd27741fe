"""Whether a setting helps: variants x data sets x seeds, paired by seed.

    python scripts/compare_recipes.py plan.yaml runs/recipes

The plan names what is compared:

    common: {model: v11n, batch: 16}
    sets:
      bccd: {data: bccd/data.yaml, imgsz: 320, epochs: 60}
    variants:                         # the first is what the others are held against
      today: {}
      cosine: {cos_lr: true}
      before: {code: ../before}       # the same settings by another checkout
    seeds: [0, 1, 2, 3, 4]
    known:                            # measured elsewhere: variant, set, seed
      public: {bccd: {0: 0.505, 1: 0.51}}

Paths are relative to the plan. Every run is a `detector train` of one thread on a core of its own, and as many go at
once as there are cores (--jobs). A run that is there is not made again, and one that was interrupted goes on: stop it
and start it again at any time. --table only prints the table of what is there.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
METRIC = "mAP50-95"
Values = dict[str, dict[str, dict[int, float]]]  # by variant, set, seed


@dataclass(frozen=True)
class Planned:
    """One run: its place under the results, the code it runs by, and its settings as words."""

    variant: str
    set: str
    seed: int
    code: Path
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.set}-{self.variant}-{self.seed}"


def planned(plan: dict[str, Any], folder: Path) -> list[Planned]:
    """The runs of a plan, all variants of a seed one after the other, so that an unfinished table is paired too."""
    runs = []
    for seed in plan["seeds"]:
        for name, on in plan["sets"].items():
            for variant, by in plan["variants"].items():
                settings = {"plots": False, "workers": 1, **plan.get("common", {}), **on, **(by or {}), "seed": seed}
                code = (folder / settings.pop("code", ROOT)).resolve()
                settings["data"] = str((folder / settings["data"]).resolve())
                words = tuple(f"{key}={word(value)}" for key, value in settings.items())
                runs.append(Planned(variant, name, seed, code, words))
    return runs


def word(value: Any) -> str:
    """A setting's value as it is written in a command."""
    return value if isinstance(value, str) else json.dumps(value)


def take(run: Planned, out: Path, core: int) -> bool:
    """Make a run, or what is left of it, and keep its result beside it. Returns whether it is there.

    ValueError where what is there was made by other settings.
    """
    result, last, log = out / f"{run.name}.json", out / run.name / "weights" / "last.pt", out / f"{run.name}.log"
    asked = json.dumps([str(run.code), *run.words])
    if log.exists() and log.read_text(encoding="utf-8").split("\n", 1)[0] != asked:
        raise ValueError(f"{log}: made by other settings than the plan's; name the variant anew, or remove its files")
    if result.exists():
        return True
    words = [f"resume={last}"] if last.exists() else [*run.words, f"project={out}", f"name={run.name}", "exist_ok=true"]
    begun = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        if file.tell() == 0:
            print(asked, file=file, flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "detector", "train", *words],
            env={**os.environ, "PYTHONPATH": str(run.code), "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {core})
        status = process.wait()
    if status:
        print(f"{run.name} ended with status {status}, see {log}", flush=True)
        return False
    values = column(out / run.name / "metrics.csv")
    found = {"best": max(values), "last": values[-1], "minutes": (time.monotonic() - begun) / 60}
    result.write_text(json.dumps(found), encoding="utf-8")
    print(f"{run.name}  best {found['best']:.3f}  last {found['last']:.3f}  {found['minutes']:.1f} min", flush=True)
    return True


def column(file: Path) -> list[float]:
    """The metric, epoch by epoch."""
    with file.open(encoding="utf-8", newline="") as rows:
        return [float(row[METRIC]) for row in csv.DictReader(rows) if row.get(METRIC)]


def values_of(runs: Sequence[Planned], out: Path, which: str, known: Values) -> Values:
    """What there is of the runs' results, and what is known of others."""
    values: Values = {}
    for run in runs:
        file = out / f"{run.name}.json"
        if file.exists():
            of_set = values.setdefault(run.variant, {}).setdefault(run.set, {})
            of_set[run.seed] = json.loads(file.read_text(encoding="utf-8"))[which]
    return values | known


def mean_over_sets(of_sets: dict[str, dict[int, float]], sets: Sequence[str]) -> dict[int, float]:
    """By seed, the mean over the sets, for the seeds that all of them have."""
    if any(name not in of_sets for name in sets):
        return {}
    seeds = set.intersection(*(set(of_sets[name]) for name in sets))
    return {seed: float(np.mean([of_sets[name][seed] for name in sets])) for seed in sorted(seeds)}


def interval(differences: Sequence[float], draws: int = 20_000) -> tuple[float, float]:
    """A 95% interval of the mean of paired differences, by the percentile bootstrap (Efron, 1979) over the pairs."""
    values = np.asarray(differences)
    drawn = np.random.default_rng(0).choice(values, (draws, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def table(values: Values, sets: Sequence[str], first: str) -> Iterator[str]:
    """Lines of Markdown: set by set, and for their mean, each variant's mean and what it is more than the first's."""
    yield f"| set | variant | seeds | {METRIC}, mean | deviation | more than {first}, paired | 95% interval |"
    yield "|---|---|---|---|---|---|---|"
    for name in [*sets, *(["mean of all"] if len(sets) > 1 else [])]:
        rows = {
            variant: mean_over_sets(of_sets, sets if name == "mean of all" else [name])
            for variant, of_sets in values.items()
        }
        for variant, row in rows.items():
            if not row:
                continue
            numbers = list(row.values())
            spread = f"{np.std(numbers, ddof=1):.3f}" if len(numbers) > 1 else "-"
            both = [seed for seed in row if seed in rows.get(first, {})]
            apart = [row[seed] - rows[first][seed] for seed in both]
            more, span = "-", "-"
            if apart and variant != first:
                more = f"{np.mean(apart):+.3f} ({len(apart)})"
                if len(apart) > 1:
                    span = "{:+.3f} to {:+.3f}".format(*interval(apart))
            yield f"| {name} | {variant} | {len(row)} | {np.mean(numbers):.3f} | {spread} | {more} | {span} |"


def take_all(runs: Sequence[Planned], out: Path, jobs: int) -> bool:
    """Make the runs, so many at once (0: one a core). Returns whether all are there."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    jobs = jobs or len(cores)
    free: SimpleQueue[int] = SimpleQueue()
    for i in range(jobs):
        free.put(cores[i % len(cores)])

    def on_a_core(run: Planned) -> bool:
        core = free.get()
        try:
            return take(run, out, core)
        finally:
            free.put(core)

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(on_a_core, runs)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path, help="the folder of the runs and their results")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: one a core")
    parser.add_argument("--table", action="store_true", help="print the table and train nothing")
    parser.add_argument("--last", action="store_true", help="the last epoch's value instead of the best one's")
    options = parser.parse_args()
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    runs = planned(plan, options.plan.parent)
    options.out.mkdir(parents=True, exist_ok=True)
    complete = options.table or take_all(runs, options.out.resolve(), options.jobs)
    values = values_of(runs, options.out, "last" if options.last else "best", plan.get("known", {}))
    print("\n".join(table(values, list(plan["sets"]), next(iter(plan["variants"])))))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
