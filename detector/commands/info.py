"""`detector info`: what a checkpoint holds, without building a network."""

import argparse

from detector import checkpoint_file
from detector.config import words
from detector.config.settings import InfoSettings, load_settings
from detector.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    said = words.of_checkpoint(options.arguments)
    weights = load_settings(InfoSettings, None, said.overrides, said.values).weights
    if weights is None:
        raise ConfigError("name a checkpoint or a run's folder: detector info runs/train")
    path = checkpoint_file.weights_in(weights)
    saved = checkpoint_file.read(path)
    names, settings = saved["names"], saved["settings"]
    shown = ", ".join(names[:10]) + (f", ... ({len(names)})" if len(names) > 10 else "")
    parameters = sum(value.numel() for value in saved["ema"].values() if value.is_floating_point())
    metrics = {key: value for key, value in saved["metrics"].items() if key not in ("epoch", "step")}
    lines = {
        "file": path,
        "model": f"{saved['description']['name']}, {parameters:,} numbers, trained at imgsz {saved['imgsz']}",
        "classes": shown,
        "epoch": f"{saved['epoch']} of {settings['epochs']}" + (", with all to go on" if "optimizer" in saved else ""),
        "metrics": "  ".join(f"{key} {value:.4g}" for key, value in metrics.items()),
        "settings": "  ".join(f"{key}={value}" for key, value in settings.items() if value is not None),
        "versions": "  ".join(f"{key} {value}" for key, value in saved["versions"].items()),
    }
    for key, value in lines.items():
        print(f"{key:9} {value}")
    return 0
