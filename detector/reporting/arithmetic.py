"""The numbers of a run as the arithmetic that they come from: for who starts it, and for who reads of it later."""

from detector.step.plan import Cut, count_steps


def window_line(cut: Cut, batch: int, world: int, images: int, epochs: int, ramp: float, part: str = "device") -> str:
    """How many images make a step, and how many steps there are.

    batch and world: images of a micro-batch and devices as they are now, which may be others than were planned with.
    ramp: epochs over which the window grows. part: what takes a share of a window.
    """
    accumulate = -(-cut.window // (batch * world))
    planned = cut.window == batch * accumulate * world
    devices = f"{world} {part}{'' if world == 1 else 's'}{'' if planned else ' at most'}"
    steps, total = -(-images // cut.window), count_steps(images, cut, epochs, ramp)
    return (
        f"{cut.window} images a step = {batch} a micro-batch x {accumulate} accumulated x {devices}; "
        f"{steps:,} steps an epoch, {total:,} in all"
    )


def decay_line(weight_decay: float, cut: Cut, nbs: int) -> str:
    """The weight decay of a step, which follows the images in it."""
    return f"{weight_decay:g} x {cut.window}/{nbs} = {weight_decay * cut.window / nbs:g}"
