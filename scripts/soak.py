"""Kills training runs again and again, at random times and at named points of the program, and holds each against a run
that was not killed: weights, optimizer and history to the bit, metrics.csv to the byte.

    python scripts/soak.py [--kills 100] [--seed 0] [--workers 0,2] [--folder FOLDER]

Prints a line a kill and a table at the end. Exit status 1 where a run ends otherwise, does not end, or loses a finished
file. Runs are drawn: some save at every step and others at epochs' ends only, some validate and others do not (then
each epoch is the best), and some load images in other processes. Runs that were not as they should be stay in the
folder, with what they printed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.compare import BrokenPromiseError, Outcome, leftovers, outcome_of
from faults.points import POINTS
from faults.run import NEVER, Kill, Nursery, Run
from scenes import TINY, write_dataset

POINT_SHARE = 0.6  # of the kills; the others come at random times
PLAIN_SHARE = 0.1  # of the kills go through `python -m`, not through a fork of a process that has torch imported
MOST_KILLS = 6  # in one run
CALLS = 4  # a point kills at one of its first calls in a process
START = 3.5  # seconds that `python -m detector` takes until it trains, about


@dataclass
class Tally:
    """What has happened so far."""

    runs: int = 0
    broken: int = 0  # runs that did not end like the one that was not killed
    kills: int = 0
    survived: int = 0  # kills of runs that ended as they should
    lost: int = 0  # bytes
    repeated: list[float] = field(default_factory=list)  # seconds, of each kill
    waited: list[float] = field(default_factory=list)  # seconds, of each resume that a dead run's lock refused at first
    left: list[int] = field(default_factory=list)  # files too many, of each run


def draw_kill(random: Random, seconds: float) -> Kill:
    """A kill of a process that would take about `seconds` from its start to the end of the run."""
    plain = random.random() < PLAIN_SHARE
    if random.random() < POINT_SHARE:
        return Kill(random.choice(list(POINTS)), random.randint(1, CALLS), plain=plain)
    return Kill(seconds=random.uniform(0, seconds) + (START if plain else 0), plain=plain)


def soak(run: Run, kills: int, random: Random, seconds: float, tally: Tally) -> str | None:
    """Kill a run up to `kills` times, let it end and compare it; returns what was wrong."""
    try:
        for _ in range(kills):
            kill = draw_kill(random, seconds)
            if not run.finished and run.go_on(kill).killed:
                tally.kills += 1
                way = "plain" if kill.plain else "forked"
                epoch, done = run.position()
                held = f"last.pt holds epoch {epoch}, image {done}" if run.last.exists() else "no last.pt yet"
                print(f"{tally.kills:4}  {run.folder.name}  {way:6}  {kill!s:36}  {held}", flush=True)
        run.end()
    except BrokenPromiseError as error:
        return str(error)
    return f"{run.lost} bytes of finished files lost" if run.lost else None


def take(run: Run, problem: str | None, tally: Tally) -> None:
    """Count a run that has ended; its folder stays where there is something to look at."""
    tally.runs, tally.lost = tally.runs + 1, tally.lost + run.lost
    tally.repeated += run.repeated
    tally.waited += run.waited
    tally.left.append(len(leftovers(run.folder, run.expected)))
    if problem:
        tally.broken += 1
        print(f"BROKEN {run.folder}: {problem}", flush=True)
    else:
        tally.survived += run.kills
        shutil.rmtree(run.folder)


def show(tally: Tally) -> None:
    repeated, waited = tally.repeated or [0.0], tally.waited or [0.0]
    mean, most = sum(repeated) / len(repeated), max(tally.left, default=0)
    rows = {
        "kills survived": f"{tally.survived} of {tally.kills}",
        "runs that ended as if never killed": f"{tally.runs - tally.broken} of {tally.runs}",
        "bytes of finished files lost": f"{tally.lost}",
        "work repeated after a kill": f"{mean:.2f} s in the mean, {max(repeated):.2f} s at most",
        "resumes that waited for a dead run's lock": f"{len(tally.waited)}, {max(waited):.1f} s at most",
        "temporary files left": f"{sum(tally.left)} in {tally.runs} runs, {most} in one at most",
    }
    print()
    for name, value in rows.items():
        print(f"{name:42} {value}")


def main(kills: int, seed: int, workers: list[int], folder: Path) -> int:
    random, tally = Random(seed), Tally()
    data = write_dataset(folder / "data", train=12, val=4)
    common = [f"data={data}", f"model={TINY}", "imgsz=64", "batch=2", "nbs=4", "epochs=3", "warmup_epochs=1"]
    common += ["device=cpu", "plots=false"]
    with Nursery() as nursery:
        expected: dict[str, Outcome] = {}
        for val in ("val=true", "val=false"):
            words = ["train", *common, val, "workers=0", "save_minutes=0", f"project={folder}", f"name=whole {val}"]
            ended = nursery.run(words, NEVER, folder / f"whole {val}.log")
            assert ended.status == 0, ended.said
            expected[val] = outcome_of(folder / f"whole {val}")
            seconds = ended.ended - ended.began
        for number in count(1):
            if tally.kills >= kills:
                break
            val, minutes = random.choice(list(expected)), random.choice(["1e-9", "0"])
            chosen = [*common, val, f"workers={random.choice(workers)}", f"save_minutes={minutes}"]
            run = Run(nursery, folder / f"run{number:03}", chosen, expected[val])
            most = min(random.randint(1, MOST_KILLS), kills - tally.kills)
            take(run, soak(run, most, random, seconds, tally), tally)
    show(tally)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", default="0,2", help="numbers of loader processes to choose from")
    parser.add_argument("--folder", type=Path, help="a new or empty folder to work in; default: a temporary one")
    options = parser.parse_args()
    numbers = [int(one) for one in options.workers.split(",")]
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        sys.exit(main(options.kills, options.seed, numbers, options.folder.resolve()))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(options.kills, options.seed, numbers, Path(temporary)))
