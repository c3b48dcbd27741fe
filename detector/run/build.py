"""What a run is made of, checked and built before anything is written."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from detector import distributed
from detector.config.settings import Settings
from detector.data.augment import Augmentation
from detector.data.cache import ImageCache
from detector.data.choosing import fraction_of, of_classes
from detector.data.dataset import TrainingSet, ValidationSet
from detector.data.description import data_root, load_description
from detector.data.doctor import before_training
from detector.data.findings import summaries
from detector.data.index import Index
from detector.data.loader import worker_count
from detector.data.reading import Reading, build_index
from detector.data.sampling import class_weights, sampling_of
from detector.data.user_transforms import UserTransforms
from detector.device import choose_device
from detector.errors import CheckpointError, ConfigError
from detector.loss.criterion import DetectionLoss, branch_shares
from detector.model.checkpoint import DEFAULT, chosen_description, started
from detector.model.description import for_images
from detector.model.freezing import freeze
from detector.model.network import Network, check_side, network_from_description, new_network
from detector.model.norm import set_norms
from detector.precision import Precision, choose_precision
from detector.reporting.loggers import loggers_of
from detector.reporting.progress import reading_bar
from detector.reporting.reports import Reports
from detector.run.interrupt import Interruption
from detector.run.nominal import with_nominal_batch
from detector.run.resume import Resume
from detector.run.run import Run, Say, Watch
from detector.run.stages import mesh_of, pipeline_of
from detector.run.state import RunState
from detector.step.compiling import Compiled
from detector.step.ema import Ema
from detector.step.gradients import GradientSum
from detector.step.offload import offloaded
from detector.step.optim import LONG, Choice, build_optimizer, choose, set_decay
from detector.step.pipeline import Pipeline
from detector.step.plan import Cut, lr_factor, nominal_cut
from detector.step.schedule import Gains, Leg, Schedule, extended
from detector.step.step import StepRules

GENTLE = 0.002  # rates up to this are written for AdamW


class Images:
    """Where a run has its images from: read for it alone."""

    def indices(self, settings: Settings, say: Say) -> tuple[Index, Index]:
        """The training and validation images of the settings' data set."""
        return indices(settings, say)

    def training_set(self, index: Index, settings: Settings, colours_later: bool) -> TrainingSet:
        """The training images, to be augmented."""
        return training_set(index, settings, colours_later)


OWN = Images()


def build(settings: Settings, resume: Resume | None, say: Say, watch: Watch, images: Images = OWN) -> Run:
    """A run that is ready to train, or the user's mistake as an error; `resume` is a checkpoint to go on from.

    Nothing has been written yet.
    """
    assert settings.batch != "auto", "the commands choose a number first, see fitting/search.py"
    for line in resume.lines() if resume else ():
        say(line)
    device = choose_device(settings.device)
    training, validation = images.indices(settings, say)
    mesh = mesh_of(settings)
    settings = with_nominal_batch(settings, len(training), mesh.replicas, say)
    names = training.names
    cut = planned_cut(settings, len(training), mesh.replicas)
    choice = chosen_optimizer(settings, cut, len(training), len(names))
    warn_of_rate(settings, choice, say)
    model = DEFAULT if settings.model == "auto" and settings.weights is None else settings.model
    settings = settings.model_copy(update={**choice._asdict(), "model": model})

    saved = resume.saved["description"] if resume else None
    network = prepared_network(settings, names, device, say, saved, training)
    check_images(network, training)
    optimizer = build_optimizer(network, choice, weight_decay(settings, cut), class_parameters(network))
    precision = precision_of(settings, device, resume)
    legs = (Leg(0, settings.epochs, curve_of(settings)),)
    ema = Ema(network, None if settings.ema_tau == "auto" else settings.ema_tau)
    state = RunState(network, ema, optimizer, precision, cut=cut, batch=cut.batch, legs=legs)
    if resume is not None:
        restore(state, resume, training)
        go_on_by(settings, state, resume)
    return Run(
        settings=settings,
        device=device,
        mesh=mesh,
        names=names,
        training=images.training_set(training, settings, colours_later=device.type != "cpu"),
        validation=ValidationSet(validation, settings.imgsz, network.stride, bad_images=settings.bad_images),
        workers=worker_count(settings.workers),
        schedule=schedule_of(settings, state),
        rules=step_rules(settings, network, training, say, pipeline_of(settings, network, mesh, say)),
        state=state,
        gradients=GradientSum(network),
        say=say,
        interruption=Interruption(say),
        reports=Reports(loggers=loggers_of(settings.log) if distributed.is_main() else {}, say=say),
        watch=watch,
    )


def planned_cut(settings: Settings, images: int, replicas: int) -> Cut:
    """How the windows of a fresh run are cut."""
    per_device = settings.nbs_scope == "device"
    return nominal_cut(settings.nbs, settings.batch, replicas, per_device, images)


def chosen_optimizer(settings: Settings, cut: Cut, images: int, classes: int) -> Choice:
    """The optimizer of a run on so many images; what the user wrote of its rates wins, also with `auto`.

    The public trainer's rule counts iterations: nominal batches, or micro-batches over all devices where these are
    larger.
    """
    auto, written = settings.optimizer == "auto", settings.model_fields_set
    lr0 = settings.lr0 if "lr0" in written or not auto else None
    momentum = settings.momentum if "momentum" in written or not auto else None
    start = settings.warmup_bias_lr if "warmup_bias_lr" in written else None
    nbs = settings.nbs * (cut.devices if settings.nbs_scope == "device" else 1)
    iterations = -(-images // max(cut.batch * cut.devices, nbs)) * settings.epochs
    gentle = settings.recipe == "public" and iterations <= LONG
    return choose(settings.optimizer, gentle, classes, lr0, momentum, start)


def warn_of_rate(settings: Settings, choice: Choice, say: Say) -> None:
    """Say where a rate was written for another optimizer than the one that was chosen."""
    if settings.optimizer == "auto" and choice.optimizer == "MuSGD" and choice.lr0 <= GENTLE:
        say(
            f"warning: lr0 {choice.lr0:g} is a rate for AdamW, and by it MuSGD, which optimizer: auto takes, learns "
            "slowly; leave lr0 out for its own, 0.01, or set optimizer=AdamW"
        )


def class_parameters(network: Network) -> list[nn.Parameter]:
    """Those of the branches that are built for a number of classes, which MuSGD moves faster."""
    branches = (getattr(network.head, name) for name in network.head.class_branches)
    return [parameter for branch in branches for parameter in branch.parameters()]


def schedule_of(settings: Settings, state: RunState) -> Schedule:
    """The rates of a run whose optimizer is chosen."""
    per_device = settings.nbs_scope == "device"
    gains, last_gains = gains_of(settings, state.network)
    return Schedule(
        legs=state.legs,
        warmup=settings.warmup(),
        lr0=settings.lr0 * lr_factor(state.cut, settings.nbs, settings.scale_lr, per_device),
        lrf=settings.lrf,
        momentum=settings.momentum,
        warmup_momentum=settings.momentum if settings.optimizer == "AdamW" else settings.warmup_momentum,
        warmup_bias_lr=settings.warmup_bias_lr,
        gains=gains,
        last_gains=last_gains,
    )


def gains_of(settings: Settings, network: Network) -> tuple[Gains, Gains]:
    """The gains of the loss terms, branch by branch, in the first epoch of a run and in the last.

    They are the same for each branch, times its share.
    """
    gains = [getattr(settings, gain) for gain in network.head.gains]
    first, last = branch_shares(len(network.branches()))
    return [[share * gain for gain in gains] for share in first], [[share * gain for gain in gains] for share in last]


def prepared_network(
    settings: Settings,
    names: Sequence[str],
    device: torch.device,
    say: Say | None,
    description: dict[str, Any] | None = None,
    images: Index | None = None,
) -> Network:
    """A network as the settings want it, on the device; `say` is told of weights to start from, None: there are none.

    description: of the network of a run that goes on, for its own weights. images: those that a new network is for;
    None: as its model says. Everything but images, optimizer and averages: what `tune` measures is this network, too.
    """
    if description is not None:
        network = network_from_description(description, settings.seed)
    else:
        chosen = chosen_description(settings.model, settings.weights)
        if images is not None:
            chosen = for_images(chosen, images.channels, images.value_range)
        if settings.weights and say:
            network, note = started(chosen, settings.weights, names, settings.seed)
            say(note)
        else:
            network = new_network({**chosen, "nc": len(names)}, settings.seed)
    check_side(network, settings.imgsz)
    check_metric(settings.metric, network)
    equip(network, settings, device)
    network = network.to(device)
    if device.type != "mps":  # measured to help on CPUs and on GPUs with tensor cores
        network = network.to(memory_format=torch.channels_last)
    return network


def check_images(network: Network, images: Index) -> None:
    """Raise CheckpointError where a run that goes on was trained with images of other channels or values."""
    now, then = (images.channels, images.value_range), (network.channels, network.value_range)
    if now != then:
        raise CheckpointError(
            f"the data set has channels {now[0]} and range {now[1]}, and the run was trained with {then[0]} and "
            f"{then[1]}; put them back into data.yaml, or start a new run"
        )


def check_metric(metric: str, network: Network) -> None:
    """Raise ConfigError where what is best would be a loss that this model has not."""
    terms = network.head.terms
    if metric in ("dfl", "l1") and metric not in terms:
        raise ConfigError(f"metric={metric}: the losses of this model are {', '.join(terms)}")


def equip(network: Network, settings: Settings, device: torch.device) -> None:
    """Freeze layers, and choose norms, checkpoints and what is validated of two heads, as the settings say."""
    freeze(network, settings.freeze)
    network.head.choose(settings.nms)
    set_norms(network, settings.norm, device, distributed.world_size())
    network.set_checkpoint(settings.checkpoint)


def step_rules(
    settings: Settings, network: Network, training: Index, say: Say, pipeline: Pipeline | None = None
) -> StepRules:
    """What the settings say of a step, for this network on its device and these images; nothing is compiled yet."""
    weights = None
    if settings.cls_pw:
        device = next(network.parameters()).device
        weights = torch.tensor(class_weights(training, settings.cls_pw), dtype=torch.float32, device=device)
    compiled = None if settings.compile == "off" else Compiled(settings.compile, bool(settings.multi_scale), say)
    return StepRules(
        criterion=DetectionLoss(network.head, weights),
        forward=compiled or StepRules.forward,
        clip_norm=settings.clip_norm,
        keeping=offloaded if settings.offload else nullcontext,
        apart=settings.norm != "sync" or distributed.world_size() == 1,
        pipeline=pipeline,
    )


def indices(settings: Settings, say: Say) -> tuple[Index, Index]:
    """The training and validation images of the settings' data set, read by one process for all."""
    root = str(data_root(settings.data))  # where the others have them may be elsewhere
    both = distributed.made_by_main(lambda: read_indices(settings, say))
    training, validation = (index if index.root == root else replace(index, root=root) for index in both)
    return training.shared(), validation.shared()


def read_indices(settings: Settings, say: Say) -> tuple[Index, Index]:
    """The same, read by this process. Crowds and difficult objects are not among the training boxes."""
    description = load_description(settings.data).named(settings.names)
    turned = max(settings.copy_paste, settings.degrees, settings.shear, settings.perspective) > 0
    both = []
    for split in ("train", "val"):
        polygons = turned and split == "train"  # a turned polygon has a closer box than a turned box
        reading = Reading(settings.bad_boxes, settings.max_missing_labels, polygons, settings.cache_dir)
        index = build_index(description, split, reading, reading_bar(split))
        for warning in index.warnings:
            say(f"warning: {split}: {warning}")
        both.append(index)
    training, validation = both
    for warning in summaries(before_training({"train": training, "val": validation}, description)):
        say(f"warning: {warning}")
    if settings.copy_paste and not len(training.points):
        say("warning: train: copy_paste: no box has a polygon, so nothing is pasted")
    if training.ignored_boxes.any():
        training = training.keep(~training.ignored_boxes)
    if settings.fraction < 1:
        there, training = len(training), fraction_of(training, settings.fraction, settings.seed)
        say(f"fraction  {settings.fraction:g}: {len(training):,} of {there:,} training images")
    training, validation = (of_classes(one, settings.classes, settings.single_cls) for one in (training, validation))
    if settings.classes is not None and not len(training.classes):
        raise ConfigError(f"classes={settings.classes}: none of the {len(training):,} training images shows one")
    return training, validation


def training_set(
    index: Index, settings: Settings, colours_later: bool = False, cache: ImageCache | None = None
) -> TrainingSet:
    """The training images, to be augmented; `cache`: one that was made for the same index and settings."""
    strengths = Augmentation(**{name: getattr(settings, name) for name in Augmentation.__dataclass_fields__})
    return TrainingSet(
        index,
        settings.imgsz,
        strengths,
        settings.seed,
        settings.epochs,
        settings.closing(),
        cache or settings.cache,
        settings.bad_images,
        sampling_of(index, settings.sampling, settings.seed),
        budget=None if settings.cache_gb is None else int(settings.cache_gb * 2**30),
        cache_folder=settings.cache_dir or settings.data.parent,
        processes=worker_count(settings.workers),
        transforms=UserTransforms(settings.albumentations) if settings.albumentations else None,
        colours_later=colours_later,
    )


def precision_of(settings: Settings, device: torch.device, resume: Resume | None) -> Precision:
    """As `amp` says; where that is `auto`, a run that goes on keeps its own on the same kind of device."""
    if resume is not None and settings.amp == "auto" and resume.saved["precision"][1] == device.type:
        return choose_precision(resume.saved["precision"][0], device)
    return choose_precision(settings.amp, device)


def curve_of(settings: Settings) -> Literal["linear", "cosine"]:
    """How the learning rate falls in a run that is not extended."""
    return "cosine" if settings.cos_lr else "linear"


def go_on_by(settings: Settings, state: RunState, resume: Resume) -> None:
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


def restore(state: RunState, resume: Resume, training: Index) -> None:
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


def weight_decay(settings: Settings, cut: Cut) -> float:
    """The decay of a step, which follows the images in it."""
    return settings.weight_decay * cut.window / settings.nbs
