"""Run by torchrun, once a rank, or alone: steps in which memory runs out on one rank, at each place in turn.

Usage: shortage_worker.py OUT FAILING_RANK, and FAILING_RANK -1 for the same steps without a failure. Saves the weights
and how the micro-batch got smaller.
"""

import sys
from types import SimpleNamespace

import torch
from scenes import random_batch
from test_step import RATES, new_state

from detector import distributed
from detector.loss.criterion import DetectionLoss
from detector.run import recover
from detector.step.gradients import GradientSum
from detector.step.plan import Window, split
from detector.step.step import StepRules

IMAGES, BATCH = 16, 4
PLACES = [(stage, number) for stage in ("forward", "backward") for number in (1, 2)]
PLACES += [("gradient", 1), ("optimizer", 1), ("average", 1)]


class Shortage:
    """Lets memory run out at one call of a stage, and then never again."""

    def __init__(self, state, stage, number):
        self.state, self.number, self.calls = state, number, 0
        if stage == "forward":
            self.hook = state.network.register_forward_pre_hook(self.call)
        elif stage == "backward":  # with the gradients of the later layers added already
            self.hook = state.network.model[2].conv.weight.register_hook(self.call)
        else:
            owner, name = {
                "gradient": (state.scaler, "unscale_"),
                "optimizer": (state.optimizer, "step"),
                "average": (state.ema, "update"),
            }[stage]
            real = getattr(owner, name)
            setattr(owner, name, lambda *given: (real(*given), self.call()))
            self.hook = SimpleNamespace(remove=lambda: setattr(owner, name, real))

    def call(self, *given):
        """At the worst moment: all is changed already."""
        self.calls += 1
        if self.calls == self.number:
            raise torch.OutOfMemoryError("CUDA out of memory (not really)")


def run_of(state, say=print, batch=BATCH, grow_after=0):
    criterion = DetectionLoss(state.network.head)
    sizes = {"imgsz": 64, "multi_scale": 0.0, "seed": 0}
    settings = SimpleNamespace(batch=batch, grow_after=grow_after, max_bad_steps=10, amp="fp32", **sizes)
    state.batch = batch
    return SimpleNamespace(
        settings=settings,
        state=state,
        rules=StepRules(criterion, clip_norm=10.0),
        gradients=GradientSum(state.network),
        training=range(IMAGES),
        device="cpu",
        last="last.pt",
        say=say,
    )


def take(run, seed):
    """A step on IMAGES random images, as the loader would hand them out."""
    world, rank = distributed.world_size(), distributed.rank()
    cut = split(range(IMAGES), run.state.batch, world)
    whole = random_batch([2, 1, 0, 3] * (IMAGES // 4), seed=seed)
    held = [whole.part(micro[0], micro[-1] + 1) for micro in cut[rank]]
    return recover.take(run, Window(0, 0, cut), held, RATES)


def main(out, failing):
    with distributed.process_group(torch.device("cpu")):
        state = new_state(torch.float64)
        state.network.register_forward_pre_hook(lambda network, images: images[0].double())
        lines, sizes = [], []
        run = run_of(state, lines.append)
        for seed, (stage, number) in enumerate(PLACES):
            state.batch = BATCH
            mine = distributed.rank() == failing
            shortage = Shortage(state, stage, number if mine else 10**9)
            assert take(run, seed).applied
            shortage.hook.remove()
            sizes.append(state.batch)
        if distributed.is_main():
            saved = state.state_dict()
            torch.save({"model": saved["model"], "ema": saved["ema"], "sizes": sizes, "lines": lines}, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
