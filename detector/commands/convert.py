"""`detector convert`: a public checkpoint as one of ours, and the weights of any as a plain state dict."""

import argparse
from pathlib import Path
from typing import Any

import torch

from detector import checkpoint_file
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import ConvertSettings
from detector.errors import ConfigError
from detector.files import replaced, writing
from detector.model.checkpoint import network_of
from detector.model.network import Network

# What best.pt of a run holds, and where the weights come from.
KEPT = ("description", "names", "imgsz", "settings", "metrics", "ema", "epoch", "origin")


def run(options: argparse.Namespace) -> int:
    said = words.of_conversion(options.arguments)
    settings = load_settings(ConvertSettings, None, said.overrides, said.values)
    if settings.weights is None or settings.to is None:
        raise ConfigError("name a checkpoint, and the file to write: detector convert public.pt mine.pt")
    path, target = checkpoint_file.weights_in(settings.weights), settings.to
    check_target(target, path, settings.exist_ok)
    saved = checkpoint_file.read(path)
    network = network_of(saved, path)  # whole, and finite
    with writing(target, "make room, or choose another file"):
        if settings.format == "state_dict":
            with replaced(target) as beside:
                torch.save(dict(network.state_dict()), beside)
        else:
            checkpoint_file.write(target, {key: saved[key] for key in KEPT if key in saved})
    for line in told(network, saved, settings.format):
        print(line)
    print(f"written   {target}")
    return 0


def check_target(target: Path, source: Path, exist_ok: bool) -> None:
    """Raises ConfigError where a file cannot be put there, or should not."""
    if target.is_dir() or not target.parent.is_dir():
        place = f"{target}: a folder" if target.is_dir() else f"{target.parent}: no such folder"
        raise ConfigError(f"to={place}; name a file in a folder that is there, such as mine.pt")
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"to={target}: the checkpoint itself; choose another name, so that the original is kept")
    if target.exists() and not exist_ok:
        raise ConfigError(f"to={target}: exists; choose another name, or replace it with exist_ok=true")


def told(network: Network, saved: dict[str, Any], form: str) -> list[str]:
    """What was written, and what goes along with it."""
    tensors = network.state_dict()
    numbers = sum(value.numel() for value in network.parameters())
    lines = [f"model     {network.description['name']}, {len(tensors)} tensors, {numbers:,} parameters"]
    if form == "state_dict":
        lines.append(
            "note      tensors and their names, and nothing else: not the classes, nor how the network computes"
        )
    if license_text := saved.get("origin", {}).get("license"):
        lines.append(f"license   {license_text}, says the file that the weights come from")
    return lines
