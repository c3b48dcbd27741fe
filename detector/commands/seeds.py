"""`detector train seed=[0,1,2]`: the same run by several seeds, and how far apart they end."""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import mean, stdev

from detector.config.settings import Settings
from detector.errors import ConfigError
from detector.reporting.run_files import best_row, read_metrics
from detector.reporting.table import aligned

COLUMNS = ("mAP50-95", "mAP50", "precision", "recall", "F1")


def train_seeds(settings: Settings, seeds: Sequence[int], train: Callable[[Settings, str], int]) -> int:
    """One run a seed, in folders NAME-seed0, NAME-seed1, ...; then their best epochs in a table.

    `train` makes a run of the settings in a folder of that name and returns its exit status; the first that is not 0
    ends them all. Raises ConfigError, before a run begins, where one of the folders is there.
    """
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seed={list(seeds)}: names one twice, and a seed gives the same run again; keep each once")
    names = named(settings, seeds)
    for number, (seed, name) in enumerate(names.items(), 1):
        print(f"seed      {seed}, {number} of {len(seeds)}", flush=True)
        if status := train(settings.model_copy(update={"seed": seed, "name": name}), name):
            return status
    best = {seed: best_of(settings.project / name, settings.metric) for seed, name in names.items()}
    print("\n".join(table(best, settings.metric)))
    return 0


def named(settings: Settings, seeds: Sequence[int]) -> dict[int, str]:
    """The name of each seed's folder: `name`, or the next train, train2, ... of which there is none."""

    def there(base: str) -> list[Path]:
        return [folder for seed in seeds if (folder := settings.project / f"{base}-seed{seed}").exists()]

    if settings.name is not None and not settings.exist_ok and (found := there(settings.name)):
        raise ConfigError(f"{found[0]}: is there already; choose another name=, or set exist_ok=true")
    bases = ("train" if number == 1 else f"train{number}" for number in count(1))
    base = settings.name or next(one for one in bases if not there(one))
    return {seed: f"{base}-seed{seed}" for seed in seeds}


def best_of(folder: Path, metric: str) -> dict[str, float]:
    """The best row of a run's metrics.csv; the first where none has the metric."""
    rows = read_metrics(folder)
    return best_row(rows, metric) or rows[0]


def table(best: dict[int, dict[str, float]], metric: str) -> list[str]:
    """The best epochs by seed, their mean, and the deviation of one run from it (n - 1)."""
    columns = [one for one in dict.fromkeys((metric, *COLUMNS)) if all(one in row for row in best.values())]
    rows = [[str(seed), str(int(row["epoch"])), *(f"{row[one]:.3f}" for one in columns)] for seed, row in best.items()]
    several = [[row[one] for row in best.values()] for one in columns]
    rows.append(["mean", "", *(f"{mean(values):.3f}" for values in several)])
    if len(best) > 1:
        rows.append(["deviation", "", *(f"{stdev(values):.3f}" for values in several)])
    return aligned([["seed", "best epoch", *columns], *rows], rule=True)
