"""Public checkpoints: files of the `ultralytics` package, read without it and without running any code.

Such a file is a pickled network. Its classes are named in it and looked up nowhere: each that is on the list here
becomes an empty stand-in, which torch's restricted loader fills with what the file says of the object. A name that is
not on the list is refused before anything is opened. What a network object says is read in `public_network`.
"""

import pickle
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from detector import public_network
from detector.errors import CheckpointError
from detector.public_network import Record

PACKAGE = "ultralytics"
# Classes by the module that they are pickled from. The package has moved its own about, so there their names count.
TORCH = {
    "activation": {"SiLU", "ReLU", "ReLU6", "LeakyReLU", "GELU", "Mish", "Hardswish", "ELU", "SELU", "Sigmoid"},
    "batchnorm": {"BatchNorm2d"},
    "container": {"ModuleList", "Sequential"},
    "conv": {"Conv2d", "ConvTranspose2d"},
    "linear": {"Identity"},
    "padding": {"ZeroPad2d"},
    "pooling": {"AvgPool2d", "MaxPool2d"},
    "upsampling": {"Upsample"},
}
LAYERS = {
    "Conv", "DWConv", "Concat", "Focus", "GhostConv", "ConvTranspose", "RepConv",
    "Bottleneck", "BottleneckCSP", "C1", "C2", "C2f", "C3", "C3x", "C3k", "C3k2", "C3Ghost", "GhostBottleneck",
    "SPP", "SPPF", "SPPELAN", "ELAN1", "RepNCSPELAN4", "RepCSP", "RepC3", "AConv", "ADown", "CBLinear", "CBFuse",
    "Silence", "Attention", "PSA", "PSABlock", "C2PSA", "C2fPSA", "SCDown", "CIB", "C2fCIB", "RepVGGDW", "A2C2f",
    "ABlock", "AAttn", "DFL", "Detect", "v10Detect",
}  # fmt: skip
NETWORKS = {"DetectionModel", "YOLOv10DetectionModel"}
# What lies beside a network: settings, a loss that was left on it, numbers and paths. None of it is needed.
BESIDE = {
    f"{PACKAGE}.utils.IterableSimpleNamespace", f"{PACKAGE}.yolo.utils.IterableSimpleNamespace",
    "types.SimpleNamespace", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
    "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
}  # fmt: skip
LOSSES = (
    f"{PACKAGE}.utils.loss.",
    f"{PACKAGE}.utils.tal.",
    f"{PACKAGE}.yolo.utils.loss.",
    f"{PACKAGE}.yolo.utils.tal.",
)
# How the classes of other tasks' networks and heads begin, and the tasks.
TASKS = {
    "OBB": "oriented boxes", "Segment": "segmentation", "Pose": "keypoints", "Classif": "classification",
    "World": "open-vocabulary detection", "YOLOE": "open-vocabulary detection", "RTDETR": "detection by transformers",
}  # fmt: skip
READ = f"only checkpoints of this trainer are read, and those of the {PACKAGE} package for detection"

alone = threading.RLock()  # to be held while a file is loaded: stand-ins are known to the whole process meanwhile


def read(path: Path) -> dict[str, Any]:
    """What a public checkpoint holds, as a checkpoint of ours says it.

    `ema` (fp32), `description`, `names`, `imgsz`, `metrics`, `epoch` (None: finished); `settings` is empty, and
    `origin` says whose file it is: `program`, `version`, `date`, `license`. `activations` and `strides` are there to be
    held against the network that is built, see `model.checkpoint`. Raises CheckpointError for any other file.
    """
    saved = _opened(path)
    found = [saved.get(key) for key in ("ema", "model")] if isinstance(saved, dict) else []
    network = next((one for one in found if isinstance(one, Record)), None)  # averages, where the run was not finished
    if network is None:
        raise CheckpointError(f"{path}: not a public checkpoint: it holds no network under 'model' or 'ema'; {READ}")
    arguments = _plain(getattr(network, "args", None)) | _plain(saved.get("train_args"))
    try:
        held = public_network.read(network)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        # Objects can be filled with anything, and what is missing first shows where it is used.
        raise CheckpointError(f"{path}: a network that is not made as the package makes them ({error})") from None
    epoch = saved.get("epoch")
    return {
        "ema": held.weights,
        "description": held.description,
        "names": held.names,
        "imgsz": _side(arguments.get("imgsz"), max(held.strides, default=0) or 32),
        "settings": {},
        "epoch": epoch + 1 if isinstance(epoch, int) and epoch >= 0 else None,  # theirs are counted from 0
        "metrics": _metrics(saved.get("train_metrics")),
        "origin": {
            "program": PACKAGE,
            **{key: str(saved[key]) for key in ("version", "date", "license") if key in saved},
        },
        "activations": held.activations,
        "strides": held.strides,
    }


def _opened(path: Path) -> Any:
    """The file's contents, whose objects are Records of classes named like theirs."""
    try:
        with alone:
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            _check(path, names)
            with torch.serialization.safe_globals([_stand_in(name) for name in names]):
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than plain tensors and data, and is not opened because it could run code; {READ}"
        ) from None
    except (RuntimeError, EOFError, OSError, LookupError, TypeError, AttributeError, AssertionError, struct.error,
            UnicodeDecodeError) as error:  # fmt: skip
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one ({reason})") from None


def _check(path: Path, names: Sequence[str]) -> None:
    """Raises CheckpointError where a name is not that of a detector's parts: another task, an older code base, else."""
    for name in names:
        package, kind = name.split(".")[0], name.rpartition(".")[2]
        task = next((TASKS[one] for one in TASKS if kind.startswith(one)), None)
        if package == PACKAGE and task:
            raise CheckpointError(f"{path}: a network for {task} ({kind}); there is one task here, detection")
        if package == "models":
            raise CheckpointError(
                f"{path}: a file of the older YOLOv5 code base ({name}), whose networks are others by the same names"
            )
    if strange := [name for name in names if not _known(name)]:
        shown = ", ".join(strange[:5]) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
        raise CheckpointError(f"{path}: holds {shown}, and is not opened because it could run code; {READ}")


def _known(name: str) -> bool:
    """Whether a class is one that a detector's file may name."""
    module, _, kind = name.rpartition(".")
    if module.startswith("torch.nn.modules."):
        return kind in TORCH.get(module.removeprefix("torch.nn.modules."), ())
    if module == f"{PACKAGE}.nn.modules" or module.startswith((f"{PACKAGE}.nn.modules.", f"{PACKAGE}.yolo.nn.modules")):
        return kind in LAYERS
    if module in (f"{PACKAGE}.nn.tasks", f"{PACKAGE}.yolo.nn.tasks"):
        return kind in NETWORKS
    return name in BESIDE or name.startswith(LOSSES)


def _stand_in(name: str) -> type[Record]:
    module, _, kind = name.rpartition(".")
    return type(kind, (Record,), {"__module__": module, "__qualname__": kind})


def _plain(arguments: object) -> dict[str, Any]:
    """A run's arguments as a dictionary, whatever they were kept in."""
    found = arguments if isinstance(arguments, dict) else getattr(arguments, "__dict__", {})
    return {key: value for key, value in found.items() if isinstance(value, str | int | float | list | tuple)}


def _side(imgsz: object, stride: int) -> int:
    """The side of the network's input: a multiple of its stride that holds what was trained at, or 640."""
    sides = [one for one in (imgsz if isinstance(imgsz, list | tuple) else [imgsz]) if isinstance(one, int) and one > 0]
    return -(-max(sides, default=640) // stride) * stride


def _metrics(values: object) -> dict[str, float]:
    """{'metrics/mAP50(B)': ..} as {'mAP50': ..}; losses are left out."""
    found = values.items() if isinstance(values, dict) else ()
    return {
        key.removeprefix("metrics/").removesuffix("(B)"): float(value)
        for key, value in found
        if isinstance(key, str) and key.startswith("metrics/") and isinstance(value, int | float)
    }
