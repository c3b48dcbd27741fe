"""The settings of the commands that train nothing, each joined from groups by topic as those of a run are."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from detector.config.groups import (
    BadBoxes,
    CacheFolder,
    ClassKeys,
    DeviceKeys,
    FolderKeys,
    MissingLabels,
    NamesKey,
)
from detector.config.kinds import (
    AtLeastOne,
    Count,
    FilePath,
    Fraction,
    Group,
    Nms,
    NotNegative,
    Positive,
    Side,
    Text,
    Whole,
)  # fmt: skip
from detector.spelling import Words


class DetectorKeys(DeviceKeys):
    """A trained detector, and which of its boxes are detections."""

    also: ClassVar = {"model": "weights"}

    weights: Annotated[FilePath | None, Field(description="the checkpoint, the folder of its run, or an export")] = None
    imgsz: Annotated[Side | None, Field(description="as trained, if left out")] = None
    iou: Fraction = 0.7
    max_det: AtLeastOne = 300
    nms: Nms = "auto"


class UseKeys(DetectorKeys, FolderKeys):
    """What measuring and predicting have in common."""

    batch: AtLeastOne = 16
    layout: Annotated[
        Literal["raw", "detections"] | None,
        Words(),
        Field(description="what an export gives that another tool made, where its shape does not tell"),
    ] = None
    tile: Annotated[
        Whole | None,
        Field(ge=32, description="look at large images in squares of so many pixels; left out: as a whole"),
    ] = None
    overlap: Annotated[
        float | None, Field(ge=0, le=0.9, description="part of its side that tiles share; left out: 0.2")
    ] = None

    @model_validator(mode="after")
    def tiled(self) -> "UseKeys":
        if self.tile is None and self.overlap is not None:
            raise ValueError(
                f"overlap={self.overlap:g}: is shared by tiles, of which there are none; say tile=640, too"
            )
        return self


class ValSettings(ClassKeys, UseKeys):
    """Settings of `detector val`."""

    of = " of detector val"

    data: FilePath | None = None
    split: Annotated[Literal["train", "val", "test"], Words()] = "val"
    workers: Annotated[Count | Literal["auto"], Words()] = "auto"
    multiprocessing_start: Annotated[Literal["auto", "fork", "spawn", "forkserver"], Words()] = "auto"
    conf: Fraction = 0.001
    letterbox: Annotated[
        Literal["own", "public"],
        Words(),
        Field(description="how images are put into the network's input; public: as the public trainer validates"),
    ] = "own"
    plots: bool = True
    bad_images: Annotated[Literal["skip", "error"], Words()] = "skip"
    bad_boxes: BadBoxes = "clip"
    max_missing_labels: MissingLabels = 0.5
    cache_dir: CacheFolder = None
    save_json: Annotated[bool, Field(description="write detections.json, as COCO's tools read it")] = False
    against: Annotated[FilePath | None, Field(description="a checkpoint or export to measure beside this one")] = None

    @model_validator(mode="after")
    def letterboxed(self) -> "ValSettings":
        if self.tile is not None and self.letterbox == "public":
            raise ValueError(
                "letterbox=public: is how the public trainer puts whole images into the network's input, and "
                f"tile={self.tile} looks at parts of them; keep one"
            )
        return self


class PredictSettings(NamesKey, UseKeys):
    """Settings of `detector predict`."""

    of = " of detector predict"

    source: Annotated[
        Text | list[Text] | None,
        Field(description="files, folders, globs, text files of paths, videos, cameras (0), streams, - for stdin"),
    ] = None
    recursive: Annotated[bool, Field(description="folders in folders, too")] = False
    conf: Fraction = 0.25
    vid_stride: Annotated[AtLeastOne, Field(description="of a video or stream every so-manieth frame")] = 1
    start: Annotated[NotNegative, Field(description="second of a video to begin at")] = 0.0
    stop: Annotated[Positive | None, Field(description="second of a video or stream to end at")] = None
    track: Annotated[
        Literal["bytetrack"] | None,
        Words(
            also={"bytetrack.yaml": "bytetrack"},
            told={"botsort": "not here: bytetrack", "true": "say which: bytetrack"},
        ),
        Field(description="follow objects through a video, each with a number"),
    ] = None
    save: Annotated[bool, Field(description="write images and videos with boxes")] = True
    save_txt: Annotated[bool, Field(description="write labels/NAME.txt, in the YOLO format with scores")] = False
    save_json: Annotated[bool, Field(description="write detections.json, as COCO's tools read it")] = False
    save_csv: Annotated[bool, Field(description="write detections.csv, a row a detection")] = False
    save_crop: Annotated[bool, Field(description="write what is in each box, by class, into crops/")] = False
    show: Annotated[bool, Field(description="show results in a window")] = False


class DemoSettings(DetectorKeys):
    """Settings of `detector demo`."""

    of = " of detector demo"

    conf: Fraction = 0.25
    port: Annotated[
        int | None, Field(ge=1, le=65535, description="where the page is served; left out: 7860 or the next free one")
    ] = None


class CheckSettings(NamesKey, FolderKeys):
    """Settings of `detector check`."""

    of = " of detector check"

    data: Annotated[FilePath | None, Field(description="the data set's YAML")] = None
    split: Annotated[
        list[Annotated[Literal["train", "val", "test"], Words()]] | None,
        Field(description="which splits; left out: all that the data set names"),
    ] = None
    imgsz: Annotated[Side, Field(description="at which the sizes of boxes are told")] = 640
    fast: Annotated[bool, Field(description="leave out what needs the images decoded")] = False
    max_missing_labels: MissingLabels = 0.5
    cache_dir: CacheFolder = None

    @field_validator("split", mode="before")
    @classmethod
    def one_split(cls, value: Any) -> Any:
        """A split alone is as good as a list of one."""
        return [value] if isinstance(value, str) else value


class RunsSettings(Group):
    """Settings of `detector runs`."""

    of = " of detector runs"
    also: ClassVar = {"json": "as_json"}  # which is a method of pydantic's

    folder: Annotated[FilePath, Field(description="folder of the runs")] = Path("runs")
    as_json: Annotated[bool, Field(description="written json=true: JSON, for scripts")] = False


class CompareSettings(ClassKeys, DeviceKeys):
    """Settings of `detector compare`."""

    of = " of detector compare"

    runs: Annotated[list[FilePath] | None, Field(description="folders of runs, or checkpoints; two at least")] = None
    data: Annotated[FilePath | None, Field(description="the data set to measure on; left out: that of the runs")] = None
    split: Annotated[Literal["train", "val", "test"], Words()] = "val"
    imgsz: Annotated[Side | None, Field(description="left out: each as it was trained")] = None
    batch: AtLeastOne = 16
    iou: Fraction = 0.7
    max_det: AtLeastOne = 300
    nms: Nms = "auto"
    workers: Annotated[Count | Literal["auto"], Words()] = "auto"
    multiprocessing_start: Annotated[Literal["auto", "fork", "spawn", "forkserver"], Words()] = "auto"
    bad_boxes: BadBoxes = "clip"
    max_missing_labels: MissingLabels = 0.5
    cache_dir: CacheFolder = None
    draws: Annotated[AtLeastOne, Field(description="times that the images are drawn anew for the intervals")] = 1000
    seed: Count = 0
    html: Annotated[bool, Field(description="write the page")] = True
    out: Annotated[FilePath | None, Field(description="the page; left out: compare.html in a new folder")] = None
    project: Annotated[FilePath, Field(description="folder of that new folder")] = Path("runs")

    @field_validator("out")
    @classmethod
    def page(cls, value: Path | None) -> Path | None:
        if value is not None and value.suffix.lower() not in (".html", ".htm"):
            raise ValueError("is a page: name a file that ends in .html")
        return value

    def of_val(self) -> ValSettings:
        """How each of the runs is measured."""
        shared = self.model_fields_set & ValSettings.model_fields.keys()
        return ValSettings(**{key: getattr(self, key) for key in shared}, plots=False)


class ReportSettings(DeviceKeys):
    """Settings of `detector report`."""

    of = " of detector report"

    run: Annotated[FilePath | None, Field(description="the folder of a run")] = None
    out: Annotated[FilePath | None, Field(description="the page to write; left out: report.html in that folder")] = None
    data: Annotated[FilePath | None, Field(description="where the data set's YAML is now, if not where it was")] = None


class InfoSettings(Group):
    """Settings of `detector info`."""

    of = " of detector info"
    also: ClassVar = {"model": "weights"}

    weights: Annotated[FilePath | None, Field(description="the checkpoint, or the folder of its run")] = None


class ConvertSettings(Group):
    """Settings of `detector convert`."""

    of = " of detector convert"
    also: ClassVar = {"model": "weights"}

    weights: Annotated[FilePath | None, Field(description="the checkpoint, or the folder of its run")] = None
    to: Annotated[FilePath | None, Field(description="the file to write")] = None
    format: Annotated[
        Literal["checkpoint", "state_dict"], Words(), Field(description="one of ours, or tensors and their names alone")
    ] = "checkpoint"
    exist_ok: Annotated[bool, Field(description="replace the file where there is one")] = False


class ExportSettings(Group):
    """Settings of `detector export`."""

    of = " of detector export"
    also: ClassVar = {"model": "weights"}

    weights: Annotated[FilePath | None, Field(description="the checkpoint, or the folder of its run")] = None
    to: Annotated[FilePath | None, Field(description="the file to write; left out: beside the checkpoint")] = None
    format: Annotated[
        Literal["onnx", "torchscript", "openvino", "torch_export", "tensorrt", "coreml", "litert", "executorch"],
        Words(),
        Field(description="what is written"),
    ] = "onnx"
    imgsz: Annotated[Side | None, Field(description="as trained, if left out")] = None
    batch: Annotated[
        AtLeastOne | Literal["dynamic"],
        Words(),
        Field(description="images that go in at once, each imgsz x imgsz; dynamic: any number of any size"),
    ] = "dynamic"
    half: Annotated[bool, Field(description="compute in float16")] = False
    int8: Annotated[bool, Field(description="compute in int8, calibrated on the data set")] = False
    data: Annotated[FilePath | None, Field(description="the data set's YAML; left out: the checkpoint's")] = None
    calibration: Annotated[AtLeastOne, Field(description="with int8=true: images of the training split")] = 64
    max_loss: Annotated[Fraction, Field(description="with int8=true: the loss of mAP50-95 that is allowed")] = 0.01
    nms: Annotated[
        bool | Literal["auto", "end2end"],
        Words(),
        Field(description="suppression inside; false, auto: left to the reader; end2end: the head that needs none"),
    ] = "auto"
    conf: Annotated[Fraction, Field(description="with nms=true: the least score of a detection")] = 0.001
    iou: Annotated[Fraction, Field(description="with nms=true: overlap above which the weaker box is dropped")] = 0.7
    max_det: Annotated[AtLeastOne, Field(description="with nms=true or end2end: detections of an image")] = 300
    images: Annotated[FilePath | None, Field(description="images to compare on; left out: the validation's")] = None
    exist_ok: Annotated[bool, Field(description="replace the file where there is one")] = False


class ConvertDataSettings(Group):
    """Settings of `detector convert-data`."""

    of = " of detector convert-data"

    data: Annotated[FilePath | None, Field(description="the data set's YAML")] = None
    to: Annotated[FilePath | None, Field(description="the folder to write")] = None
    format: Annotated[
        Literal["yolo", "coco", "voc", "shards"] | None, Words(), Field(description="what is written; to be named")
    ] = None
    link: Annotated[bool, Field(description="symbolic links to the images instead of copies")] = False
    polygons: Annotated[bool, Field(description="keep outlines where there are any, in COCO")] = False
    bad_boxes: BadBoxes = "clip"
    exist_ok: Annotated[bool, Field(description="write into a folder that is not empty")] = False
