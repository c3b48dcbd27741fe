"""`detector predict`: boxes for images, videos and cameras, printed, drawn and, if wished, written as tables."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import PredictSettings
from detector.drawing import undrawable
from detector.errors import ConfigError, DataError
from detector.folders import create_folder
from detector.inference.ahead import Behind
from detector.inference.detector import Detector, check_reading
from detector.inference.load import load
from detector.inference.results import Result
from detector.inference.sources import find_sources
from detector.inference.sources.find import Item
from detector.inference.sources.live import DroppedError
from detector.inference.tracking import check_tracker
from detector.reporting.looking import Looking
from detector.reporting.result_files import ResultFiles, Wanted
from detector.reporting.window import Window

BEHIND = 8  # results that wait to be drawn and written


def run(options: argparse.Namespace) -> int:
    said = words.of_checkpoint(options.arguments, sources=True)
    settings = load_settings(PredictSettings, None, said.overrides, said.values)
    if settings.weights is None or not settings.source:
        raise ConfigError(
            "name a checkpoint, and what to look at: detector predict runs/train photos/ 'more/*.jpg' clip.mp4"
        )
    check_reading(settings.vid_stride, settings.start, settings.stop, "rgb", settings.tile, settings.overlap)
    check_tracker(settings.track)
    window = Window() if settings.show else None
    detector = load(
        settings.weights, settings.device, settings.amp, settings.nms, settings.names, settings.imgsz, settings.layout
    )
    items = list(find_sources(settings.source, settings.recursive))
    wanted = Wanted(*(getattr(settings, name) for name in Wanted._fields))
    if settings.save and (missing := undrawable(detector.names)):
        print(
            f"warning: no font here has the letters of {', '.join(missing)}; pictures show their numbers "
            "(apt-get install fonts-noto-cjk)",
            file=sys.stderr,
        )
    files = ResultFiles(lambda: create_folder(settings.project, settings.name, "predict", settings.exist_ok), wanted)
    unreadable: list[DataError] = []
    try:
        looking = look(detector, items, settings, files, unreadable, window)
    finally:
        files.close()
    if not looking.images and len(unreadable) == len(items) == 1:
        raise unreadable[0]
    for error in unreadable:
        print(f"warning: left out: {error}", file=sys.stderr)
    if not looking.images:
        raise DataError("none of the images can be read")
    where = f"; {'pictures' if settings.save else 'written'} in {files.folder}" if files.folder else ""
    print(f"{looking.objects} objects in {looking.images} images{where}")
    return 0


def look(
    detector: Detector,
    items: list[Item],
    settings: PredictSettings,
    files: ResultFiles,
    unreadable: list[DataError],
    window: Window | None,
) -> Looking:
    """Look at all there is, told and written as it comes; what cannot be read is put into `unreadable`.

    Stopped in the middle, by Ctrl-C or an error, it leaves what was found until then written.
    """
    with Looking(len(items)) as looking, Behind(files.keep, BEHIND) as behind:

        def left_out(error: DataError) -> None:
            if isinstance(error, DroppedError):
                looking.line(f"warning: {error}", sys.stderr)
            else:
                unreadable.append(error)

        with closing(results_of(detector, items, settings, left_out)) as results:
            for result in results:
                behind.put(result)
                looking.tell(result)
                if window is not None and not window.show(result.plot()):
                    break
    return looking


def results_of(
    detector: Detector, items: list[Item], settings: PredictSettings, left_out: Callable[[DataError], None]
) -> Iterator[Result]:
    """What the detector finds, as the settings say."""
    return detector.stream(
        items,
        settings.conf,
        settings.iou,
        settings.imgsz,
        settings.batch,
        settings.max_det,
        left_out,
        vid_stride=settings.vid_stride,
        start=settings.start,
        stop=settings.stop,
        tile=settings.tile,
        overlap=settings.overlap,
        track=settings.track,
    )
