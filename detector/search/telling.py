"""What a search says: of itself, of each trial, and at its end; and its plots, which are Optuna's."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detector.files import replaced, writing
from detector.reporting.table import aligned
from detector.search.objectives import Objective
from detector.search.space import Parameter
from detector.search.study import optuna
from detector.search.trial import Outcome, folder_name

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from detector.search.search import Search

SHOWN = 10  # trials in the last table


def introduce(search: Search) -> None:
    """Say what is searched, and how far it is."""
    study, say = search.study, search.say
    there = study.get_trials(deepcopy=False)
    done = sum(one.state.is_finished() for one in there)
    begun = f", {done} of them finished before" if there else ""
    say(f"search    {search.folder}: {search.total} {'trial' if search.total == 1 else 'trials'}{begun}")
    say(f"varied    {'; '.join(map(described, search.space.parameters))}")
    ways = {"maximize": "as high as it goes", "minimize": "as low as it goes"}
    say(f"sought    {'; '.join(f'{one.name}, {ways[one.direction]}' for one in search.objectives)}")
    say(f"pruner    {search.pruner}")


def described(one: Parameter) -> str:
    """A parameter in words."""
    if one.choices:
        words = f"{one.name} {', '.join(map(_text, one.choices))}"
    else:
        step = f" by {_text(one.step)}" if one.step else ""
        words = f"{one.name} {_text(one.low)} to {_text(one.high)}{step}{' (log)' if one.log else ''}"
    conditions = [f"{key} {' or '.join(map(_text, values))}" for key, values in one.when.items()]
    return words + (f" where {' and '.join(conditions)}" if conditions else "")


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def trial_line(search: Search, number: int, outcome: Outcome, seconds: float) -> str:
    """What came of a trial, what is best so far, and how long this worker was at it."""
    trials = search.study.get_trials(deepcopy=False)
    trial, done = trials[number], sum(one.state.is_finished() for one in trials)
    parts = [folder_name(number), f"{done:>{len(str(search.total))}} of {search.total}"]
    parts += [f"{name}={_text(value)}" for name, value in sorted(trial.params.items())]
    if outcome.failed:
        parts.append(f"failed: {outcome.failed}")
    elif outcome.pruned:
        parts.append(f"pruned {outcome.pruned}")
    else:
        parts += values_of(search.objectives, outcome.values)
    found = best_trials(search)
    if len(search.objectives) > 1:
        parts.append(f"front {len(found)}")
    elif found:
        parts.append(f"best {' '.join(values_of(search.objectives, found[0].values))} ({folder_name(found[0].number)})")
    parts.append(f"{seconds:.1f} s")
    return "  ".join(parts)


def values_of(objectives: Iterable[Objective], values: Iterable[float]) -> list[str]:
    return [f"{one.name} {one.text(value)}" for one, value in zip(objectives, values, strict=True)]


def finished(search: Search) -> list[FrozenTrial]:
    """The trials that came to their end."""
    return search.study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.COMPLETE,))


def best_trials(search: Search) -> list[FrozenTrial]:
    """The best first, of equals the earlier; of several objectives those that none is better than, by the first."""
    sign = -1 if search.objectives[0].direction == "maximize" else 1
    found = search.study.best_trials if len(search.objectives) > 1 else finished(search)
    return sorted(found, key=lambda one: (sign * one.values[0], one.number))


def conclude(search: Search) -> None:
    """Print what came of the search, and write its plots."""
    say, found = search.say, best_trials(search)
    states = [one.state.name for one in search.study.get_trials(deepcopy=False)]
    words = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "under way"}
    counts = [f"{states.count(state)} {word}" for state, word in words.items() if state in states]
    say(f"\ntrials    {', '.join(counts)}")
    if not found:
        say("best      none: no trial came to its end")
        return
    say("\n".join(table(search, found[:SHOWN])))
    if len(found) > 1 and len({tuple(one.values) for one in found}) == 1:
        say("all are the same: trials may be too short to tell them apart (epochs, fraction, weights to start from)")
    if len(search.objectives) > 1:
        say("these are the front: of none is there another that is better in one and no worse in the others")
    elif len(found) > SHOWN:
        say(f"and {len(found) - SHOWN} more")
    importances = {one.name: importance(search, number) for number, one in enumerate(search.objectives)}
    for name, shares in importances.items():
        of = f" for {name}" if len(importances) > 1 else ""
        told = ", ".join(f"{key} {share:.2f}" for key, share in shares.items()) if isinstance(shares, dict) else shares
        say(f"importance{of}  {told}")
    write_plots(search, all(isinstance(one, dict) for one in importances.values()))
    by = f", of the front the one with the best {search.objectives[0].name}" if len(search.objectives) > 1 else ""
    say(f"best      {search.folder / folder_name(found[0].number)}{by}")


def table(search: Search, trials: Iterable[FrozenTrial]) -> list[str]:
    """The trials with their values and parameters, in lines."""
    names = [one.name for one in search.space.parameters]
    rows = [["trial", *(one.name for one in search.objectives), *names]]
    for trial in trials:
        values = [one.text(value) for one, value in zip(search.objectives, trial.values, strict=True)]
        params = [_text(trial.params[name]) if name in trial.params else "-" for name in names]
        rows.append([folder_name(trial.number), *values, *params])
    return aligned(rows, rule=True)


def importance(search: Search, number: int) -> Mapping[str, float] | str:
    """{parameter: its share in how an objective varies}, by Optuna; or why there is none."""
    values = {one.values[number] for one in finished(search)}
    if len(values) < 2:
        return "is not to be told from trials of one value"
    try:
        with quiet():
            return optuna().importance.get_param_importances(search.study, target=_lowest(search, number))
    except (ValueError, RuntimeError, ImportError) as error:
        return f"is not to be told: {error}"


def _lowest(search: Search, number: int) -> Callable[[FrozenTrial], float] | None:
    """What Optuna tells importance by: of one objective it knows the direction, of a function it takes the lowest."""
    if len(search.objectives) == 1:
        return None
    sign = -1 if search.objectives[number].direction == "maximize" else 1
    return lambda trial: sign * trial.values[number]


@contextmanager
def quiet() -> Iterator[None]:
    """A context without Optuna's warnings: that a function was given, that there are few trials."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_plots(search: Search, with_importance: bool) -> None:
    """Write Optuna's plots as pages that need no network."""
    try:
        importlib.import_module("plotly")
    except ImportError:
        search.say("plots     none: they take plotly, pip install 'detector[search]'")
        return
    draw, several, files = optuna().visualization, len(search.objectives) > 1, []
    for number, one in enumerate(search.objectives):
        suffix = f"_{one.name}" if several else ""
        targets = {"history": (lambda trial, number=number: trial.values[number]) if several else None}
        plots = {"history": draw.plot_optimization_history, "importance": draw.plot_param_importances}
        if with_importance:
            targets["importance"] = _lowest(search, number)
        for name, target in targets.items():
            with quiet():
                figure = plots[name](search.study, target=target, target_name=one.name)
            files.append(_write(search.folder / f"{name}{suffix}.html", figure))
    if several and len(search.objectives) < 4:
        names = [one.name for one in search.objectives]
        files.append(_write(search.folder / "front.html", draw.plot_pareto_front(search.study, target_names=names)))
    search.say(f"plots     {', '.join(str(file) for file in files)}")


def _write(path: Path, figure: Any) -> Path:
    with writing(path), replaced(path) as beside:
        beside.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
    return path
