"""Run once a rank: steps of tiny networks that are cut into stages, for the tests to compare.

Usage: stage_worker.py OUT CASES, where CASES are arguments of `steps`. OUT gets, case by case, what the main process
has.
"""

import json
import math
import sys
from contextlib import nullcontext

import torch
from scenes import random_batch
from test_step import Double, new_state, rates_of

from detector import distributed
from detector.data.batch import blank_batch
from detector.loss.criterion import DetectionLoss
from detector.mesh import Mesh
from detector.precision import Precision
from detector.step import messages, offload
from detector.step.gradients import GradientSum
from detector.step.pipeline import Pipeline
from detector.step.plan import Window, split
from detector.step.statistics import set_modes
from detector.step.step import StepRules, train_window

messages.PIECE = 999  # tensors come in several pieces


def steps(model, starts, windows, checkpoint="off", norms="frozen", frozen=0, amp=None, poisoned=None):
    """A list of (gradient, losses, weight, norm, applied, images) by window, and the state dict after them.

    windows: lists of boxes per image. norms: frozen or batch. frozen: layers that do not train. amp: a precision; None:
    fp64. poisoned: a window whose gradient overflows in the first layer.
    """
    state = new_state(torch.float32 if amp else torch.float64, model=model)
    if amp:
        state.use(Precision(amp, "cpu"))
    for parameter in state.network.model[:frozen].parameters():
        parameter.requires_grad_(False)
    set_modes(state.network, norms == "frozen")
    state.network.set_checkpoint(checkpoint)
    mesh, pipeline = Mesh.of(len(starts)), None
    if mesh.stages > 1:
        pipeline = Pipeline(mesh, state.network, starts, 3, torch.device("cpu"))
        pipeline.connect()
    keeping = offload.offloaded if checkpoint != "off" else nullcontext
    rules = StepRules(DetectionLoss(state.network.head), clip_norm=1e9, pipeline=pipeline, keeping=keeping)
    gradients, rows = GradientSum(state.network), []
    parameters = [one for branch in state.network.branches() for one in branch]
    for number, boxes in enumerate(windows):
        batch = random_batch(boxes, seed=number)
        cut = split(range(len(boxes)), 2, mesh.replicas)
        mine = [batch.part(micro[0], micro[-1] + 1) if micro else blank_batch(64) for micro in cut[mesh.replica]]
        mine = [one if mesh.first else one.without_images() for one in mine]
        mine = mine if amp else [Double(one) for one in mine]
        hook = (
            state.network.model[0].conv.weight.register_hook(lambda one: one * math.inf) if number == poisoned else None
        )
        report = train_window(state, gradients, rules, Window(0, 0, cut), mine, rates_of(state))
        if hook:
            hook.remove()
        rows.append((torch.cat([one.grad.flatten() for one in parameters]).clone(), *tuple(report)))
    return rows, {name: value.clone() for name, value in state.network.state_dict().items()}


def main(out, cases):
    offload.LEAST = 0
    with distributed.process_group(torch.device("cpu")):
        found = [steps(**case) for case in cases]
        if distributed.is_main():
            torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
