"""The front door: parse, dispatch, and turn errors into one clear line. Imports torch only for a command's work."""

import argparse
import errno
import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from detector import terminal
from detector.config import foreign
from detector.errors import DetectorError, Interrupted, did_you_mean

# What a disk says that takes no more: told in a line wherever it happens, with no traceback.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
COMMANDS = (
    "check", "train", "tune", "search", "runs", "report", "compare", "val", "predict", "demo", "export", "info",
    "convert", "convert-data",
)  # fmt: skip
OVERRIDES = "settings as key=value, with YAML values: epochs=50 lr0=1e-3 names='[cat, dog]'"
SUMMARY = """\
Train, measure and use YOLO-style object detectors.

  detector check my_data.yaml                    look a data set over
  detector train configs/quickstart.yaml         train by a config file
  detector train data=my.yaml model=v11s batch=4 or by settings alone
  detector train resume=runs/train               go on with a run that stopped
  detector tune my.yaml memory=4GiB              find the micro-batch that fits
  detector search my.yaml space.yaml trials=50   look for better settings
  detector runs                                  the runs in runs/, and how they went
  detector report runs/train                     write the page of a run
  detector compare runs/train runs/train2        what differs, and whether it is more than noise
  detector val runs/train/weights/best.pt        measure a checkpoint
  detector predict runs/train/weights/best.pt images/
  detector export runs/train format=onnx         write it for another runtime
"""
# Commands without flags of their own: name, what it does, what it takes.
PLAIN = (
    (
        "runs",
        "list the runs in a folder: state, best result, model, data set",
        "FOLDER | key=value",
        "a folder of runs (runs); json=true for scripts",
    ),
    (
        "val",
        "measure a checkpoint by the COCO protocol",
        "WEIGHTS | key=value",
        "a checkpoint, a run's folder or an export; data split imgsz batch conf iou device amp against ...",
    ),
    (
        "compare",
        "compare runs on the same images, and say what is more than noise",
        "RUN RUN | key=value",
        "folders of runs, or checkpoints, two at least; data split imgsz batch device out html draws ...",
    ),
    (
        "predict",
        "find objects in images, videos and what a camera sees",
        "WEIGHTS SOURCE | key=value",
        "a checkpoint, a run's folder or an export; files, folders, globs, videos, a camera, streams; conf imgsz ...",
    ),
    (
        "demo",
        "try a checkpoint on a page in the browser",
        "WEIGHTS | key=value",
        "a checkpoint or a run's folder; conf iou imgsz port device",
    ),
    (
        "report",
        "write the page of a run",
        "RUN | key=value",
        "a run's folder, be it finished, stopped, killed or still going; out data device amp",
    ),
    (
        "export",
        "write a checkpoint for another runtime, and prove that it finds the same",
        "WEIGHTS FILE | key=value",
        "a checkpoint or a run's folder; the file to write; format imgsz batch half nms images exist_ok",
    ),
    (
        "info",
        "say what a checkpoint holds, or what a model is made of",
        "WEIGHTS | MODEL",
        "a checkpoint, a run's folder, or a model such as v26n",
    ),
    (
        "convert",
        "write a public checkpoint as one of ours, or a plain state dict",
        "WEIGHTS FILE | key=value",
        "a checkpoint or a run's folder; the file to write; format exist_ok",
    ),
    (
        "convert-data",
        "write a data set as YOLO text, COCO JSON or VOC XML",
        "DATA FOLDER | key=value",
        "a data set's YAML; the new folder; format=yolo, coco or voc; link polygons bad_boxes exist_ok",
    ),
)


def build_parser() -> argparse.ArgumentParser:
    import detector

    parser = argparse.ArgumentParser(
        "detector", description=SUMMARY, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"detector {detector.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, title: str, metavar: str, arguments: str, epilog: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=title, epilog=epilog)
        command.add_argument("arguments", nargs="*", metavar=metavar, help=arguments)
        return command

    takes = "a data set's YAML file; train, val or test, else all; imgsz fast project name exist_ok"
    add("check", "look a data set over", "DATA.yaml SPLIT | key=value", takes, "What is looked for: docs/data.md")
    config, takes = "CONFIG.yaml | key=value", f"a config file, then {OVERRIDES}"
    add("train", "train a detector", config, takes, "All settings: docs/settings.md")
    takes = f"as for train, and memory=4GiB; {OVERRIDES}"
    tune = add("tune", "find the micro-batch that fits a device", config, takes, "How to use it: docs/small-gpus.md")
    tune.add_argument("--estimate", action="store_true", help="count instead of running: the device need not be here")
    tune.add_argument(
        "--min-bn-batch", type=int, default=8, metavar="N", help="images BatchNorm should see at least, if they fit (8)"
    )
    tune.add_argument("--write", action="store_true", help="write what is recommended into the config file")
    takes = "a config file, then a file of what is varied; trials objectives pruner storage name resume; settings"
    metavar = "CONFIG.yaml SPACE.yaml | key=value"
    search = add("search", "look for the best settings, by training", metavar, takes, "How to use it: docs/search.md")
    search.add_argument("--write", metavar="FILE.yaml", help="write the best trial's settings as a config file")
    for plain in PLAIN:
        add(*plain)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 2 a user's mistake, 130 Ctrl-C, 143 SIGTERM.

    1 is that of `check` where it found errors, and of `export` where the file finds other boxes than the checkpoint.
    """
    terminal.tolerate()
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        with terminated_politely():
            command = importlib.import_module(f"detector.commands.{options.command.replace('-', '_')}")
            status = command.run(options)
            terminal.flush()
            return status
    except DetectorError as error:
        if options.debug:
            traceback.print_exc()
        return told(f"{type(error).__name__}: {error}", 2)
    except KeyboardInterrupt:
        return told("\nstopped by Ctrl-C", 130)
    except Interrupted as stop:
        return told(f"\nstopped by {signal.Signals(stop.number).name}", 128 + stop.number)
    except BrokenPipeError:  # the reader of a pipe went away: not an error of ours
        terminal.leave_broken()
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE or options.debug:
            raise
        terminal.leave_broken()
        return told(f"OutputError: {error.filename or 'what is printed'}: cannot be written: {error.strerror}", 2)


def told(text: str, status: int) -> int:
    """The status, once the text is on stderr, if anybody reads it."""
    try:
        terminal.write(f"{text}\n", sys.stderr)
    except BrokenPipeError:
        terminal.leave_broken()
    return status


@contextmanager
def terminated_politely() -> Iterator[None]:
    """A context in which SIGTERM is raised as Interrupted; nothing off the main thread, where Python has no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, on which `--flags` may stand before, between and after `key=value`."""
    parser = build_parser()
    first = next((word for word in argv if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        hint = f"; {foreign.COMMANDS[first]}" if first in foreign.COMMANDS else f".{did_you_mean(first, COMMANDS)}"
        parser.error(f"'{first}' is not a command: {', '.join(COMMANDS)}{hint.rstrip('.')}")
    options, rest = parser.parse_known_args(argv)
    flags = [word for word in rest if word.startswith("-")]
    if flags:
        name, equals, value = flags[0].lstrip("-").partition("=")
        written = f"{name.replace('-', '_')}={value if equals else 'VALUE'}"
        parser.error(f"unrecognized arguments: {' '.join(rest)}; settings are written without dashes, {written}")
    options.arguments += rest
    return options


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)
