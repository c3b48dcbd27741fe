"""One validated, frozen settings object per run.

Keys keep the names that YOLO users know and are flat in a file; in code they are grouped by topic, one small class
each, and joined by inheritance. A setting comes from the defaults, then the config file, then `key=value` overrides.
Relative paths are relative to the file that names them (an override's: to the working directory).
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from detector.errors import ConfigError, did_you_mean

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
FilePath = Annotated[Path, Field(strict=False)]  # a str is as good as a Path
STRIDE = 32  # the coarsest stride of the networks: image sides are multiples of it


class Group(BaseModel):
    """Base of the groups: unknown keys, wrong types and later changes are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelKeys(Group):
    model: Annotated[str, Field(description="v11n .. v11x, or a model YAML")] = "v11n"
    weights: Annotated[FilePath | None, Field(description="a checkpoint to start from")] = None
    freeze: Annotated[
        int | list[int], Field(description="the first N layers, or a list of layers, stay as they are")
    ] = 0
    bn: Annotated[
        Literal["batch", "sync", "frozen"],
        Field(description="BatchNorm: by micro-batch, over devices, or by running statistics"),
    ] = "batch"
    freeze_bn: Annotated[bool, Field(description="short for bn: frozen")] = False

    @field_validator("freeze")
    @classmethod
    def layers_exist(cls, value: int | list[int]) -> int | list[int]:
        if min([value] if isinstance(value, int) else value, default=0) < 0:
            raise ValueError("layers are counted from 0")
        return value


class DataKeys(Group):
    data: Annotated[FilePath | None, Field(description="the data set's YAML")] = None
    names: Annotated[list[str] | None, Field(description="class names in place of the data set's")] = None
    imgsz: Annotated[int, Field(ge=STRIDE, description="side of the network's input, a multiple of 32")] = 640
    batch: Annotated[
        AtLeastOne | Literal["auto"],
        Field(description="images of a micro-batch: what one device takes at once; auto: the fastest that fits"),
    ] = 16
    workers: Annotated[Count | Literal["auto"], Field(description="processes that prepare images; 0: none")] = "auto"
    multiprocessing_start: Annotated[
        Literal["auto", "fork", "spawn", "forkserver"],
        Field(description="how those processes are started; auto: by what is safe on this system"),
    ] = "auto"
    cache: Annotated[bool | Literal["auto"], Field(description="keep resized images in memory; auto: if they fit")] = (
        "auto"
    )
    bad_images: Annotated[
        Literal["skip", "error"], Field(description="damaged images: they count for nothing, or stop the run")
    ] = "skip"

    @field_validator("names", mode="before")
    @classmethod
    def numbered(cls, value: Any) -> Any:
        """A map {0: cat, 1: dog} is as good as a list."""
        if isinstance(value, dict):
            if sorted(value, key=str) != sorted(range(len(value)), key=str):
                raise ValueError(f"numbers the classes {list(value)}; they are 0 to {len(value) - 1}")
            return [value[number] for number in range(len(value))]
        return value

    @field_validator("imgsz")
    @classmethod
    def multiple_of_stride(cls, value: int) -> int:
        if value % STRIDE:
            raise ValueError(f"must be a multiple of {STRIDE}; the nearest is {max(round(value / STRIDE), 1) * STRIDE}")
        return value


class DeviceKeys(Group):
    device: Annotated[str | int | list[int], Field(description="auto, cpu, a GPU: 0, or several: '0,1', cpu:2")] = (
        "auto"
    )
    amp: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], Field(description="precision of the network's arithmetic")
    ] = "auto"


class MemoryKeys(Group):
    checkpoint: Annotated[
        Literal["off", "stages", "all"], Field(description="activations that are computed again instead of kept")
    ] = "off"
    offload: Annotated[bool, Field(description="activations wait in host memory for the backward pass")] = False
    grow_after: Annotated[
        Count, Field(description="steps after which a micro-batch that memory ran out for is tried again; 0: never")
    ] = 0
    val_batch: Annotated[AtLeastOne | None, Field(description="images validated at once; left out: batch")] = None

    @field_validator("checkpoint", mode="before")
    @classmethod
    def off_is_a_word(cls, value: Any) -> Any:
        """YAML reads a plain `off` as false."""
        return "off" if value is False else value


class StepKeys(Group):
    nbs: Annotated[AtLeastOne, Field(description="nominal batch: what the hyper-parameters are tuned for")] = 64
    optimizer: Literal["auto", "SGD", "AdamW"] = "auto"
    lr0: Annotated[Positive, Field(description="learning rate at the end of warmup")] = 0.01
    lrf: Annotated[Fraction, Field(description="last learning rate = lr0 * lrf")] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1, description="SGD's momentum, Adam's first beta")] = 0.937
    weight_decay: NotNegative = 0.0005
    cos_lr: Annotated[bool, Field(description="cosine instead of linear decay")] = False
    warmup_epochs: NotNegative = 3.0
    warmup_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.8
    warmup_bias_lr: NotNegative = 0.1
    nbs_scope: Annotated[Literal["total", "device"], Field(description="whether nbs is the run's or each device's")] = (
        "total"
    )
    scale_lr: Annotated[
        Literal["none", "linear", "sqrt"], Field(description="how lr0 grows with windows larger than nbs")
    ] = "linear"
    accumulate_warmup: Annotated[bool, Field(description="ramp the window from one micro-batch during warmup")] = True
    clip_norm: Annotated[Positive, Field(description="largest norm of a step's gradient")] = 10.0


class LossKeys(Group):
    box: NotNegative = 7.5
    cls: NotNegative = 0.5
    dfl: NotNegative = 1.5


class AugmentKeys(Group):
    hsv_h: Annotated[Fraction, Field(description="hue, as a fraction of the circle")] = 0.015
    hsv_s: Fraction = 0.7
    hsv_v: Fraction = 0.4
    degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    translate: Fraction = 0.1
    scale: Annotated[float, Field(ge=0, lt=1)] = 0.5
    shear: Annotated[float, Field(ge=0, lt=90)] = 0.0
    perspective: Annotated[float, Field(ge=0, le=0.001)] = 0.0
    flipud: Fraction = 0.0
    fliplr: Fraction = 0.5
    mosaic: Fraction = 1.0
    mixup: Fraction = 0.0
    cutmix: Fraction = 0.0
    close_mosaic: Annotated[Count, Field(description="last epochs without mosaic, mixup and cutmix")] = 10


class FolderKeys(Group):
    project: Annotated[FilePath, Field(description="folder of the runs")] = Path("runs")
    name: Annotated[str | None, Field(description="the run's folder; left out: the next free trainN")] = None
    exist_ok: Annotated[bool, Field(description="write into a run folder that exists")] = False


class RunKeys(FolderKeys):
    epochs: AtLeastOne = 100
    patience: Annotated[Count, Field(description="epochs without a better result before stopping; 0: never")] = 100
    seed: Count = 0
    val: Annotated[bool, Field(description="validate after every epoch")] = True
    plots: Annotated[bool, Field(description="draw images and curves")] = True
    metric: Annotated[
        Literal["mAP50-95", "mAP50", "mAP75", "precision", "recall", "F1", "box", "cls", "dfl"],
        Field(description="a column of metrics.csv: what is best; of the training losses the lowest"),
    ] = "mAP50-95"
    max_bad_steps: Annotated[AtLeastOne, Field(description="steps in a row that are not finite before stopping")] = 10
    save_minutes: Annotated[
        NotNegative, Field(description="also save inside an epoch, so often; 0: only at its end")
    ] = 10.0
    on_save_error: Annotated[Literal["stop", "warn"], Field(description="when a checkpoint cannot be written")] = "stop"
    save_period: Annotated[int, Field(ge=-1, description="also keep every n-th epoch's checkpoint; -1: none")] = -1
    resume: Annotated[FilePath | None, Field(description="a run's folder or checkpoint to go on from")] = None
    extend_lr: Annotated[
        Literal["rescale", "constant-final", "restart-cosine"],
        Field(description="the learning rate of a run that is resumed with more epochs"),
    ] = "rescale"


class Settings(ModelKeys, DataKeys, DeviceKeys, MemoryKeys, StepKeys, LossKeys, AugmentKeys, RunKeys):
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

    def to_yaml(self) -> str:
        """The settings as a config file that loads to equal settings."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class TuneSettings(Settings):
    """Settings of `detector tune`: those of a run, and the memory it may take."""

    memory: Annotated[str | None, Field(description="what a device may give, as 4GiB; left out: what is free")] = None

    @field_validator("memory", mode="before")
    @classmethod
    def number_alone(cls, value: Any) -> Any:
        """A number without a unit, which YAML reads as one, is told of its unit where the text is read."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    def of_run(self) -> Settings:
        """The settings of the run alone."""
        return Settings(**{key: getattr(self, key) for key in self.model_fields_set & Settings.model_fields.keys()})


class ValSettings(DeviceKeys, FolderKeys):
    """Settings of `detector val`."""

    data: FilePath | None = None
    split: Literal["train", "val", "test"] = "val"
    imgsz: Annotated[int | None, Field(ge=STRIDE, multiple_of=STRIDE)] = None
    batch: AtLeastOne = 16
    workers: Count | Literal["auto"] = "auto"
    multiprocessing_start: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    conf: Fraction = 0.001
    iou: Fraction = 0.7
    max_det: AtLeastOne = 300
    plots: bool = True
    bad_images: Literal["skip", "error"] = "skip"


class PredictSettings(DeviceKeys, FolderKeys):
    """Settings of `detector predict`."""

    imgsz: Annotated[int | None, Field(ge=STRIDE, multiple_of=STRIDE)] = None
    batch: AtLeastOne = 16
    conf: Fraction = 0.25
    iou: Fraction = 0.7
    max_det: AtLeastOne = 300
    save_txt: bool = False


class Origin(NamedTuple):
    """Where a setting was written, and the folder its relative path starts from."""

    place: str
    folder: Path


AnySettings = TypeVar("AnySettings", bound=Group)


def file_and_overrides(words: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """The config file that a command line may begin with, and its `key=value` words."""
    return (Path(words[0]), words[1:]) if words and "=" not in words[0] else (None, words)


def load_settings(cls: type[AnySettings], file: Path | None, overrides: Sequence[str] = ()) -> AnySettings:
    """Settings of the kind `cls` from a config file (or none) and `key=value` overrides, whose values are YAML.

    Raises ConfigError with the place for a missing file, bad YAML, an unknown key (with the nearest name), a wrong type
    and a value out of range.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for key, value, origin in [*_from_file(file), *_from_overrides(overrides)]:
        if key not in cls.model_fields:
            raise ConfigError(f"{origin.place}: '{key}' is not a setting.{did_you_mean(key, cls.model_fields)}")
        values[key], origins[key] = value, origin
    for key, origin in origins.items():
        values[key] = _resolved(key, values[key], origin.folder)
    return validated(cls, values, {key: origin.place for key, origin in origins.items()}, str(file or "settings"))


def validated(
    cls: type[AnySettings], values: dict[str, Any], places: dict[str, str], default_place: str
) -> AnySettings:
    """`cls(**values)`, with pydantic's complaints turned into one ConfigError that names each place."""
    try:
        return cls(**values)
    except ValidationError as error:
        complaints: dict[str, str] = {}
        for item in error.errors():
            key = str(item["loc"][0]) if item["loc"] else ""
            if not key:
                complaints[key] = f"{default_place}: {_reason(item)}"
            elif key not in cls.model_fields:
                complaints[key] = f"{default_place}: '{key}' is not a setting.{did_you_mean(key, cls.model_fields)}"
            else:
                place = places.get(key, default_place)
                before = complaints.get(key)
                complaints[key] = (
                    f"{before} or {_reason(item)}" if before else f"{place}: {key}={values[key]!r}: {_reason(item)}"
                )
        raise ConfigError("\n".join(complaints.values())) from None


def _reason(item: Any) -> str:
    return (
        item["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "should be")
        .replace("a valid integer", "an integer")
        .replace("a valid ", "a ")
    )


def read_yaml(path: Path, kind: str) -> yaml.MappingNode:
    """The top-level mapping of a YAML file as a node (keys carry line numbers); ConfigError if it is not one."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=Yaml)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this {kind}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if node is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: a {kind} is a list of 'key: value' lines")
    return node


def _from_file(file: Path | None) -> Iterator[tuple[str, Any, Origin]]:
    if file is None:
        return
    seen: dict[str, int] = {}
    for key_node, value_node in read_yaml(file, "config file").value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(f"{file}:{line}: '{key}' is set twice, first in line {seen[key]}; keep one")
        seen[key] = line
        yield key, _construct(value_node), Origin(f"{file}:{line}", file.resolve().parent)


def _from_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, Any, Origin]]:
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"'{text}': an override is written key=value, for example epochs=50")
        try:
            parsed = yaml.load(value, Loader=Yaml)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text}: the value is not YAML: {' '.join(str(error).split())}") from None
        yield key.strip(), parsed, Origin("command line", Path.cwd())


def _resolved(key: str, value: Any, folder: Path) -> Any:
    """Paths made absolute; a model is a path only when it looks like one."""
    is_path = key in {"data", "weights", "project", "resume"} or (
        key == "model" and str(value).endswith((".yaml", ".yml"))
    )
    if not is_path or not isinstance(value, str):
        return value
    path = (folder / Path(value).expanduser()).resolve()
    return str(path) if key == "model" else path


class Yaml(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, as in YAML 1.2."""


Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _construct(node: yaml.Node) -> Any:
    loader = Yaml("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()
