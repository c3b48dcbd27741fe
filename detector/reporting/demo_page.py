"""A page to try a detector on: drop an image or a video, move the thresholds, see the boxes. Gradio draws it.

It is served to this machine alone, and asks nobody for anything: no font, no script, no news and no count of its uses.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import ConfigError, DataError
from detector.inference.detector import Detector
from detector.inference.results import COLUMNS, Result
from detector.reporting.video_file import VideoFile

INSTALL = "pip install 'detector[demo]'"
TITLE = "detector"
FONTS = ["system-ui", "sans-serif"]
HOUR = 3600  # seconds after which Gradio's own copies of images and videos go
MOST_SECONDS = 60  # of a video that are looked at
# Gradio counts its uses and asks for news unless these are set before it is imported.
SILENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def gradio() -> Any:
    """The package, told to be silent. Raises ConfigError where it is not installed."""
    os.environ.update(SILENT)
    try:
        import gradio
    except ImportError:
        raise ConfigError(f"the page needs gradio; `{INSTALL}`") from None
    return gradio


class Looks:
    """What the page asks of the detector. A mistake of the user's, as a file that is no image, becomes its words."""

    def __init__(self, detector: Detector, max_det: int = 300) -> None:
        self.detector, self.max_det = detector, max_det
        self._videos = tempfile.TemporaryDirectory(prefix="detector-demo-")  # goes with the page

    def at_image(
        self, image: NDArray[np.uint8] | None, conf: float, iou: float, imgsz: float
    ) -> tuple[NDArray[np.uint8] | None, str, list[list[Any]]]:
        """(picture with boxes, what was found, a row a detection) of an (H, W, 3) RGB image; nothing of None."""
        if image is None:
            return None, "", []
        (result,) = self.detector.predict(image, conf, iou, int(imgsz), max_det=self.max_det)
        return result.plot(), result.summary(), [[row[name] for name in COLUMNS] for row in result.to_dicts()]

    def at_video(
        self, path: str | None, conf: float, iou: float, imgsz: float, told: Callable[[Result], None]
    ) -> tuple[str | None, str]:
        """(path of the video with boxes, what was found) of a video file; `told` of each frame as it is looked at."""
        if path is None:
            return None, ""
        frames = objects = 0
        out: VideoFile | None = None
        folder = Path(tempfile.mkdtemp(dir=self._videos.name))
        looks = self.detector.stream(path, conf, iou, int(imgsz), max_det=self.max_det, stop=MOST_SECONDS)
        try:
            with closing(looks):
                for result in looks:
                    out = out or VideoFile(folder / f"{Path(path).stem}.mp4", result.origin.rate)
                    out.write(result.plot(), result.time)
                    frames, objects = frames + 1, objects + len(result)
                    told(result)
            out.close()
        except BaseException:  # also that of a page that was left
            if out is not None:
                out.discard()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return str(out.path), f"{objects} objects in {frames} frames"


def page(detector: Detector, title: str, conf: float, iou: float, imgsz: int, max_det: int = 300) -> Any:
    """The page, a Gradio app that is not served yet."""
    gr = gradio()
    looks, bar = Looks(detector, max_det), gr.Progress()

    @contextmanager
    def mistakes_shown() -> Iterator[None]:
        try:
            yield
        except (ConfigError, DataError) as error:
            raise gr.Error(str(error), print_exception=False) from None

    def at_image(*arguments: Any) -> Any:
        with mistakes_shown():
            return looks.at_image(*arguments)

    def at_video(path: str | None, *settings: Any, progress: Any = bar) -> Any:
        def told(result: Result) -> None:
            count = result.origin.count
            progress((result.frame + 1, count) if count else None, desc=result.summary(), unit="frames")

        with mistakes_shown():
            return looks.at_video(path, *settings, told)

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(HOUR, HOUR)) as blocks:
        gr.Markdown(f"### {title}")
        with gr.Row():
            sliders = [
                gr.Slider(0, 1, conf, step=0.01, label="least score (conf)"),
                gr.Slider(0, 1, iou, step=0.01, label="overlap that is dropped (iou)"),
                gr.Slider(64, 2048, imgsz, step=32, label="input side (imgsz)"),
            ]
        with gr.Tab("Image"):
            with gr.Row():
                image = gr.Image(type="numpy", label="image", sources=["upload", "clipboard", "webcam"])
                picture = gr.Image(label="found", format="png")
            said = gr.Textbox(label="in words")
            table = gr.Dataframe(headers=list(COLUMNS), label="detections", interactive=False)
        with gr.Tab("Video"):
            with gr.Row():
                video = gr.Video(label="video", sources=["upload"])
                shown = gr.Video(label="found")
            counted = gr.Textbox(label="in words")
            start = gr.Button("Look")
        for event in (image.change, *(slider.release for slider in sliders)):
            event(at_image, [image, *sliders], [picture, said, table], show_progress="minimal")
        start.click(at_video, [video, *sliders], [shown, counted])
    return blocks


def theme() -> Any:
    """Gradio's own look with fonts of this machine: its own come from the network."""
    return gradio().themes.Default(font=FONTS, font_mono=["monospace"])
