"""One validated, frozen settings object per run.

Keys keep the names that YOLO users know and are flat in a file; in code they are grouped by topic, one small class
each, and joined by inheritance. A setting comes from the defaults, then the config file, then `key=value` overrides.
Relative paths are relative to the file that names them (an override's: to the working directory).
"""

from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from detector.config.groups import (
    AugmentKeys,
    CompileKeys,
    DataKeys,
    DeviceKeys,
    LossKeys,
    MemoryKeys,
    ModelKeys,
    RunKeys,
    StepKeys,
)
from detector.config.kinds import (
    AtLeastOne,
    Count,
    FilePath,
    Text,
    numbers,
)  # fmt: skip
from detector.config.reading import load_settings, read_yaml, validated
from detector.spelling import Words

__all__ = [
    "SearchSettings", "Settings", "TrainSettings", "TuneSettings", "load_settings", "read_yaml", "validated",
]  # fmt: skip


class Settings(ModelKeys, DataKeys, DeviceKeys, CompileKeys, MemoryKeys, StepKeys, LossKeys, AugmentKeys, RunKeys):
    """Everything that defines a training run."""

    @model_validator(mode="after")
    def whole(self) -> "Settings":
        if self.data is None and self.resume is None:
            raise ValueError("'data' is missing: name the data set's YAML, for example data=datasets/shapes.yaml")
        if self.freeze_bn and self.bn not in ("batch", "frozen"):
            raise ValueError(f"freeze_bn=true is short for bn=frozen and contradicts bn={self.bn}; keep one")
        return self

    @property
    def norm(self) -> str:
        """The kind of BatchNorm, with the short form resolved."""
        return "frozen" if self.freeze_bn else self.bn

    def warmup(self) -> float:
        """Epochs of warmup: never more than all but the last."""
        return min(self.warmup_epochs, self.epochs - 1)

    def closing(self) -> int:
        """The last epochs, which have no mosaic, copy-paste, mixup and cutmix.

        What was written, as it was written; else 10 of them, and at most a quarter of a short run, which would have
        seen none. `auto` is saved as such, so that a run that is extended has it follow from its new length.
        """
        return min(10, self.epochs // 4) if self.close_mosaic == "auto" else self.close_mosaic

    def to_yaml(self) -> str:
        """The settings as a config file that loads to equal settings."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class TuneSettings(Settings):
    """Settings of `detector tune`: those of a run, and the memory it may take."""

    memory: Annotated[Text | None, Field(description="what a device may give, as 4GiB; left out: what is free")] = None

    def of_run(self) -> Settings:
        """The settings of the run alone."""
        return Settings(**{key: getattr(self, key) for key in self.model_fields_set & Settings.model_fields.keys()})


class TrainSettings(Settings):
    """Settings of `detector train`: those of a run, or of several that differ in their seed."""

    seed: Annotated[Count | list[Count], BeforeValidator(numbers)] = 0

    @property
    def seeds(self) -> list[int] | None:
        """The seeds, where they are several."""
        return self.seed if isinstance(self.seed, list) else None

    def of_run(self) -> Settings:
        """The settings of one run, with the first seed."""
        values = {key: getattr(self, key) for key in self.model_fields_set}
        return Settings(**values | ({"seed": self.seeds[0]} if self.seeds else {}))


class SearchSettings(Settings):
    """Settings of `detector search`: those that its trials have in common, and the search's own.

    `project`, `name` and `resume` are of the search's folder, in which each trial has one of its own.
    """

    space: Annotated[FilePath | None, Field(description="YAML of what is varied: settings with ranges or choices")] = (
        None
    )
    trials: Annotated[AtLeastOne | None, Field(description="in all; left out: 50, or what they were before")] = None
    objectives: Annotated[
        list[Text] | None,
        Field(description="what is sought: columns of metrics.csv, latency; left out: metric"),
    ] = None
    pruner: Annotated[
        Literal["median", "hyperband", "none"],
        Words(also={"false": "none", "no": "none", "off": "none"}),
        Field(description="which trials are ended early: those below the median, by hyperband's rule, or none"),
    ] = "median"
    storage: Annotated[
        Literal["sqlite", "journal"],
        Words(),
        Field(description="how the search is kept; journal: for workers of several machines on a shared disk"),
    ] = "sqlite"

    @field_validator("objectives", mode="before")
    @classmethod
    def one_objective(cls, value: Any) -> Any:
        """One alone is as good as a list of one, and 'mAP50,latency' as good as [mAP50, latency]."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    def common(self) -> dict[str, Any]:
        """What was written of the settings that the trials have in common, as plain values."""
        written = self.model_fields_set & Settings.model_fields.keys() - {"project", "name", "exist_ok", "resume"}
        return self.model_dump(mode="json", include=written)
