"""`nbs: auto`: a nominal batch that leaves a run enough steps."""

from detector.config.settings import Settings
from detector.run.run import Say
from detector.step.plan import ENOUGH_STEPS, NOMINAL, enough_steps


def with_nominal_batch(settings: Settings, images: int, devices: int, say: Say) -> Settings:
    """The settings with a number for `nbs: auto`, which follows from the images of an epoch and the epochs alone.

    Where it was lowered no micro-batch is larger than a device's share of it: `batch` is what a device may take at
    once, and no reason for larger steps.
    """
    if settings.nbs != "auto":
        return settings
    epochs, parts = settings.epochs, devices if settings.nbs_scope == "device" else 1
    nbs = enough_steps(images / parts, epochs)

    def steps(nominal: int) -> int:
        return -(-images // (nominal * parts)) * epochs

    length = f"{epochs} epoch{'' if epochs == 1 else 's'} make{'s' if epochs == 1 else ''}"
    if nbs == NOMINAL:
        say(f"nbs       {nbs}: {length} {steps(nbs):,} steps, and {ENOUGH_STEPS:,} are enough")
        return settings.model_copy(update={"nbs": nbs})
    say(
        f"nbs       {nbs}: {length} {steps(nbs):,} steps; of {NOMINAL} images it would be "
        f"{steps(NOMINAL):,}, fewer than {ENOUGH_STEPS:,}"
    )
    share = max(nbs * parts // devices, 1)
    if settings.batch == "auto" or settings.batch <= share:
        return settings.model_copy(update={"nbs": nbs})
    say(f"batch     {share}, not {settings.batch}: a device's share of a step")
    return settings.model_copy(update={"nbs": nbs, "batch": share})
