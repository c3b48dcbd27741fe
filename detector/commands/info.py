"""`detector info`: what a checkpoint holds, without building a network; and what a model is made of."""

import argparse
from pathlib import Path
from typing import Any

from detector import checkpoint_file
from detector.config import words
from detector.config.settings import load_settings
from detector.config.uses import InfoSettings
from detector.errors import ConfigError

IMGSZ = 640  # that operations are counted at


def run(options: argparse.Namespace) -> int:
    if len(options.arguments) == 1 and (model := words.model_in(options.arguments[0])):
        for line in lines_of_model(model):
            print(line)
        return 0
    said = words.of_checkpoint(options.arguments)
    weights = load_settings(InfoSettings, None, said.overrides, said.values).weights
    if weights is None:
        raise ConfigError("name a checkpoint, a run's folder or a model: detector info runs/train, detector info v26n")
    path = checkpoint_file.weights_in(weights)
    for key, value in lines_of(path, checkpoint_file.read(path)).items():
        print(f"{key:9} {value}")
    return 0


def lines_of_model(name: str) -> list[str]:
    """A model's sizes, and its layers by the numbers that `freeze` knows them by."""
    import torch

    from detector.model.cost import cost
    from detector.model.description import load_description, title
    from detector.model.network import Network, check_side

    description = load_description(name)
    with torch.device("meta"):  # no memory for weights
        network = Network(description)
    check_side(network, IMGSZ)
    found, head = cost(network, IMGSZ), network.head
    rows = [*description["backbone"], *description["head"]]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in network.model]
    heads = "two heads, with and without suppression" if head.end2end else "one head"
    lines = [
        f"model     {title(description)}",
        f"sizes     {found.parameters:,} parameters at {head.nc} classes, {found.fused_parameters:,} in use; "
        f"{len(network.state_dict())} tensors",
        *([f"input     {network.channels} channels"] if network.channels != 3 else []),
        f"head      {heads}; strides {', '.join(map(str, head.strides))}; losses {', '.join(head.terms)}",
        f"GFLOPs    {found.files:.1f} as model files count, {found.tables:.1f} as tables, {found.trainers:.1f} as "
        f"trainers; one image at {IMGSZ} x {IMGSZ}",
        "",
        f"{'layer':>5}  {'from':12}  {'parameters':>10}  module",
    ]
    for number, ((source, repeats, module, arguments), size) in enumerate(zip(rows, sizes, strict=True)):
        times = f" x {repeats}" if repeats > 1 else ""
        lines.append(f"{number:5}  {source!s:12}  {size:10,}  {module} {arguments}{times}")
    return lines


def lines_of(path: Path, saved: dict[str, Any]) -> dict[str, object]:
    """What there is to say of a checkpoint, by titles; a public one has no settings of ours."""
    names, settings, description = saved["names"], saved["settings"], saved["description"]
    shown = ", ".join(names[:10]) + (f", ... ({len(names)})" if len(names) > 10 else "")
    numbers = sum(value.numel() for value in saved["ema"].values() if value.is_floating_point())
    metrics = {key: value for key, value in saved["metrics"].items() if key not in ("epoch", "step")}
    scale = f" (scale {description['scale']})" if description.get("scale") else ""
    limits = f", values {' to '.join(f'{one:g}' for one in description['range'])}" if description.get("range") else ""
    lines: dict[str, object] = {
        "file": path,
        "model": f"{description['name']}{scale}, {len(saved['ema'])} tensors, {numbers:,} numbers, "
        f"trained at imgsz {saved['imgsz']}",
        "input": f"{description.get('channels', 3)} channels{limits}",
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
