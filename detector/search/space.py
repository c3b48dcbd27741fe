"""What is varied: the ranges, choices and fixed values of a YAML file, checked before there is a trial.

lr0: {low: 1e-4, high: 1e-1, log: true}
nbs: {choices: [16, 32, 64]}
momentum: {low: 0.8, high: 0.95, when: {optimizer: [SGD, MuSGD]}}
epochs: 20
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from detector.config.reading import Yaml, read_yaml, resolved, takes, unknown, validated
from detector.config.settings import Settings
from detector.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from optuna.trial import Trial

MEASURED = "values of trials could not be compared"
PLACE = "each trial has its place in the search's folder"
MACHINE = "it changes how a trial is computed, and not what comes of it"
# Settings that no trial has for itself, and why.
NOT_SEARCHED = {
    **dict.fromkeys(
        ("data", "names", "classes", "single_cls", "metric", "val", "bad_images", "bad_boxes", "max_missing_labels"),
        MEASURED,
    ),
    **dict.fromkeys(("project", "name", "exist_ok", "resume"), PLACE),
    **dict.fromkeys(
        ("device", "workers", "multiprocessing_start", "cache", "cache_gb", "cache_dir", "plots", "val_batch",
         "compile", "checkpoint", "offload", "pipeline", "grow_after", "save_minutes", "save_period", "on_save_error",
         "max_bad_steps"),
        MACHINE,
    ),
    "seed": "trials are to differ by their parameters alone",
    "recipe": "it sets several settings; vary those",
    "extend_lr": "no trial is extended",
}  # fmt: skip
KEYS = ("low", "high", "log", "step", "choices", "when")

Value = bool | int | float | str | None
Where = Callable[[str], str]  # a setting -> where it is written


@dataclass(frozen=True)
class Parameter:
    """A setting that is varied."""

    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None  # None: any number between; of whole numbers 1
    whole: bool = False
    choices: tuple[Value, ...] = ()
    when: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)  # other settings: at which values it is varied

    def suggested(self, trial: "Trial") -> Value:
        """Its value in a trial: the one it has already, or a new one of the sampler's."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)

    def active(self, values: Mapping[str, Any]) -> bool:
        """Whether it is varied in a trial with these settings."""
        return all(values[key] in wanted for key, wanted in self.when.items())


NOTHING = Parameter("")


@dataclass(frozen=True)
class Space:
    """All that is varied, each after what it depends on, and the settings that the file fixes."""

    parameters: tuple[Parameter, ...]
    fixed: dict[str, Any]

    def described(self) -> dict[str, Any]:
        """As plain data: two files that mean the same give the same."""
        described = {one.name: _plain(one) for one in sorted(self.parameters, key=lambda one: one.name)}
        return {**described, **dict(sorted(self.fixed.items()))}


def read_space(file: Path, common: Mapping[str, Any]) -> Space:
    """The space in a file, for trials that have the settings `common`.

    Raises ConfigError, with the file and the line, for what is no setting, cannot be searched, is no range, or has a
    value that the settings refuse.
    """
    written, lines = _read(file)

    def where(name: str) -> str:
        return f"{file}:{lines[name]}"

    for name in written:
        if name not in Settings.model_fields:
            raise ConfigError(f"{where(name)}: {unknown(Settings, name)}")
        if name in NOT_SEARCHED:
            raise ConfigError(
                f"{where(name)}: {name}: cannot be searched: {NOT_SEARCHED[name]}; put one value into the config file"
            )
    varied = {name: value for name, value in written.items() if isinstance(value, dict)}
    if not varied:
        raise ConfigError(f"{file}: varies no setting; write at least one range, as lr0: {{low: 1e-4, high: 1e-1}}")
    fixed = {name: value for name, value in written.items() if name not in varied}
    fixed = {name: _accepted(common, name, value, file, where(name)) for name, value in fixed.items()}
    common = {**common, **fixed}
    found = {name: _parameter(name, value, common, file, where(name)) for name, value in sorted(varied.items())}
    return Space(tuple(_ordered(found, common, where)), fixed)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """{setting: what is written of it} and {setting: its line}."""
    lines: dict[str, int] = {}
    for key, _ in read_yaml(file, "search space").value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{file}:{line}: '{name}' is written twice, first in line {lines[name]}; keep one")
        lines[name] = line
    try:
        written = yaml.load(file.read_text(encoding="utf-8-sig"), Loader=Yaml) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not a YAML file: {' '.join(str(error).split())}") from None
    return {str(name): value for name, value in written.items()}, lines


def _parameter(name: str, written: dict[str, Any], common: Mapping[str, Any], file: Path, place: str) -> Parameter:
    """The parameter that a mapping of the file means, without its `when` being looked at by what it names."""
    for key in written:
        if key not in KEYS:
            raise ConfigError(f"{place}: {name}: '{key}' is none of {', '.join(KEYS)}.{did_you_mean(key, KEYS)}")
    when = written.get("when", {})
    if not isinstance(when, dict):
        raise ConfigError(f"{place}: {name}: when={when!r}: is a mapping, as when: {{optimizer: AdamW}}")
    conditions = {}
    for other, value in when.items():
        if other not in Settings.model_fields:
            raise ConfigError(f"{place}: {name}: when: {unknown(Settings, str(other))}")
        values = value if isinstance(value, list) else [value]
        at = f"{place}: {name}: when"
        conditions[str(other)] = tuple(_accepted(common, other, one, file, at) for one in values)
    # The first of each, so that a value which is right only then is looked at as it will be.
    common = {**common, **{other: values[0] for other, values in conditions.items() if values}}
    if "choices" in written:
        if others := sorted(written.keys() & {"low", "high", "log", "step"}):
            raise ConfigError(f"{place}: {name}: has choices and {', '.join(others)}; keep one way")
        return Parameter(name, choices=_choices(name, written["choices"], common, file, place), when=conditions)
    return _range(name, written, common, conditions, file, place)


def _choices(name: str, written: Any, common: Mapping[str, Any], file: Path, place: str) -> tuple[Value, ...]:
    if not isinstance(written, list) or len(written) < 2:
        raise ConfigError(f"{place}: {name}: choices={written!r}: name two or more, as choices: [a, b]")
    if any(isinstance(one, list | dict) for one in written):
        raise ConfigError(f"{place}: {name}: choices={written!r}: are single words and numbers, no lists and mappings")
    choices = tuple(_accepted(common, name, one, file, place) for one in written)
    for number, one in enumerate(choices):
        if one in choices[:number]:
            raise ConfigError(f"{place}: {name}: the choice {one!r} stands there twice; keep one")
    return choices


def _range(
    name: str,
    written: dict[str, Any],
    common: Mapping[str, Any],
    when: Mapping[str, tuple[Value, ...]],
    file: Path,
    place: str,
) -> Parameter:
    if not takes(Settings, name, float) and not takes(Settings, name, int):
        raise ConfigError(f"{place}: {name}: is no number, so it has no range; name choices: [...]")
    if missing := [key for key in ("low", "high") if key not in written]:
        raise ConfigError(f"{place}: {name}: lacks {' and '.join(missing)}; a range is {{low: 1e-4, high: 1e-1}}")
    low, high, step, log = (written.get(key) for key in ("low", "high", "step", "log"))
    for key, value in (("low", low), ("high", high), ("step", step)):
        if not _is_number(value) and not (key == "step" and value is None):
            raise ConfigError(f"{place}: {name}: {key}={value!r}: is no number")
    if log not in (None, True, False):
        raise ConfigError(f"{place}: {name}: log={log!r}: is true or false")
    if low >= high:
        raise ConfigError(
            f"{place}: {name}: low={low} and high={high} "
            + (f"are one value; write {name}: {low}" if low == high else "are the wrong way round; swap them")
        )
    if log and low <= 0:
        raise ConfigError(f"{place}: {name}: low={low}: log: true takes numbers above 0; name a small one, or no log")
    if log and step is not None:
        raise ConfigError(f"{place}: {name}: has log and step; keep one")
    _check_step(name, low, high, step, place)
    whole = not takes(Settings, name, float)
    middle = low + (step or (1 if whole else (high - low) / 2))
    for value in (low, high, middle):
        _accepted(common, name, value, file, place)
    kind = int if whole else float
    step = None if step is None else kind(step)
    return Parameter(name, kind(low), kind(high), bool(log), step, whole, when=when)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_step(name: str, low: float, high: float, step: float | None, place: str) -> None:
    if step is None:
        return
    if step <= 0:
        raise ConfigError(f"{place}: {name}: step={step}: is above 0")
    first, last, by = (Decimal(str(one)) for one in (low, high, step))
    if rest := (last - first) % by:
        reached = last - rest
        remedy = f"write high: {reached}" if reached > first else "take a smaller step"
        raise ConfigError(f"{place}: {name}: no number of steps of {step} leads from {low} to {high}; {remedy}")


def _accepted(common: Mapping[str, Any], name: str, value: Any, file: Path, place: str) -> Any:
    """A value as the settings have it, plain; ConfigError with the place where they refuse it."""
    value = resolved(Settings, name, value, file.resolve().parent)
    settings = validated(Settings, {**common, name: value}, {name: place}, place)
    return settings.model_dump(mode="json", include={name})[name]


def _ordered(found: Mapping[str, Parameter], common: Mapping[str, Any], where: Where) -> Iterator[Parameter]:
    """The parameters, each after those in its `when`; ConfigError where that cannot be or never comes true."""
    given = validated(Settings, dict(common), {}, "settings").model_dump(mode="json")
    for name, one in found.items():
        for other, wanted in one.when.items():
            _check_condition(f"{where(name)}: {name}: when: {other}", other, wanted, found, given)
    done: dict[str, Parameter] = {}
    while len(done) < len(found):
        ready = [one for one in found.values() if one.name not in done and not one.when.keys() & found.keys() - done]
        if not ready:
            left = sorted(found.keys() - done)
            raise ConfigError(f"{where(left[0])}: {', '.join(left)}: wait for one another by their `when`")
        done |= {ready[0].name: ready[0]}
        yield ready[0]


def _check_condition(
    said: str, other: str, wanted: tuple[Value, ...], found: Mapping[str, Parameter], given: Mapping[str, Any]
) -> None:
    if not wanted:
        raise ConfigError(f"{said}: names no value")
    if other not in found:
        if given[other] not in wanted:
            raise ConfigError(f"{said}={_told(wanted)}: never comes true: {other} is not varied, it is {given[other]}")
        return
    choices = found[other].choices
    if not choices:
        raise ConfigError(f"{said}: has a range, and a condition takes choices")
    if strange := [one for one in wanted if one not in choices]:
        raise ConfigError(f"{said}={strange[0]}: is none of its choices, {_told(choices)}")


def _told(values: tuple[Value, ...]) -> str:
    return ", ".join(str(one) for one in values)


def _plain(one: Parameter) -> dict[str, Any]:
    """What is not left out of a parameter."""
    described = {key: value for key, value in asdict(one).items() if value != getattr(NOTHING, key)}
    described.pop("name")
    if "choices" in described:
        described["choices"] = list(described["choices"])
    if "when" in described:
        described["when"] = {key: list(values) for key, values in sorted(described["when"].items())}
    return described


def space_of(described: Mapping[str, Any], common: Mapping[str, Any]) -> Space:
    """The space that `described` gave, for trials that have the settings `common`."""
    found, fixed = {}, {name: value for name, value in described.items() if not isinstance(value, dict)}
    for name in sorted(described.keys() - fixed.keys()):
        value = described[name]
        when = {key: tuple(values) for key, values in value.get("when", {}).items()}
        found[name] = Parameter(name, **{**value, "choices": tuple(value.get("choices", ())), "when": when})
    return Space(tuple(_ordered(found, {**common, **fixed}, str)), fixed)
