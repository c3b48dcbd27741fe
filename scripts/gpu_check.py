"""What only a GPU can show, in under 12 minutes: tune beside its estimate, memory modes, precisions, and a full card.

    python scripts/gpu_check.py [--model v11n] [--imgsz 640] [--leave 3.0]

1. Each memory mode at two micro-batches: peak and speed by trial, the peak by estimate, and their ratio.
2. `detector tune memory=4GiB`, as a user runs it.
3. A short run in fp32, bf16 and fp16, and of v26n with MuSGD: every loss must be finite, and it can be measured.
4. A run whose batch cannot fit, since a ballast leaves only `--leave` GiB: it must cut finer, say so, and end.
5. Colours that are made on the GPU: they must be those that the host makes, to 1e-5.
6. A micro-batch's forward pass, loss and backward pass: the host must not wait for the GPU in them, and the loss must
   be that of the host, to 1e-3.
7. With two GPUs: a run of two stages must end, and with finite losses.

Without a GPU it says so and ends well. The status is 1 where a check fails.
"""

import argparse
import csv
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from detector.config.settings import Settings
from detector.data.batch import Batch
from detector.data.colours import recoloured
from detector.fitting.estimate import estimate_bench
from detector.fitting.fit import allocator, bench
from detector.fitting.search import cut_of, size
from detector.loss.criterion import DetectionLoss
from detector.model.checkpoint import chosen_description
from detector.model.network import Network, new_network

DATA = Path(__file__).parents[1] / "datasets" / "shapes.yaml"
DEVICE = torch.device("cuda", 0)
LONGEST = 120  # seconds of a command
BALLAST_BATCH = 64  # images that cannot fit beside the ballast


def modes(options: argparse.Namespace) -> bool:
    """Trials and estimates of each mode; whether all could be measured."""
    settings = Settings(data=DATA, model=options.model, imgsz=options.imgsz, device=0)
    here = bench(settings, [DEVICE], None, print)
    there = estimate_bench(settings, here.memory, print)
    print("| mode | batch | peak | estimate | estimate / peak | images/s |\n|---|---|---|---|---|---|")
    all_fit = True
    for mode in here.modes():
        for batch in options.batches:
            cut = cut_of(settings, batch, 1)
            one, other = here.measure(mode, cut), there.measure(mode, cut)
            counted = other.peak or 0
            if one.peak is None or one.rate is None:
                all_fit = False
                print(f"| {mode} | {batch} | does not fit | {size(counted)} | | |", flush=True)
                continue
            ratio = f"{counted / one.peak:.2f}"
            print(f"| {mode} | {batch} | {size(one.peak)} | {size(counted)} | {ratio} | {one.rate:.1f} |", flush=True)
    return all_fit


def detector(*arguments: object) -> tuple[int, str]:
    """The exit status of a `detector` command, and all it printed."""
    command = [sys.executable, "-m", "detector", *map(str, arguments)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return 124, printed.decode() if isinstance(printed, bytes) else printed
    return done.returncode, done.stdout


def tune(options: argparse.Namespace) -> bool:
    """`detector tune` with a limit that the allocator holds it to."""
    status, printed = detector("tune", f"data={DATA}", f"model={options.model}", "imgsz=320", "device=0", "memory=4GiB")
    print(printed)
    return status == 0 and "recommended" in printed


def precisions(options: argparse.Namespace, folder: Path) -> bool:
    """One epoch in each precision, also of two heads and with MuSGD; whether its losses are finite."""
    good = True
    cases = [(options.model, amp, "auto") for amp in ("fp32", "bf16", "fp16")]
    cases += [("v26n", amp, "MuSGD") for amp in ("fp32", "bf16", "fp16")]
    print("| model | amp | optimizer | status | losses | suppressed | not suppressed |\n|---|---|---|---|---|---|---|")
    for model, amp, optimizer in cases:
        name = f"{model}-{amp}"
        words = (f"model={model}", "imgsz=320", "batch=16", f"amp={amp}", f"optimizer={optimizer}")
        status, printed = train(folder, name, *words)
        table = folder / name / "metrics.csv"
        row = list(csv.DictReader(table.open()))[-1] if table.exists() else {}
        losses = {term: float(row[term]) for term in ("box", "cls", "dfl", "l1") if term in row}
        kinds = ("true", "false") if model == "v26n" else ("true",)
        found = [measured(folder / name, amp, nms) for nms in kinds] if row else []
        shown = "  ".join(f"{term} {loss:.3f}" for term, loss in losses.items())
        print(f"| {model} | {amp} | {optimizer} | {status} | {shown} | {' | '.join(found)} |", flush=True)
        if status or not losses or not all(map(math.isfinite, losses.values())) or "failed" in found:
            print(printed[-2000:])
            good = False
    return good


def measured(run: Path, amp: str, nms: str) -> str:
    """The row of all classes that `detector val` prints of a run, or "failed"."""
    status, printed = detector("val", run, "device=0", f"amp={amp}", f"nms={nms}", "plots=false")
    rows = [line for line in printed.splitlines() if line.startswith("all ")]
    return " ".join(rows[0].split()) if status == 0 and rows else "failed"


def train(folder: Path, name: str, *settings: str, device: str = "0") -> tuple[int, str]:
    common = (f"data={DATA}", "epochs=1", "workers=4", "plots=false", f"project={folder}", f"name={name}")
    return detector("train", *common, f"device={device}", *settings)


def full_card(options: argparse.Namespace, folder: Path) -> bool:
    """A run beside a ballast: whether it met the end of the memory, cut finer and ended."""
    with ballast(options.leave):
        settings = (
            f"model={options.model}",
            f"imgsz={options.imgsz}",
            f"batch={BALLAST_BATCH}",
            "accumulate_warmup=false",
        )
        status, printed = train(folder, "full", *settings)
    told = [line for line in printed.splitlines() if re.search("memory +ran out", line)]
    print("\n".join(told) or "the run said nothing of memory or of a finer cut")
    if status or not told:
        print(printed[-2000:])
    return status == 0 and bool(told)


def stages(options: argparse.Namespace, folder: Path) -> bool:
    """A run in two stages: whether it ended, and learned something finite. Good where there is one GPU alone."""
    if torch.cuda.device_count() < 2:
        print("skipped: there is one GPU")
        return True
    words = (f"model={options.model}", "imgsz=320", "batch=8", "pipeline=2")
    status, printed = train(folder, "stages", *words, device="0,1")
    told = [line for line in printed.splitlines() if line.startswith(("pipeline", "epoch", "best"))]
    print("\n".join(told) if status == 0 else printed[-2000:])
    return status == 0 and "nan" not in " ".join(told)


def colours() -> bool:
    """Whether the GPU makes the colours of images as the host does."""
    random = torch.Generator().manual_seed(0)
    images, changes = torch.rand(8, 3, 640, 640, generator=random), torch.rand(8, 3, generator=random)
    changes = changes * torch.tensor((0.03, 1.4, 0.8)) + torch.tensor((-0.015, 0.3, 0.6))
    apart = (recoloured(images.to(DEVICE), changes.to(DEVICE)).cpu() - recoloured(images.clone(), changes)).abs().max()
    print(f"colours: at most {apart:.1e} apart from the host's")
    return bool(apart < 1e-5)


def waits(options: argparse.Namespace) -> bool:
    """Whether a micro-batch asks the GPU for nothing, and comes to what it does on the host."""
    good = True
    for model in (options.model, "v26n"):
        network = new_network({**chosen_description(model, None), "nc": 3}, seed=0)
        on_host = loss_of(network, torch.device("cpu"))
        loss_of(network.to(DEVICE), DEVICE)  # at first kernels are loaded and chosen
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = loss_of(network, DEVICE)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        apart = float(abs(loss.cpu() / on_host - 1))
        print(f"{model}: no wait; loss {apart:.1e} apart from the host's")
        good &= apart < 1e-3
    return good


def loss_of(network: Network, device: torch.device) -> Tensor:
    """The loss of a micro-batch of eight images with ten boxes each, after its backward pass, where it was computed."""
    rng = torch.Generator().manual_seed(0)
    low, side = torch.rand(80, 2, generator=rng) * 400, torch.rand(80, 2, generator=rng) * 200 + 8
    pixels = torch.randint(256, (8, 640, 640, 3), generator=rng, dtype=torch.uint8)
    owner = torch.arange(8).repeat_interleave(10)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = Batch(pixels, torch.cat((low, low + side), dim=1), owner % 3, owner, torch.arange(8), nothing)
    here = Batch(*(tensor.pin_memory() for tensor in batch)).to(device)
    loss = sum(branch.terms.sum() for branch in DetectionLoss(network.head)(network(here.network_input()), here))
    loss.backward()
    return loss.detach()


@contextmanager
def ballast(leave: float) -> Iterator[None]:
    """A context in which this process holds all of the GPU but `leave` GiB."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(DEVICE)
    held = torch.empty(max(free - int(leave * 2**30), 0), dtype=torch.uint8, device=DEVICE)
    print(f"ballast   {size(held.numel())} of {size(total)}, {size(torch.cuda.mem_get_info(DEVICE)[0])} left")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v11n")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batches", nargs="*", type=int, default=[8, 32])
    parser.add_argument("--leave", type=float, default=3.0, help="GiB beside the ballast, the context's share included")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU here, and all that this script checks needs one")
        return 0
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, allocator: {allocator(DEVICE)}")
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        checks = {
            "colours": colours,
            "no waiting": lambda: waits(options),
            "memory modes beside the estimate": lambda: modes(options),
            "tune within 4 GiB": lambda: tune(options),
            "fp32, bf16, fp16, two heads, MuSGD": lambda: precisions(options, Path(temporary)),
            "a full card": lambda: full_card(options, Path(temporary)),
            "two stages": lambda: stages(options, Path(temporary)),
        }
        for name, check in checks.items():
            print(f"\n## {name}", flush=True)
            start = time.perf_counter()
            try:
                good = check()
            except Exception as error:  # the other checks are worth their time all the same
                print(f"{type(error).__name__}: {error}")
                good = False
            results[name] = f"{'good' if good else 'FAILED'} | {time.perf_counter() - start:.0f} s"
    print("\n| check | result | time |\n|---|---|---|")
    print("\n".join(f"| {name} | {result} |" for name, result in results.items()))
    return int(any("FAILED" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
