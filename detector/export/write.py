"""An export from its graph to a file that has been proved, or is called unverified. A failure leaves nothing."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from detector.errors import ConfigError
from detector.export.accuracy import Accuracy
from detector.export.formats import Format
from detector.export.graph import ExportGraph
from detector.export.images import Images
from detector.export.int8 import Feed
from detector.export.parity import Parity, compare
from detector.files import UNFINISHED
from detector.inference.infer import NetworkRuntime
from detector.inference.runtimes.engines import beside
from detector.inference.runtimes.exported import ExportedRuntime
from detector.inference.runtimes.facts import Facts
from detector.inference.runtimes.opening import open_export
from detector.model.network import Network

UNVERIFIED = ".unverified"


class Quantised(NamedTuple):
    """What an export in int8 takes besides."""

    feed: Feed  # images to calibrate on
    measure: Callable[[NetworkRuntime, ExportedRuntime], Accuracy]  # what it loses


def write_export(
    network: Network,
    facts: Facts,
    form: Format,
    target: Path,
    images: Images,
    say: Callable[[str], None] = print,
    quantised: Quantised | None = None,
) -> bool:
    """Write a network's export to `target` once it finds what the network finds, else to NAME.unverified.

    Returns whether it does: by its boxes in `images` or, `quantised`, by its mAP. Formats that are not run here are
    taken as they are, which is said.
    """
    with _beside(target) as place:
        graph = ExportGraph(network, facts).eval()
        written = form.write(graph, place) if quantised is None else form.int8(graph, place, quantised.feed)
        say(f"written   {written}")
        del graph
        proof = _proof(network, place, images, quantised) if form.runs else None
        if proof is None:
            say("parity    not run here: compare it with the checkpoint on the device that it is for")
        else:
            say("\n".join(proof.lines()))
        passed = proof is None or proof.passed
        final = target if passed else target.with_name(target.name + UNVERIFIED)
        for part in sorted(place.parent.iterdir(), key=lambda one: one == place):  # what lies beside it first
            _put(part, final.with_name(part.name.replace(place.name, final.name, 1)))
    say(f"{'export' if passed else 'unproved':9} {final}")
    return passed


def _proof(network: Network, place: Path, images: Images, quantised: Quantised | None) -> Parity | Accuracy:
    exported, checkpoint = open_export(place, "cpu"), NetworkRuntime(network, torch.device("cpu"))
    return compare(checkpoint, exported, images) if quantised is None else quantised.measure(checkpoint, exported)


def check_target(target: Path, exist_ok: bool, form: Format) -> None:
    """Raise ConfigError where an export cannot be put there, or should not."""
    if form.suffix.startswith(".") and target.suffix.lower() != form.suffix:  # by which it is opened again
        raise ConfigError(f"to={target}: {form.suffix} is how such a file ends; write {target.name}{form.suffix}")
    if not target.parent.is_dir():
        raise ConfigError(f"to={target.parent}: no such folder; name a file in a folder that is there")
    there = [one for one in (target, *([beside(target)] if form.beside else ())) if one.exists()]
    if there and not exist_ok:
        raise ConfigError(f"to={there[0]}: exists; choose another name, or replace it with exist_ok=true")
    if target.is_dir() and not _is_ours(target):
        raise ConfigError(f"to={target}: a folder with other things in it; choose another name")


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds an export and nothing else, and may go."""
    return all(one.suffix in (".xml", ".bin") for one in folder.iterdir()) or (folder / "Manifest.json").is_file()


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A context that gives a path of the target's name, in a folder that is gone when the context is left.

    It is this call's own: others may be writing the same file. What a call that was killed left, a later one removes.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.*{UNFINISHED}"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(UNFINISHED, f".{target.name}.", target.parent))
    try:
        yield folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(source: Path, target: Path) -> None:
    """Move a file or folder to its place; an export that is there goes."""
    if target.is_dir() and not target.is_symlink():
        target.rename(source.with_name(f"{source.name}.old"))  # goes with the folder of what is unfinished
    os.replace(source, target)
