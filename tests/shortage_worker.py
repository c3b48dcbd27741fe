"""Run by torchrun, once a rank, or alone: steps in which memory runs out on one rank, at each place in turn.

Usage: shortage_worker.py OUT FAILING_RANK [STARTS], and FAILING_RANK -1 for the same steps without a failure. STARTS
are the first layers of stages. Saves the weights and how the micro-batch got smaller.
"""

import json
import sys
from types import SimpleNamespace

import torch
from scenes import random_batch
from test_step import RATES, new_state

from detector import distributed
from detector.loss.criterion import DetectionLoss
from detector.mesh import Mesh
from detector.run import recover
from detector.run.stages import for_all_stages
from detector.step import messages
from detector.step.gradients import GradientSum
from detector.step.pipeline import Pipeline
from detector.step.plan import Window, split
from detector.step.step import StepRules

IMAGES, BATCH = 16, 4
PLACES = [(stage, number) for stage in ("forward", "backward") for number in (1, 2)]
PLACES += [("gradient", 1), ("optimizer", 1), ("average", 1)]
OF_STAGES = [("message", 2) if place == ("gradient", 1) else place for place in PLACES]  # no room for what is sent


class Shortage:
    """Lets memory run out at one call of a stage, and then never again; `start` is the first layer that runs here."""

    def __init__(self, state, stage, number, start=0):
        self.state, self.number, self.calls = state, number, 0
        if stage == "forward":
            self.hook = state.network.model[start].register_forward_pre_hook(self.call)
        elif stage == "backward":  # with the gradients of the later layers added already
            self.hook = state.network.model[start + 1].conv.weight.register_hook(self.call)
        else:
            owner, name = {
                "gradient": (state.scaler, "unscale_"),
                "optimizer": (state.optimizer, "step"),
                "average": (state.ema, "update"),
                "message": (messages.Kind, "empty"),
            }[stage]
            real = getattr(owner, name)

            def short(*given):
                made = real(*given)
                self.call()
                return made

            setattr(owner, name, short)
            self.hook = SimpleNamespace(remove=lambda: setattr(owner, name, real))

    def call(self, *given):
        """At the worst moment: all is changed already."""
        self.calls += 1
        if self.calls == self.number:
            raise torch.OutOfMemoryError("CUDA out of memory (not really)")


def run_of(state, say=print, batch=BATCH, grow_after=0, starts=(0,)):
    criterion, mesh, pipeline = DetectionLoss(state.network.head), Mesh.of(len(starts)), None
    if mesh.stages > 1:
        pipeline = Pipeline(mesh, state.network, starts, 3, torch.device("cpu"))
        pipeline.connect()
    sizes = {"imgsz": 64, "multi_scale": 0.0, "seed": 0}
    settings = SimpleNamespace(batch=batch, grow_after=grow_after, max_bad_steps=10, amp="fp32", **sizes)
    state.batch = batch
    return SimpleNamespace(
        settings=settings,
        state=state,
        rules=StepRules(criterion, clip_norm=10.0, pipeline=pipeline),
        mesh=mesh,
        gradients=GradientSum(state.network),
        training=range(IMAGES),
        device="cpu",
        last="last.pt",
        say=say,
        event=lambda kind, text: say(text),
    )


def take(run, seed):
    """A step on IMAGES random images, as the loader would hand them out."""
    cut = split(range(IMAGES), run.state.batch, run.mesh.replicas)
    whole = random_batch([2, 1, 0, 3] * (IMAGES // 4), seed=seed)
    held = [whole.part(micro[0], micro[-1] + 1) for micro in cut[run.mesh.replica]]
    return recover.take(run, Window(0, 0, cut), for_all_stages(run, held), RATES)


def main(out, failing, starts=(0,)):
    with distributed.process_group(torch.device("cpu")):
        state = new_state(torch.float64)
        state.network.model[0].register_forward_pre_hook(lambda layer, images: images[0].double())
        lines, sizes = [], []
        run = run_of(state, lines.append, starts=starts)
        for seed, (stage, number) in enumerate(PLACES if len(starts) == 1 else OF_STAGES):
            state.batch = BATCH
            mine = distributed.rank() == failing
            shortage = Shortage(state, stage, number if mine else 10**9, starts[run.mesh.stage])
            assert take(run, seed).applied
            shortage.hook.remove()
            sizes.append(state.batch)
        if distributed.is_main():
            saved = state.state_dict()
            torch.save({"model": saved["model"], "ema": saved["ema"], "sizes": sizes, "lines": lines}, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(json.loads, sys.argv[3:]))
