"""`detector info`: what a checkpoint holds, without building a network."""

import argparse
from pathlib import Path
from typing import Any

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
    for key, value in lines_of(path, checkpoint_file.read(path)).items():
        print(f"{key:9} {value}")
    return 0


def lines_of(path: Path, saved: dict[str, Any]) -> dict[str, object]:
    """What there is to say of a checkpoint, by titles; a public one has no settings of ours."""
    names, settings, description = saved["names"], saved["settings"], saved["description"]
    shown = ", ".join(names[:10]) + (f", ... ({len(names)})" if len(names) > 10 else "")
    numbers = sum(value.numel() for value in saved["ema"].values() if value.is_floating_point())
    metrics = {key: value for key, value in saved["metrics"].items() if key not in ("epoch", "step")}
    scale = f" (scale {description['scale']})" if description.get("scale") else ""
    lines: dict[str, object] = {
        "file": path,
        "model": f"{description['name']}{scale}, {len(saved['ema'])} tensors, {numbers:,} numbers, "
        f"trained at imgsz {saved['imgsz']}",
        "classes": shown,
        "epoch": epochs(saved),
        "metrics": "  ".join(f"{key} {value:.4g}" for key, value in metrics.items()),
        "settings": "  ".join(f"{key}={value}" for key, value in settings.items() if value is not None),
    }
    if origin := saved.get("origin"):
        del lines["settings"]
        lines["origin"] = "  ".join(origin[key] for key in ("program", "version", "date") if key in origin)
        lines["license"] = origin.get("license", "not stated in the file")
    if "versions" in saved:
        lines["versions"] = "  ".join(f"{key} {value}" for key, value in saved["versions"].items())
    return lines


def epochs(saved: dict[str, Any]) -> str:
    """How far the training went."""
    if saved["epoch"] is None:
        return "finished"
    planned = saved["settings"].get("epochs")
    of = f" of {planned}" if planned else ""
    return f"{saved['epoch']}{of}" + (", with all to go on" if "optimizer" in saved else "")
