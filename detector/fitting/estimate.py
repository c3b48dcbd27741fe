"""What a step would take on a device that is not at hand: an estimate, counted on a CPU without computing anything.

The network runs forward and backward on fake tensors, which have shapes, dtypes and storages but no memory; what is
alive at each moment is added up. The loss runs for real, on one image, and counts for each image of the micro-batch.
Weights, gradients, averages and optimizer are added, and what is not known of a device is an allowance, said in the
output. A measurement is better wherever there is one.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detector.config.settings import Settings
from detector.data.batch import Sample, collate
from detector.device import choose_device
from detector.errors import ConfigError
from detector.fitting.capacity import free_memory, resident
from detector.fitting.crowd import heaviest
from detector.fitting.fit import CUDA_CONTEXT
from detector.fitting.search import MODES, SPARE, Trial, cuts, modes_on, size
from detector.loss.criterion import DetectionLoss
from detector.model.checkpoint import chosen_description
from detector.model.description import for_images, title
from detector.model.head import Predictions
from detector.model.network import Network
from detector.precision import DTYPES, choose_precision
from detector.run.build import chosen_optimizer, equip, indices
from detector.run.nominal import with_nominal_batch
from detector.run.run import Say
from detector.step.offload import LEAST, Offload, Placed, is_weight
from detector.step.optim import parameter_groups
from detector.step.plan import Cut, input_sides
from detector.step.statistics import set_modes

WORKSPACE = 256 * 2**20  # bytes that a GPU's libraries want for their algorithms
ROUNDING = 0.1  # share of the activations that the GPU's allocator loses to rounding and fragments
UPDATE = 2  # copies of the weights that an optimizer's step holds for a moment


class Counted:
    """Offload's hooks or none, with the bytes that stay on the device and those that wait in the host."""

    def __init__(self, offload: bool):
        self.hooks = Offload() if offload else None
        self.kept: dict[int, int] = {}
        self.host: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor | Placed:
        placed = self.hooks.pack(tensor) if self.hooks else tensor
        if isinstance(placed, Placed):
            self.host[id(placed.host)] = placed.host.bytes.numel()
        elif not is_weight(tensor):
            self.kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return placed

    def unpack(self, kept: Tensor | Placed) -> Tensor:
        return self.hooks.unpack(kept) if self.hooks else kept

    def context(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self.pack, self.unpack)


class Alive(TorchDispatchMode):
    """A context that adds up the bytes of all storages made inside it: those alive now, and the most so far.

    Works on real and on fake tensors. A storage counts once, and until its last tensor is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.see(tensor.untyped_storage())
        return made

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.storages.pop(key)


@contextmanager
def away() -> Iterator[None]:
    """What `offload` does, on fake tensors: what is large is gone until the backward pass makes room for it again."""

    def pack(tensor: Tensor) -> Tensor | tuple[Any, ...]:
        if tensor.untyped_storage().nbytes() < LEAST or is_weight(tensor):
            return tensor
        return tensor.size(), tensor.stride(), tensor.dtype

    def unpack(kept: Tensor | tuple[Any, ...]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        shape, stride, dtype = kept
        return torch.empty_strided(shape, stride, dtype=dtype)

    with saved_tensors_hooks(pack, unpack):
        yield


class Counts(NamedTuple):
    """Bytes of a micro-batch, weights and what belongs to them aside."""

    kept: int  # by the network's forward pass, for the backward pass
    forward: int  # at the peak of the forward pass
    backward: int  # at the peak of the backward pass


def count_network(
    settings: Settings, classes: int, batch: int, precision: str, channels: int = 3
) -> tuple[Counts, Predictions, Network]:
    """What the settings' network has alive in a forward and a backward pass; its outputs and itself, fake."""
    norm = "batch" if settings.norm == "sync" else settings.norm  # which a CPU has not, and which keeps the same
    alone = settings.model_copy(update={"bn": norm, "freeze_bn": False})
    keeping = away if settings.offload else nullcontext
    with FakeTensorMode(allow_non_fake_inputs=True):
        chosen = for_images(chosen_description(settings.model, settings.weights), channels)
        network = Network({**chosen, "nc": classes})
        equip(network, alone, torch.device("cpu"))
        set_modes(network, norm == "frozen")
        with Alive() as alive:
            side = input_sides(settings.imgsz, settings.multi_scale, network.stride)[1]
            shape = batch, side, side, channels
            with torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32"), keeping():
                found = network(torch.empty(shape).permute(0, 3, 1, 2))
            kept, forward = alive.now, alive.peak
            alive.peak = alive.now
            ends = [end for one in branches_of(found) for end in (one.boxes, one.logits)]
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    return Counts(kept, forward, alive.peak), found, network


def branches_of(outputs: Predictions) -> list[Predictions]:
    """The raw output of each branch of the loss."""
    return [outputs] if outputs.one2one is None else [outputs, outputs.one2one]


def count_loss(network: Network, outputs: Predictions, sample: Sample) -> int:
    """The most bytes that the loss of one image has alive at once, with its backward pass."""
    rng = torch.Generator().manual_seed(0)
    made = [
        Predictions(*(torch.randn(1, *raw.shape[1:], generator=rng).to(raw.dtype).requires_grad_() for raw in one[:2]),
                    one.shapes) for one in branches_of(outputs)
    ]  # fmt: skip
    targets = collate([sample])
    criterion = DetectionLoss(network.head)
    with Alive() as alive:
        branches = criterion(made[0]._replace(one2one=made[1] if made[1:] else None), targets)
        torch.stack([branch.terms.sum() for branch in branches]).sum().backward()
    return alive.peak


class Standing(NamedTuple):
    """Bytes that are there in every micro-batch."""

    weights: int  # and buffers
    gradients: int
    optimizer: int
    average: int  # the EMA's copy

    @property
    def total(self) -> int:
        return sum(self)


def standing(network: Network, optimizer: str) -> Standing:
    """What the weights of a network bring with them."""
    everything = [*network.parameters(), *network.buffers()]
    weights = sum(one.numel() * one.element_size() for one in everything)
    groups = parameter_groups(network, muon=optimizer == "MuSGD")
    sizes = {name: sum(one.numel() * one.element_size() for one in group) for name, group in groups.items()}
    trained = sum(sizes.values())
    second = trained if optimizer == "AdamW" else sizes["muon"]  # beside the first momentum
    return Standing(weights, trained, trained + second, weights)


@dataclass(frozen=True)
class Estimate:
    """A run whose ways are counted for a device."""

    settings: Settings
    kind: str  # cuda or cpu
    precision: str  # fp32, bf16 or fp16
    memory: int  # bytes of the device, less what the device takes for itself
    devices: int
    classes: int
    images: int
    sample: Sample
    channels: int = 3

    def modes(self) -> list[str]:
        return modes_on(self.kind, 1, self.settings)  # stages are not counted

    def planned(self) -> list[Cut]:
        return cuts(self.settings, self.devices, self.images)

    def measure(self, mode: str, cut: Cut) -> Trial:
        """An estimate in the place of a trial."""
        checkpoint, offload = MODES[mode]
        peak = self.peak(self.settings.model_copy(update={"checkpoint": checkpoint, "offload": offload}), cut)
        return Trial(mode, cut, peak, None, fits=peak <= self.memory * (1 - SPARE))

    def peak(self, settings: Settings, cut: Cut) -> int:
        """Bytes at the peak of a step, allowances included."""
        counts, outputs, network = count_network(settings, self.classes, cut.batch, self.precision, self.channels)
        loss = count_loss(network, outputs, self.sample) * cut.batch
        there = standing(network, chosen_optimizer(settings, cut, self.images, self.classes).optimizer)
        passing = max(counts.forward, counts.kept + loss, counts.backward, UPDATE * there.weights)
        sides = {settings.imgsz, input_sides(settings.imgsz, settings.multi_scale, network.stride)[1]}
        pixels = cut.batch * self.channels * sum(side**2 for side in sides)  # as uint8
        return self.allowance() + there.total + pixels + int(passing * (1 + (ROUNDING if self.kind == "cuda" else 0)))

    def allowance(self) -> int:
        """Bytes for what cannot be counted: a GPU's workspace, or the program itself on a CPU."""
        return WORKSPACE if self.kind == "cuda" else resident("VmRSS")

    def lines(self) -> list[str]:
        """What the estimate rests on."""
        settings = self.settings
        model = title(chosen_description(settings.model, settings.weights))
        lines = [
            f"ESTIMATE  {model} at {settings.imgsz}, {self.precision}, all images with "
            f"{len(self.sample.classes)} boxes, {self.kind}; nothing was run on the device",
            f"memory    {size(self.memory)} for the process of each of {self.devices} devices, {SPARE:.0%} to spare",
        ]
        if self.kind == "cuda":
            parts = f"{size(CUDA_CONTEXT)} for the CUDA context (not in the memory above), {size(WORKSPACE)} workspace"
            return [*lines, f"allowed   {parts}, {ROUNDING:.0%} of the activations for the allocator"]
        return [*lines, f"allowed   {size(self.allowance())} for the program and its libraries"]


def estimate_bench(settings: Settings, memory: int | None, say: Say) -> Estimate:
    """The estimate of a run on its `device`, which need not be there; then `memory` must say what it has.

    device=cuda is one GPU, and 0,1 are two. Raises ConfigError where the memory is not known.
    """
    kind, devices = kind_of(settings.device)
    if kind == "cuda" and memory is None:
        raise ConfigError(f"--estimate for device={settings.device}: say what it has: memory=4GiB")
    training, _ = indices(settings, say)
    settings = with_nominal_batch(settings, len(training), devices, say)
    if settings.amp != "auto":
        precision = settings.amp
    else:  # bf16 and fp16 are two bytes each
        precision = "bf16" if kind == "cuda" else choose_precision("auto", torch.device("cpu")).name
    each = free_memory(torch.device("cpu")) if memory is None else memory
    each = each - CUDA_CONTEXT if kind == "cuda" else each // devices
    return Estimate(
        settings,
        kind,
        precision,
        each,
        devices,
        len(training.names),
        len(training),
        heaviest(training, settings),
        training.channels,
    )


def kind_of(device: str | int | list[int]) -> tuple[str, int]:
    """cuda or cpu, and how many, of a `device` setting; `auto` is what is here."""
    name = ",".join(map(str, device)) if isinstance(device, list) else str(device).strip().lower()
    if name == "auto":
        return choose_device("auto").type, 1
    kind, _, count = name.partition(":")
    if kind == "cpu":
        return "cpu", int(count) if count.isdigit() else 1
    if kind == "cuda" or name.replace(",", "").isdigit():
        return "cuda", len(name.split(","))
    raise ConfigError(f"--estimate for device={device}: cpu, cuda or numbers of GPUs")
