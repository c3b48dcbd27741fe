"""The settings by topic: small classes, which `settings.py` and `uses.py` join to those of a command."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from detector.config.kinds import (
    AtLeastOne,
    Classes,
    Count,
    FilePath,
    FirstLayers,
    Fraction,
    Group,
    Nms,
    NotNegative,
    Positive,
    Sampling,
    Side,
    Text,
    Whole,
    model_named,
    named,
    numbers,
)  # fmt: skip
from detector.spelling import AMP, Words

OPTIMIZERS = "SGD, MuSGD, AdamW, or auto"

BadBoxes = Annotated[
    Literal["error", "clip", "drop_box", "drop_image"],
    Words(),
    Field(description="boxes that reach outside their image or break a rule: clip what can be, drop them, or stop"),
]
MissingLabels = Annotated[
    Fraction, Field(description="largest share of images without a label file; more stop the run")
]
CacheFolder = Annotated[
    FilePath | None, Field(description="folder for what is kept of large data sets; left out: beside the description")
]


class ModelKeys(Group):
    located: ClassVar = {"model": model_named}

    model: Annotated[
        Text, Field(description="v11n, v26s, v8m-p2 ..., or a model YAML; auto: that of the weights, or v11n")
    ] = "auto"
    weights: Annotated[FilePath | None, Field(description="a checkpoint to start from")] = None
    freeze: Annotated[
        Whole | list[Whole | Text],
        Field(description="the first N layers, or a list of layers and of parts by name ('23.cv2', '*.bn'), stay"),
    ] = 0
    nms: Nms = "auto"
    bn: Annotated[
        Literal["batch", "sync", "frozen"],
        Words(),
        Field(description="BatchNorm: by micro-batch, over devices, or by running statistics"),
    ] = "batch"
    freeze_bn: Annotated[bool, Field(description="short for bn: frozen")] = False

    @field_validator("model")
    @classmethod
    def description_and_not_weights(cls, value: str) -> str:
        if not value.lower().endswith(".pt"):
            return value
        if Path(value).exists():
            raise ValueError(
                f"is a checkpoint: weights={value} starts from it, and model is the one that it was trained with"
            )
        raise ValueError(
            "no such file, and nothing is downloaded: model=v11n, v26s, ... is a fresh network, and weights=FILE.pt "
            "starts it from a checkpoint that you have"
        )

    @field_validator("freeze", mode="before")
    @classmethod
    def one_part(cls, value: Any) -> Any:
        """A name alone is as good as a list of one."""
        return [value] if isinstance(value, str) else value

    @field_validator("freeze")
    @classmethod
    def layers_exist(cls, value: int | list[int | str]) -> int | list[int | str]:
        listed = [value] if isinstance(value, int) else value
        if min((one for one in listed if isinstance(one, int)), default=0) < 0:
            raise ValueError("layers are counted from 0")
        return value


class NamesKey(Group):
    names: Annotated[list[Text] | None, Field(description="class names in place of the data set's")] = None

    @field_validator("names", mode="before")
    @classmethod
    def numbered(cls, value: Any) -> Any:
        """A map {0: cat, 1: dog} is as good as a list."""
        if isinstance(value, dict):
            value = {int(key) if str(key).isdecimal() else key: name for key, name in value.items()}
            if sorted(value, key=str) != sorted(range(len(value)), key=str):
                raise ValueError(f"numbers the classes {list(value)}; they are 0 to {len(value) - 1}")
            return [value[number] for number in range(len(value))]
        return value


class ClassKeys(NamesKey):
    classes: Classes | None = None


class DataKeys(ClassKeys):
    data: Annotated[FilePath | None, Field(description="the data set's YAML")] = None
    imgsz: Annotated[Side, Field(description="side of the network's input, a multiple of 32")] = 640
    batch: Annotated[
        AtLeastOne | Literal["auto"],
        Words(also={"-1": "auto"}),
        Field(description="images of a micro-batch: what one device takes at once; auto: the fastest that fits"),
    ] = 16
    workers: Annotated[
        Count | Literal["auto"], Words(), Field(description="processes that prepare images; 0: none")
    ] = "auto"
    multiprocessing_start: Annotated[
        Literal["auto", "fork", "spawn", "forkserver"],
        Words(),
        Field(description="how those processes are started; auto: by what is safe on this system"),
    ] = "auto"
    cache: Annotated[
        Literal["auto", "ram", "disk", "off"],
        Words(also={"true": "ram", "yes": "ram", "on": "ram", "false": "off", "no": "off", "none": "off"}),
        Field(description="where resized images are kept; auto: in memory, if all of them fit"),
    ] = "auto"
    cache_gb: Annotated[
        NotNegative | None,
        Field(description="GiB that they may take; left out: most of what is free, with auto a quarter of it up to 8"),
    ] = None
    bad_images: Annotated[
        Literal["skip", "error"],
        Words(),
        Field(description="damaged images: they count for nothing, or stop the run"),
    ] = "skip"
    bad_boxes: BadBoxes = "clip"
    max_missing_labels: MissingLabels = 0.5
    cache_dir: CacheFolder = None
    fraction: Annotated[float, Field(gt=0, le=1, description="part of the training images, drawn by the seed")] = 1.0
    single_cls: Annotated[bool, Field(description="all boxes are of one class, 'item'")] = False
    sampling: Sampling = "uniform"

    @field_validator("batch", mode="before")
    @classmethod
    def images_and_no_share(cls, value: Any) -> Any:
        if isinstance(value, float) and 0 < value < 1:
            raise ValueError("a number of images, not a share of the memory; batch=auto takes the fastest that fits")
        return value


class DeviceKeys(Group):
    device: Annotated[
        str | int | list[int | str], Field(description="auto, cpu, a GPU: 0, or several: '0,1', cpu:2")
    ] = "auto"
    amp: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], Words(AMP), Field(description="precision of the network's arithmetic")
    ] = "auto"


class CompileKeys(Group):
    compile: Annotated[
        Literal["off", "default", "max"],
        Words(
            also={
                **dict.fromkeys(("false", "no"), "off"),  # YAML reads a plain `off` as false
                **dict.fromkeys(("true", "yes", "on"), "default"),
                **dict.fromkeys(("max-autotune", "max-autotune-no-cudagraphs"), "max"),
            },
            told={"reduce-overhead": "CUDA graphs want one shape, and micro-batches differ in size: default or max"},
        ),
        Field(description="training by compiled kernels (torch.compile); max: tries which of them are fastest"),
    ] = "off"


class MemoryKeys(Group):
    pipeline: Annotated[
        AtLeastOne | FirstLayers | Literal["auto", "off"],
        BeforeValidator(numbers),
        Words({"true": "auto", "yes": "auto", "on": "auto", "false": "off", "no": "off", "none": "off"}),
        Field(description="the network in stages, one a device: how many, auto: all, or the later ones' first layers"),
    ] = "off"
    checkpoint: Annotated[
        Literal["off", "stages", "all"],
        Words({"false": "off", "no": "off"}),  # YAML reads a plain `off` as false
        Field(description="activations that are computed again instead of kept"),
    ] = "off"
    offload: Annotated[bool, Field(description="activations wait in host memory for the backward pass")] = False
    grow_after: Annotated[
        Count, Field(description="steps after which a micro-batch that memory ran out for is tried again; 0: never")
    ] = 0
    val_batch: Annotated[AtLeastOne | None, Field(description="images validated at once; left out: batch")] = None


class StepKeys(Group):
    nbs: Annotated[
        AtLeastOne | Literal["auto"],
        Words(),
        Field(description="nominal batch, the images of a step; auto: 64, and in runs of few steps less, down to 16"),
    ] = "auto"
    optimizer: Annotated[
        Literal["auto", "SGD", "MuSGD", "AdamW"],
        Words(
            also={"muon": "MuSGD"},
            told={name: f"not here: {OPTIMIZERS}" for name in ("adam", "rmsprop", "nadam", "radam", "adamax")},
        ),
        Field(description="auto: MuSGD, by the public recipe AdamW in short runs, at rates of their own"),
    ] = "auto"
    lr0: Annotated[Positive, Field(description="learning rate at the end of warmup")] = 0.01
    lrf: Annotated[Fraction, Field(description="last learning rate = lr0 * lrf")] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1, description="momentum of SGD and MuSGD, Adam's first beta")] = 0.937
    weight_decay: NotNegative = 0.0005
    cos_lr: Annotated[bool, Field(description="cosine instead of linear decay")] = False
    warmup_epochs: NotNegative = 3.0
    warmup_momentum: Annotated[
        float, Field(ge=0, lt=1, description="momentum at the start of warmup; Adam's first beta has no warmup")
    ] = 0.8
    warmup_bias_lr: Annotated[
        NotNegative,
        Field(description="learning rate of biases at the start of warmup; where it is not set, 0 with AdamW and auto"),
    ] = 0.1
    nbs_scope: Annotated[
        Literal["total", "device"], Words(), Field(description="whether nbs is the run's or each device's")
    ] = "total"
    scale_lr: Annotated[
        Literal["none", "linear", "sqrt"], Words(), Field(description="how lr0 grows with windows larger than nbs")
    ] = "linear"
    accumulate_warmup: Annotated[bool, Field(description="ramp the window from one micro-batch during warmup")] = True
    clip_norm: Annotated[Positive, Field(description="largest norm of a step's gradient")] = 10.0
    ema_tau: Annotated[
        Positive | Literal["auto"],
        Words(),
        Field(
            description="steps over which the weights' average becomes a long one; auto: it is over a share of the run"
        ),
    ] = "auto"


class LossKeys(Group):
    box: NotNegative = 7.5
    cls: NotNegative = 0.5
    dfl: Annotated[
        NotNegative, Field(description="of the distribution focal loss; in v26 of the distances' L1 loss")
    ] = 1.5
    cls_pw: Annotated[Fraction, Field(description="classes weigh by boxes^-cls_pw, mean 1; 0: alike")] = 0.0


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
    copy_paste: Annotated[
        Fraction, Field(description="probability of an object with a polygon to be pasted a second time, mirrored")
    ] = 0.0
    albumentations: Annotated[
        list[Text | dict[str, dict[str, Any] | None]] | None,
        Field(description="transforms of that package, as `- HorizontalFlip: {p: 0.5}`; they keep the image's size"),
    ] = None
    multi_scale: Annotated[
        float, Field(ge=0, lt=1, description="each step's images have another size, up to so much smaller or larger")
    ] = 0.0
    close_mosaic: Annotated[
        Count | Literal["auto"],
        Words(),
        Field(description="last epochs without mosaic, copy-paste, mixup, cutmix; auto: 10, at most a quarter of them"),
    ] = "auto"


class FolderKeys(Group):
    project: Annotated[FilePath, Field(description="folder of the runs")] = Path("runs")
    name: Annotated[Text | None, Field(description="the run's folder; left out: the next free trainN")] = None
    exist_ok: Annotated[bool, Field(description="write into a run folder that exists")] = False


# What the public trainer does where this project's defaults are others; see docs/recipe.md.
PUBLIC = {"nbs": 64, "ema_tau": 2000.0, "close_mosaic": 10}


class RecipeKey(Group):
    recipe: Annotated[
        Literal["own", "public"],
        Words(),
        Field(description="where settings are left out: the defaults of this project, or the public trainer's"),
    ] = "own"

    @model_validator(mode="before")
    @classmethod
    def as_published(cls, values: dict[str, Any]) -> dict[str, Any]:
        """With `recipe: public`, its values for what was left out."""
        published = str(values.get("recipe")).strip().lower() == "public"
        return {**PUBLIC, **values} if published else values


class RunKeys(RecipeKey, FolderKeys):
    epochs: AtLeastOne = 100
    patience: Annotated[Count, Field(description="epochs without a better result before stopping; 0: never")] = 100
    seed: Count = 0
    val: Annotated[bool, Field(description="validate after every epoch")] = True
    plots: Annotated[bool, Field(description="draw images and curves")] = True
    quiet: Annotated[bool, Field(description="only warnings and results are printed")] = False
    log: Annotated[
        list[Literal["tensorboard", "mlflow", "wandb"]],
        BeforeValidator(named),
        Field(description="also report to these; each is an extra: pip install 'detector[tensorboard]'"),
    ] = Field(default_factory=list)
    metric: Annotated[
        Literal["mAP50-95", "mAP50", "mAP75", "precision", "recall", "F1", "box", "cls", "dfl", "l1"],
        Words(),
        Field(description="a column of metrics.csv: what is best; of the training losses the lowest"),
    ] = "mAP50-95"
    max_bad_steps: Annotated[AtLeastOne, Field(description="steps in a row that are not finite before stopping")] = 10
    save_minutes: Annotated[
        NotNegative, Field(description="also save inside an epoch, so often; 0: only at its end")
    ] = 10.0
    on_save_error: Annotated[
        Literal["stop", "warn"], Words(), Field(description="when a checkpoint cannot be written")
    ] = "stop"
    save_period: Annotated[Whole, Field(ge=-1, description="also keep every n-th epoch's checkpoint; -1: none")] = -1
    resume: Annotated[
        FilePath | bool | None,
        AfterValidator(lambda value: value or None),
        Field(description="a run's folder or checkpoint to go on from; true: the last run of `project`"),
    ] = None
    extend_lr: Annotated[
        Literal["rescale", "constant-final", "restart-cosine"],
        Words(),
        Field(description="the learning rate of a run that is resumed with more epochs"),
    ] = "rescale"
