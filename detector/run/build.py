"""What a run is made of, checked and built before anything is written."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from detector import distributed
from detector.config import Settings
from detector.data.augment import Augmentation
from detector.data.dataset import TrainingSet, ValidationSet
from detector.data.description import load_description
from detector.data.index import Index, build_index
from detector.data.loader import worker_count
from detector.device import choose_device
from detector.errors import CheckpointError, ConfigError
from detector.loss.criterion import DetectionLoss
from detector.model.checkpoint import start_from
from detector.model.network import Network, build_network
from detector.model.norm import set_norms
from detector.precision import Precision, choose_precision
from detector.run.resume import Resume
from detector.step.ema import Ema
from detector.step.offload import offloaded
from detector.step.optim import build_optimizer, choose, set_decay
from detector.step.plan import Cut, count_steps, lr_factor, nominal_cut
from detector.step.schedule import Leg, Schedule, extended
from detector.step.state import TrainState
from detector.step.step import StepRules
from detector.step.weighting import RULES

Say = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """What a run is made of besides its state; all of it follows from the settings."""

    settings: Settings  # resolved: what `auto` came to is written in
    device: torch.device
    schedule: Schedule
    rules: StepRules
    training: TrainingSet
    validation: ValidationSet
    names: tuple[str, ...]
    workers: int

    @property
    def ramp(self) -> float:
        """Epochs over which the window grows."""
        return self.schedule.warmup if self.settings.accumulate_warmup else 0.0


def prepare(settings: Settings, resume: Resume | None, say: Say) -> tuple[Parts, TrainState]:
    """Everything a run needs, or the user's mistake as an error; `resume` is a checkpoint to go on from."""
    assert settings.batch != "auto", "the commands choose a number first, see fitting/search.py"
    device = choose_device(settings.device)
    training, validation = indices(settings, say)
    names = training.names
    per_device = settings.nbs_scope == "device"
    cut = nominal_cut(settings.nbs, settings.batch, distributed.world_size(), per_device)
    choice = choose(settings, -(-len(training) // cut.window) * settings.epochs, len(names))
    settings = settings.model_copy(
        update={"optimizer": choice.optimizer, "lr0": choice.lr0, "momentum": choice.momentum}
    )

    network = prepared_network(settings, len(names), device, None if resume else say)
    optimizer = build_optimizer(network, choice, weight_decay(settings, cut))
    precision = precision_of(settings, device, resume)
    legs = (Leg(0, settings.epochs, curve_of(settings)),)
    state = TrainState(network, Ema(network), optimizer, precision, cut=cut, batch=settings.batch, legs=legs)
    if resume is not None:
        restore(state, resume, training)
        go_on_by(settings, state, resume)

    parts = Parts(
        settings=settings,
        device=device,
        schedule=Schedule(
            legs=state.legs,
            warmup=settings.warmup(),
            lr0=settings.lr0 * lr_factor(state.cut, settings.nbs, settings.scale_lr, per_device),
            lrf=settings.lrf,
            momentum=settings.momentum,
            warmup_momentum=settings.warmup_momentum,
            warmup_bias_lr=choice.warmup_bias_lr,
        ),
        rules=step_rules(settings, network),
        training=training_set(training, settings),
        validation=ValidationSet(validation, settings.imgsz, bad_images=settings.bad_images),
        names=names,
        workers=worker_count(settings.workers),
    )
    introduce(parts, state, say)
    return parts, state


def prepared_network(settings: Settings, classes: int, device: torch.device, say: Say | None) -> Network:
    """A network as the settings want it, on the device; `say` is told of weights to start from, None: there are none.

    Everything but images, optimizer and averages: what `tune` measures is this network, too.
    """
    network = build_network(settings.model, classes, settings.seed)
    if settings.weights and say:
        say(start_from(network, settings.weights))
    equip(network, settings, device)
    network = network.to(device)
    if device.type != "mps":  # measured to help on CPUs and on GPUs with tensor cores
        network = network.to(memory_format=torch.channels_last)
    return network


def equip(network: Network, settings: Settings, device: torch.device) -> None:
    """Freeze layers, and choose norms and checkpoints, as the settings say."""
    freeze(network, settings.freeze)
    set_norms(network, settings.norm, device, distributed.world_size())
    network.set_checkpoint(settings.checkpoint)


def step_rules(settings: Settings, network: Network) -> StepRules:
    """What the settings say of a step, for this network."""
    criterion = DetectionLoss(network.reg_max, network.strides, settings.box, settings.cls, settings.dfl)
    keeping = offloaded if settings.offload else nullcontext
    undo = settings.norm != "sync" or distributed.world_size() == 1
    return StepRules(criterion, RULES[settings.normalize], settings.clip_norm, keeping, undo)


def indices(settings: Settings, say: Say) -> tuple[Index, Index]:
    """The training and validation images of the settings' data set."""
    description = load_description(settings.data)
    if settings.names is not None:
        if len(settings.names) != len(description.names):
            raise ConfigError(
                f"names={settings.names}: {settings.data} has {len(description.names)} classes; name each of them"
            )
        description = replace(description, names=tuple(settings.names))
    training, validation = build_index(description, "train"), build_index(description, "val")
    for split, index in (("train", training), ("val", validation)):
        for warning in index.warnings:
            say(f"warning: {split}: {warning}")
    return training, validation


def training_set(index: Index, settings: Settings) -> TrainingSet:
    strengths = Augmentation(**{name: getattr(settings, name) for name in Augmentation.__dataclass_fields__})
    return TrainingSet(
        index,
        settings.imgsz,
        strengths,
        settings.seed,
        settings.epochs,
        settings.close_mosaic,
        settings.cache,
        settings.bad_images,
    )


def freeze(network: Network, layers: int | list[int]) -> None:
    """Stop training the first `layers` layers, or those listed. ConfigError where the model has no such layer."""
    chosen = list(range(layers)) if isinstance(layers, int) else layers
    count = len(network.model)
    if chosen and max(chosen) >= count - 1:
        raise ConfigError(
            f"freeze={layers}: this model has layers 0 to {count - 1}, and the last, the head, must train"
        )
    for layer in chosen:
        network.model[layer].requires_grad_(False)


def precision_of(settings: Settings, device: torch.device, resume: Resume | None) -> Precision:
    """As `amp` says; where that is `auto`, a run that goes on keeps its own on the same kind of device."""
    if resume is not None and settings.amp == "auto" and resume.saved["precision"][1] == device.type:
        return choose_precision(resume.saved["precision"][0], device)
    return choose_precision(settings.amp, device)


def curve_of(settings: Settings) -> Literal["linear", "cosine"]:
    """How the learning rate falls in a run that is not extended."""
    return "cosine" if settings.cos_lr else "linear"


def go_on_by(settings: Settings, state: TrainState, resume: Resume) -> None:
    """Apply to a restored state the settings that may be others now. ConfigError where there is nothing left to do."""
    if settings.epochs < state.epoch:
        raise ConfigError(
            f"epochs={settings.epochs}: this run has trained {state.epoch} already; name more, or start a new run"
        )
    if settings.epochs == state.epoch and resume.changes.keys() - {"epochs"}:
        changes = ", ".join(sorted(resume.changes))
        raise ConfigError(
            f"{resume.folder}: this run is finished, with no step left that {changes} could change; "
            f"add epochs=N, more than {state.epoch}, to train on"
        )
    state.legs = (replace(state.legs[0], curve=curve_of(settings)), *state.legs[1:])
    if settings.epochs != state.legs[-1].end:
        state.legs = extended(state.legs, settings.epochs, settings.extend_lr)
    if "batch" in resume.changes:
        state.batch = settings.batch
    set_decay(state.optimizer, weight_decay(settings, state.cut))


def restore(state: TrainState, resume: Resume, training: Index) -> None:
    """Take up a saved state. Raises CheckpointError where it belongs to other images or another network."""
    saved = resume.saved
    if tuple(saved["names"]) != training.names:
        raise CheckpointError(
            f"the data set's classes {list(training.names)} are not those of the run, {saved['names']}"
        )
    if saved["images"] != len(training) or saved["image_names"] != training.digest:
        raise CheckpointError(
            f"the data set's {len(training)} training images are not the run's {saved['images']} (compared by their "
            f"names): a run goes on with its own images; start a new one with weights={resume.path}"
        )
    state.load_state_dict(saved)


def introduce(parts: Parts, state: TrainState, say: Say) -> None:
    """Print what was chosen, as arithmetic where it is arithmetic."""
    settings, cut, images, world = parts.settings, state.cut, len(parts.training), distributed.world_size()
    parameters = sum(parameter.numel() for parameter in state.network.parameters())
    steps, total = -(-images // cut.window), count_steps(images, cut, settings.epochs, parts.ramp)
    boxes = len(parts.training.index.classes)
    accumulate = -(-cut.window // (state.batch * world))
    planned = cut.window == state.batch * accumulate * world
    devices = f"{world} {'device' if world == 1 else 'devices'}{'' if planned else ' at most'}"
    decay = f"{settings.weight_decay:g} x {cut.window}/{settings.nbs} = {weight_decay(settings, cut):g}"
    say(f"model     {settings.model}, {parameters:,} parameters, {len(parts.names)} classes")
    say(f"data      {images:,} images with {boxes:,} boxes, {len(parts.validation):,} for validation; {settings.data}")
    say(f"device    {parts.device}, {state.precision.name}, imgsz {settings.imgsz}, {parts.workers} loader processes")
    say(
        f"window    {cut.window} images a step = {state.batch} a micro-batch x {accumulate} accumulated x "
        f"{devices}; {steps:,} steps an epoch, {total:,} in all"
    )
    rate, factor = parts.schedule.lr0, parts.schedule.lr0 / settings.lr0
    lr0 = f"{settings.lr0:g}"
    if factor != 1:
        lr0 += f" x {factor:g} ({settings.scale_lr}, {cut.window} images a step for {settings.nbs}) = {rate:g}"
    say(f"optimizer {settings.optimizer}, lr0 {lr0}, momentum {settings.momentum:g}, weight decay {decay}")
    for leg in state.legs[1:]:
        say(f"extended  epochs {leg.start} to {leg.end}: lr0 by {leg.curve}")
    if settings.norm != "batch" or settings.normalize != "window":
        say(f"norms     bn {settings.norm}, losses normalised by {settings.normalize}")
    if state.batch < settings.batch:
        say(f"memory    {state.batch} images a micro-batch, because it ran out at more; batch=N tries N again")
    if settings.checkpoint != "off" or settings.offload:
        say(f"memory    checkpoint {settings.checkpoint}, offload {'on' if settings.offload else 'off'}")
    if warmup := parts.schedule.warmup:
        ramp = parts.ramp and cut.accumulate > 1
        growth = f", window from {cut.batch * cut.devices} to {cut.window} images" if ramp else ""
        say(f"warmup    {warmup:g} epochs: lr from 0 to {rate:g}{growth}")


def weight_decay(settings: Settings, cut: Cut) -> float:
    """The decay of a step, which follows the images in it."""
    return settings.weight_decay * cut.window / settings.nbs
