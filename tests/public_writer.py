"""Writes files as the public trainer does, of our networks and without that package: its classes are made up here.

What is known of such files was measured on published ones: a pickled module, fp16, with caches and a run's arguments.
"""

import copy
import sys
import types
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

PACKAGE = "ultralytics"
PLACES = {
    "nn.modules.conv": ("Conv", "DWConv", "Concat", "RepConv"),
    "nn.modules.block": (
        "Bottleneck", "C2f", "C3", "C3k", "C3k2", "SPPF", "Attention", "PSABlock", "C2PSA", "DFL", "SCDown", "PSA",
        "CIB", "C2fCIB", "RepVGGDW",
    ),
    "nn.modules.head": ("Detect", "OBB", "v10Detect"),
    "nn.tasks": ("DetectionModel", "OBBModel", "SegmentationModel"),
    "utils": ("IterableSimpleNamespace",),
}  # fmt: skip
WHERE = {kind: f"{PACKAGE}.{place}" for place, kinds in PLACES.items() for kind in kinds}
CLASSES = {
    kind: type(kind, (types.SimpleNamespace if place.endswith("utils") else nn.Module,), {"__module__": place})
    for kind, place in WHERE.items()
}


@contextmanager
def package():
    """A context in which pickle finds the made-up classes by their public names."""
    parts = {PACKAGE, *(f"{PACKAGE}.{place}" for place in PLACES), f"{PACKAGE}.nn", f"{PACKAGE}.nn.modules"}
    before = {name: sys.modules.get(name) for name in parts}
    try:
        for name in parts:
            sys.modules[name] = types.ModuleType(name)
        for kind, place in WHERE.items():
            setattr(sys.modules[place], kind, CLASSES[kind])
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name)
            else:
                sys.modules[name] = module


def shuffled(network, seed=0):
    """The network with other weights and statistics than those of a fresh one."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if value.is_floating_point() and ".dfl." not in name:
                noise = torch.rand(value.shape, generator=rng)
                value.copy_(0.5 + noise if "running_var" in name else value + 0.2 * (noise - 0.5))
    return network.eval()


def of_halves(network):
    """A copy whose weights went through fp16, as those of a file did."""
    return copy.deepcopy(network).half().float().eval()


def public_module(module):
    """A module of ours as the public trainer has it: a made-up class for each of its, with its members."""
    kind = type(module).__name__
    theirs = type(module) if type(module).__module__.startswith("torch.") else CLASSES[kind]
    made = theirs.__new__(theirs)
    nn.Module.__init__(made)
    if theirs is type(module):
        made.__dict__.update({key: value for key, value in vars(module).items() if key not in made.__dict__})
    made._parameters.update({key: copy.deepcopy(value) for key, value in module._parameters.items()})
    made._buffers.update({key: copy.deepcopy(value) for key, value in module._buffers.items()})
    made._modules.update({key: public_module(value) for key, value in module._modules.items()})
    if hasattr(module, "activation"):
        made.act = nn.Identity() if module.activation is None else nn.SiLU(inplace=True)
    if kind == "SPPF":
        made.m = nn.MaxPool2d(module.kernel, 1, module.kernel // 2)
        made.n, made.add = module.pools, module.add
    return made


def public_head(head, made):
    """What stands on the head beside its members, among them caches of the last picture."""
    made.nc, made.nl, made.reg_max, made.no = head.nc, len(head.strides), head.reg_max, head.nc + 4 * head.reg_max
    made.stride = torch.tensor(head.strides, dtype=torch.float16)
    made.anchors, made.strides = torch.rand(2, 84).half(), torch.rand(1, 84).half()
    made.shape = torch.Size([4, made.no, 8, 8])
    if head.reg_max == 1:
        made.dfl = nn.Identity()


def layer_list(network):
    """A description as a public file has it: SPPF's row as public models write it, and words of text."""
    keys = ("nc", "scales", "scale", "backbone", "head", "end2end", "reg_max")
    found = {key: copy.deepcopy(value) for key, value in network.description.items() if key in keys}
    for row in (*found["backbone"], *found["head"]):
        if row[2] == "SPPF":
            row[3] = row[3][:4] if network.description.get("end2end") else row[3][:2]
        row[3] = ["None" if value is None else value for value in row[3]]
    return {**found, "yaml_file": "yolo11n.yaml", "ch": 3, "channels": 3}


def public_network(network, names, kind="DetectionModel"):
    """Our network as a pickled object of the public trainer, in fp16."""
    layers = [public_module(layer) for layer in network.model]
    rows = [*network.description["backbone"], *network.description["head"]]
    for index, (layer, row) in enumerate(zip(layers, rows, strict=True)):
        layer.i, layer.f, layer.type = index, row[0], f"{type(layer).__module__}.{type(layer).__name__}"
    public_head(network.head, layers[-1])
    made = CLASSES[kind]()
    made.model = nn.Sequential(*layers)
    made.yaml, made.names, made.nc = layer_list(network), dict(enumerate(names)), network.nc
    made.stride = torch.tensor([float(stride) for stride in network.head.strides])
    made.save, made.inplace, made.criterion = [4, 6], True, None
    return made.half().requires_grad_(False)


def write(path, made, finished=True, **other):
    """Write a file as at the end of a run, or as in the middle of one."""
    arguments = {"task": "detect", "imgsz": 96, "epochs": 30, "save_dir": path.parent, "lr0": np.float64(0.01)}
    with package():
        made.args = arguments if finished else CLASSES["IterableSimpleNamespace"](**arguments)
        contents = {
            "epoch": -1 if finished else 11,
            "best_fitness": None if finished else np.float64(0.5),
            "model": made if finished else None,
            "ema": None if finished else made,
            "updates": None if finished else 1234,
            "optimizer": None if finished else {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []},
            "train_args": arguments,
            "train_metrics": {
                "metrics/mAP50-95(B)": 0.25,
                "metrics/recall(B)": 0.5,
                "val/box_loss": 1.0,
                "fitness": 0.3,
            },
            "train_results": {"epoch": [1, 2], "time": [0.5, 1.0]},
            "date": "2026-01-02T03:04:05",
            "version": "8.4.60",
            "license": "AGPL-3.0 (https://ultralytics.com/license)",
            "docs": "https://docs.ultralytics.com",
            **other,
        }
        torch.save(contents, path)
    return path
