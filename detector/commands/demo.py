"""`detector demo`: a page on this machine to try a detector on."""

import argparse

from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import DemoSettings
from detector.errors import ConfigError
from detector.inference.load import load
from detector.reporting.demo_page import gradio, page, theme

HOST = "127.0.0.1"


def run(options: argparse.Namespace) -> int:
    said = words.of_checkpoint(options.arguments)
    settings = load_settings(DemoSettings, None, said.overrides, said.values)
    if settings.weights is None:
        raise ConfigError("name a checkpoint or a run's folder: detector demo runs/train")
    gradio()  # before the time that loading takes
    detector = load(settings.weights, settings.device, settings.amp, settings.nms)
    imgsz = settings.imgsz or detector.imgsz
    title = f"{settings.weights}: {', '.join(detector.names[:20])}{' ...' if len(detector.names) > 20 else ''}"
    blocks = page(detector, title, settings.conf, settings.iou, imgsz, settings.max_det)
    try:
        _, address, _ = blocks.launch(
            server_name=HOST,
            server_port=settings.port,
            share=False,
            quiet=True,
            show_error=True,
            prevent_thread_lock=True,
            footer_links=[],
            theme=theme(),
        )
    except OSError:  # gradio's words are about its own settings
        place = "no port from 7860 on" if settings.port is None else f"port={settings.port}"
        raise ConfigError(f"{place}: another program may be served there; name another port=") from None
    print(f"page      {address} (of this machine alone; Ctrl-C ends it)", flush=True)
    blocks.block_thread()
    return 0
