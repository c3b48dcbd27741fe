"""What a run says of itself before it begins."""

from detector.config.groups import PUBLIC
from detector.config.settings import Settings
from detector.data.sampling import class_weights
from detector.model.description import title
from detector.reporting.arithmetic import decay_line, window_line
from detector.run.run import Run
from detector.step.plan import input_sides
from detector.step.schedule import GROUPS


def introduce(run: Run) -> None:
    """Print what was chosen, as arithmetic where it is arithmetic."""
    settings, state, cut, images, say = run.settings, run.state, run.state.cut, len(run.training), run.say
    parameters = sum(parameter.numel() for parameter in state.network.parameters())
    boxes = len(run.training.index.classes)
    part = "device" if run.mesh.stages == 1 else "replica"
    if settings.recipe == "public":
        say(f"recipe    public: {', '.join(f'{key} {getattr(settings, key):g}' for key in PUBLIC)}")
    say(f"model     {title(state.network.description)}, {parameters:,} parameters, {len(run.names)} classes")
    channels = f" of {state.network.channels} channels" if state.network.channels != 3 else ""
    data = f"{images:,} images{channels} with {boxes:,} boxes, {len(run.validation):,} for validation"
    say(f"data      {data}; {settings.data}")
    introduce_balance(run)
    say(f"device    {run.device}, {state.precision.name}, imgsz {settings.imgsz}, {run.workers} loader processes")
    say(f"cache     {run.training.cache.told()}")
    say(f"window    {window_line(cut, state.batch, run.mesh.replicas, images, settings.epochs, run.ramp, part)}")
    rate, factor = run.schedule.lr0, run.schedule.lr0 / settings.lr0
    lr0 = f"{settings.lr0:g}"
    if factor != 1:
        lr0 += f" x {factor:g} ({settings.scale_lr}, {cut.window} images a step for {settings.nbs}) = {rate:g}"
    if settings.optimizer == "MuSGD":
        lr0 += f" (class branches {GROUPS['fast muon']:g} x)"
    say(
        f"optimizer {settings.optimizer}, lr0 {lr0}, momentum {settings.momentum:g}, "
        f"weight decay {decay_line(settings.weight_decay, cut, settings.nbs)}"
    )
    for leg in state.legs[1:]:
        say(f"extended  epochs {leg.start} to {leg.end}: lr0 by {leg.curve}")
    if max(settings.mosaic, settings.mixup, settings.cutmix, settings.copy_paste):
        say(f"mosaic    {mosaic_epochs(settings)}")
    low, high = input_sides(settings.imgsz, settings.multi_scale, state.network.stride)
    if low < high:
        say(f"sizes     {low} to {high}, one a step")
    if settings.norm != "batch":
        say(f"norms     bn {settings.norm}")
    if state.batch < min(settings.batch, cut.batch):
        say(f"memory    {state.batch} images a micro-batch, because it ran out at more; batch=N tries N again")
    if settings.checkpoint != "off" or settings.offload:
        say(f"memory    checkpoint {settings.checkpoint}, offload {'on' if settings.offload else 'off'}")
    if settings.compile != "off":
        say(f"compile   {settings.compile}, before the first step")
    if warmup := run.schedule.warmup:
        ramp = run.ramp and cut.accumulate > 1
        growth = f", window from {cut.batch * cut.devices} to {cut.window} images" if ramp else ""
        biases = f" (biases from {run.schedule.warmup_bias_lr:g})" if run.schedule.warmup_bias_lr else ""
        say(f"warmup    {warmup:g} epochs: lr from 0 to {rate:g}{biases}{growth}")


def introduce_balance(run: Run) -> None:
    """Print which classes are learned, what they weigh and how often their images come, where that is not the usual."""
    settings, say = run.settings, run.say
    if run.judged is not None:
        say(f"classes   boxes of {', '.join(run.names[number] for number in sorted(run.judged))} alone")
    if settings.cls_pw:
        weights = class_weights(run.training.index, settings.cls_pw)
        least, most = int(weights.argmin()), int(weights.argmax())
        say(
            f"classes   weights {weights[least]:.3g} ({run.names[least]}) to {weights[most]:.3g} ({run.names[most]}): "
            f"boxes^-{settings.cls_pw:g}, mean 1"
        )
    if (expected := run.training.sampling.expected) is not None:
        say(f"sampling  {settings.sampling}: an image {expected.min():.2g} to {expected.max():.2g} times an epoch")


def mosaic_epochs(settings: Settings) -> str:
    """Which epochs have mosaic, copy-paste, mixup or cutmix, by their numbers from 1."""
    last = settings.epochs - settings.closing()
    if last < 1:
        return f"in no epoch: close_mosaic is {settings.close_mosaic} of {settings.epochs}"
    return f"in epochs 1 to {last}" if last < settings.epochs else "in all epochs"
