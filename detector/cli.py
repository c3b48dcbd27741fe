"""The front door: parse, dispatch, and turn errors into one clear line. Imports torch only for a command's work."""

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from detector.errors import DetectorError, Interrupted

OVERRIDES = "settings as key=value, with YAML values: epochs=50 lr0=1e-3 names='[cat, dog]'"
SUMMARY = """\
Train, measure and use YOLO-style object detectors.

  detector train configs/quickstart.yaml         train by a config file
  detector train data=my.yaml model=v11s batch=4 or by settings alone
  detector train resume=runs/train               go on with a run that stopped
  detector tune my.yaml memory=4GiB              find the micro-batch that fits
  detector val runs/train/weights/best.pt        measure a checkpoint
  detector predict runs/train/weights/best.pt images/
"""


def build_parser() -> argparse.ArgumentParser:
    import detector

    parser = argparse.ArgumentParser(
        "detector", description=SUMMARY, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"detector {detector.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a detector", epilog="All settings: docs/settings.md")
    train.add_argument(
        "arguments", nargs="*", metavar="CONFIG.yaml | key=value", help=f"a config file, then {OVERRIDES}"
    )

    tune = commands.add_parser(
        "tune", help="find the micro-batch that fits a device", epilog="How to use it: docs/small-gpus.md"
    )
    tune.add_argument(
        "arguments", nargs="*", metavar="CONFIG.yaml | key=value", help=f"as for train, and memory=4GiB; {OVERRIDES}"
    )
    tune.add_argument("--estimate", action="store_true", help="count instead of running: the device need not be here")
    tune.add_argument(
        "--min-bn-batch", type=int, default=8, metavar="N", help="images BatchNorm should see at least, if they fit (8)"
    )
    tune.add_argument("--write", action="store_true", help="write what is recommended into the config file")

    val = commands.add_parser("val", help="measure a checkpoint by the COCO protocol")
    val.add_argument("weights", help="a checkpoint, for example runs/train/weights/best.pt")
    val.add_argument("arguments", nargs="*", metavar="key=value", help="data split imgsz batch conf iou device amp ...")

    predict = commands.add_parser("predict", help="find objects in images")
    predict.add_argument("weights", help="a checkpoint, for example runs/train/weights/best.pt")
    predict.add_argument(
        "arguments",
        nargs="+",
        metavar="SOURCE | key=value",
        help="files, folders, globs, text files of paths; conf iou imgsz ...",
    )
    info = commands.add_parser("info", help="say what a checkpoint holds")
    info.add_argument("weights", help="a checkpoint or a run's folder")
    for command in (train, tune, val, predict, info):
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 2 a user's mistake, 130 Ctrl-C, 143 SIGTERM."""
    options = parse(argv)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        command = importlib.import_module(f"detector.commands.{options.command}")
        return command.run(options)
    except DetectorError as error:
        if options.debug:
            traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return 130
    except Interrupted as stop:
        print(f"\nstopped by {signal.Signals(stop.number).name}", file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:  # the reader of a pipe went away: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, on which `--flags` may stand before, between and after `key=value`."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(options, "arguments") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.arguments += rest
    return options


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)
