"""Run by torchrun, once a rank: trains windows on a tiny network and saves what the tests compare.

Usage: rank_worker.py OUT WINDOWS POISONED [CHECKPOINT [MODEL]], where WINDOWS is a list of windows, each a list of
boxes per image, and POISONED the number of the one in which a gradient overflows on the last rank. With a CHECKPOINT
other than off, activations are also offloaded, however small. A MODEL with two heads has each branch's gains.
"""

import json
import sys
from dataclasses import replace

import torch
from scenes import TINY, cut_batch, random_batch
from test_step import Double, new_state, rates_of

from detector import distributed
from detector.data.batch import blank_batch
from detector.loss.criterion import DetectionLoss
from detector.step import offload
from detector.step.gradients import GradientSum
from detector.step.plan import Window, split
from detector.step.step import StepRules, train_window


def main(out: str, windows: list[list[int]], poisoned: int, checkpoint: str = "off", model: str = str(TINY)) -> None:
    state = new_state(torch.float64, model=model)
    criterion = DetectionLoss(state.network.head)
    rules = StepRules(criterion, clip_norm=1e9)
    if checkpoint != "off":
        offload.LEAST = 0
        state.network.set_checkpoint(checkpoint)
        rules = replace(rules, keeping=offload.offloaded)
    reductions = []
    with distributed.process_group(torch.device("cpu")):
        gradients = GradientSum(state.network)
        parameters = [one for branch in state.network.branches() for one in branch]
        size = sum(parameter.numel() for parameter in parameters)
        all_reduce = torch.distributed.all_reduce

        def counted(tensor, *arguments, **options):
            reductions.append(tensor.numel() == size)
            return all_reduce(tensor, *arguments, **options)

        torch.distributed.all_reduce = counted
        rows = []
        for number, boxes in enumerate(windows):
            batch = random_batch(boxes, seed=number)
            cut = split(range(len(boxes)), 2, distributed.world_size())
            mine = []
            for micro in cut[distributed.rank()]:
                if micro:
                    sizes = [micro[0], len(micro), len(boxes) - micro[0] - len(micro)]
                    mine.append(Double(cut_batch(batch, sizes)[1]))
                else:
                    mine.append(Double(blank_batch(64)))
            before = len(reductions)
            last_rank = distributed.rank() == distributed.world_size() - 1
            factor = float("inf") if number == poisoned and last_rank else 1.0
            hook = state.network.model[0].conv.weight.register_hook(lambda gradient, by=factor: gradient * by)
            report = train_window(state, gradients, rules, Window(0, 0, cut), mine, rates_of(state))
            hook.remove()
            gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
            rows.append((gradient.clone(), report, sum(reductions[before:]), len(cut[0])))
        if distributed.is_main():
            weights = {name: value.clone() for name, value in state.network.state_dict().items()}
            rows = [(gradient, tuple(report), *counts) for gradient, report, *counts in rows]
            torch.save({"rows": rows, "weights": weights, "skipped": state.skipped}, out)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
