"""Which micro-batch, and which way of keeping activations: what is tried, and which of it is recommended.

The limit is found by trial and never by extrapolation: what did not run in the memory is not recommended.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pydantic import ByteSize, TypeAdapter, ValidationError

from detector.config.settings import Settings
from detector.errors import ConfigError
from detector.reporting.table import aligned
from detector.step.plan import Cut, nominal_cut

Kept = tuple[Literal["off", "stages", "all"], bool]
MODES: dict[str, Kept] = {  # values of the settings `checkpoint` and `offload`
    "plain": ("off", False),
    "stages": ("stages", False),
    "all": ("all", False),
    "offload": ("off", True),
    "all + offload": ("all", True),
    "pipeline": ("off", False),  # the network in stages, one on each device
    "pipeline + all": ("all", False),
}
PIPELINED = ("pipeline", "pipeline + all")
# Where no time was measured: how long a step takes beside a plain one, roughly, from docs/small-gpus.md. Copies over a
# GPU's bus have not been measured; they come last.
COST = {"plain": 1.0, "stages": 1.25, "all": 1.35, "offload": 2.0, "all + offload": 2.1}
SPARE = 0.1  # share of the memory that a recommended way leaves free
NOISE = 0.1  # images/s that differ by less are the same: a machine is never quite to itself
STRAY = 1 / 8  # a window further from nbs than this share would be another run


class Trial(NamedTuple):
    """A way to take a step, and what it took."""

    mode: str  # of MODES
    cut: Cut
    peak: int | None  # bytes; None: it was stopped before it had what it wanted
    rate: float | None  # images a second of one device; None: not measured
    fits: bool

    @property
    def batch(self) -> int:
        return self.cut.batch

    def sees(self, norm: str) -> int | None:
        """Images that BatchNorm averages over; None: it uses running statistics."""
        return None if norm == "frozen" else seen(self.cut, norm)

    def settings(self) -> dict[str, int | str | bool]:
        """The lines of a config file."""
        checkpoint, offload = MODES[self.mode]
        staged = {"pipeline": "auto"} if self.mode in PIPELINED else {}
        return {"batch": self.batch, "checkpoint": checkpoint, "offload": offload, **staged}


def check_whole(settings: Settings, what: str) -> None:
    """Raise ConfigError where devices run parts of the network: one device cannot be asked what a part takes."""
    if settings.pipeline != "off":
        raise ConfigError(
            f"{what}: measures whole networks, and with pipeline={settings.pipeline} each device runs a part of one; "
            "name a number of images, batch=N: where they do not fit, the run cuts them finer by itself. "
            "`detector tune` without it measures both, where there are several devices"
        )


def modes_on(kind: str, devices: int, settings: Settings) -> list[str]:
    """The ways of keeping activations that are something on so many devices of a kind; on a CPU offload is none."""
    modes = [mode for mode, (_, offload) in MODES.items() if kind == "cuda" or not offload]
    staged = devices > 1 and settings.norm != "sync" and settings.compile == "off" and settings.nbs_scope != "device"
    return modes if staged else [mode for mode in modes if mode not in PIPELINED]


def in_stages(cut: Cut) -> Cut:
    """The same window where the devices are stages of one replica, and all its micro-batches go through each."""
    return Cut(cut.batch, cut.accumulate * cut.devices)


def mode_of(settings: Settings) -> str:
    """The mode that the settings ask for; `stages` with offload has no name of its own and is measured as it is."""
    kept = settings.checkpoint, settings.offload
    return next((mode for mode, one in MODES.items() if one == kept), "stages + offload")


def cuts(settings: Settings, devices: int, images: int) -> list[Cut]:
    """The cuts to try: micro-batches 1, 2, 4, ... up to the window's share of a device, and that share itself.

    No micro-batch is larger than a device's share of the images. Left out is what would make windows far from nbs.
    """
    share = settings.nbs if settings.nbs_scope == "device" else max(settings.nbs // devices, 1)
    most = min(share, -(-images // devices))
    batches = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    planned = [cut_of(settings, batch, devices) for batch in batches]
    return [cut for cut in planned if cut.batch in (1, most) or near(cut, settings)]


def cut_of(settings: Settings, batch: int, devices: int) -> Cut:
    return nominal_cut(settings.nbs, batch, devices, settings.nbs_scope == "device")


def near(cut: Cut, settings: Settings) -> bool:
    """Whether the window is what nbs asks for, to within STRAY."""
    nominal = settings.nbs * (cut.devices if settings.nbs_scope == "device" else 1)
    return abs(cut.window - nominal) <= STRAY * nominal


def seen(cut: Cut, norm: str) -> int:
    """Images that a BatchNorm of this kind averages over."""
    return cut.batch * (cut.devices if norm == "sync" else 1)


def rounds(planned: Sequence[Cut], norm: str, least: int) -> list[list[Cut]]:
    """The cuts that give BatchNorm `least` images, or the largest of all, and then those that are too small for it.

    The second are of use only where none of the first fits.
    """
    enough = [cut for cut in planned if seen(cut, norm) >= least] or [*planned[-1:]]
    return [enough, [cut for cut in planned if cut not in enough]]


def search(
    settings: Settings,
    planned: Sequence[Cut],
    measure: Callable[[Cut], Trial],
    fitted: Cut | None = None,
    over: Cut | None = None,
) -> list[Trial]:
    """Try the cuts in turn until one does not fit; then the middle between it and the last that does.

    `fitted`: a smaller cut that need not be tried; `over`: a larger one, which is known not to fit.
    """
    found: list[Trial] = []
    for cut in planned:
        found.append(measure(cut))
        if not found[-1].fits:
            break
    low = max((one.cut for one in found if one.fits), key=lambda cut: cut.batch, default=fitted)
    high = next((one.cut for one in found if not one.fits), over if found else None)
    if low is not None and high is not None:
        middle = cut_of(settings, (low.batch + high.batch) // 2, low.devices)
        if middle.batch > low.batch and near(middle, settings):
            found.append(measure(middle))
    return sorted(found, key=lambda one: one.batch)


def recommend(trials: Sequence[Trial], norm: str, least_norm_batch: int) -> Trial | None:
    """The fastest trial that fits, of those whose BatchNorm batch is large enough where there are any; None: none fits.

    Of those that are equally fast, to within NOISE, the plainest mode wins, in the order of MODES, and then the faster
    one, the larger micro-batch and the lower peak. Where no time was measured, COST stands for it.
    """
    fitting = [one for one in trials if one.fits]
    enough = [one for one in fitting if norm == "frozen" or (one.sees(norm) or 0) >= least_norm_batch]
    pool = enough or fitting
    fastest = max((pace(one) for one in pool), default=0.0)
    order = [*MODES]
    return max(
        (one for one in pool if pace(one) >= fastest * (1 - NOISE)),
        key=lambda one: (-order.index(one.mode) if one.mode in order else 0, pace(one), one.batch, -(one.peak or 0)),
        default=None,
    )


def pace(trial: Trial) -> float:
    """Images a second, or where they were not measured, a number that is larger for cheaper modes."""
    return trial.rate or 1 / COST.get(trial.mode, 2.0)


def table(trials: Sequence[Trial], norm: str, chosen: Trial | None) -> str:
    """The trials as text, one a line; the recommended one is marked."""
    rows = [("mode", "batch", "accumulate", "window", "BatchNorm", "peak", "images/s", "fits")]
    for one in trials:
        mark = " <-" if one == chosen else ""
        rate = "" if one.rate is None else f"{one.rate:.1f}"
        seen = one.sees(norm)
        peak = "over" if one.peak is None else size(one.peak)
        counts = (str(number) for number in (one.batch, one.cut.accumulate, one.cut.window))
        rows.append((one.mode, *counts, str(seen or "-"), peak, rate, ("yes" if one.fits else "no") + mark))
    return "\n".join(aligned(rows, left=(0, len(rows[0]) - 1)))


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def parse_memory(text: str) -> int:
    """Bytes of '4GiB', '4.5 GB' or '900M'; GiB is 2^30 and G is 10^9. Raises ConfigError."""
    try:
        count = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        count = 0
    if count < 2**20:
        raise ConfigError(
            f"memory={text}: a number and a unit: memory=4GiB, memory=900MiB or memory=8GB; 1MiB at least"
        )
    return count
