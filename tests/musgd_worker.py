"""Run by torchrun, once a rank, or alone: steps of MuSGD, whose matrices the ranks share.

Usage: musgd_worker.py OUT steps: steps on given gradients, the same on all ranks. OUT shortage RANK: memory runs out on
that rank, -1 for none, in its share of each step but the first. OUT error RANK: it fails in another way.
"""

import sys

import torch
from shortage_worker import BATCH, run_of, take
from test_step import new_state

from detector import distributed
from detector.step import muon

STEPS = 3


def count_and_fail(failing, error):
    """Counts the matrices that this rank works on; in each step but the first, the first batch fails where it is to."""
    real, counted = muon.iterated, []

    def iterated(matrices):
        if error is not None and distributed.rank() == failing and len(counted) and counted[-1] is None:
            counted.append(0)
            raise error
        counted.append(len(matrices))
        return real(matrices)

    muon.iterated = iterated
    return counted


def given_steps(state):
    for step in range(STEPS):
        rng = torch.Generator().manual_seed(step)
        for parameter in state.network.branches()[0]:
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=rng))
        state.optimizer.step()


def main(out, what, failing="-1"):
    with distributed.process_group(torch.device("cpu")):
        state = new_state(torch.float32 if what == "steps" else torch.float64, optimizer="MuSGD")
        error = {"shortage": torch.OutOfMemoryError("CUDA out of memory (not really)"), "error": ValueError("not good")}
        counted, lines, sizes = count_and_fail(int(failing), error.get(what)), [], []
        if what == "steps":
            given_steps(state)
        else:
            state.network.register_forward_pre_hook(lambda network, images: images[0].double())
            run = run_of(state, lines.append)
            for seed in range(STEPS):
                state.batch = BATCH
                assert take(run, seed).applied
                counted.append(None)  # between steps
                sizes.append(state.batch)
        saved = state.state_dict()
        found = {"model": saved["model"], "optimizer": saved["optimizer"]["state"], "sizes": sizes, "lines": lines}
        found["matrices"] = sum(number or 0 for number in counted)
        torch.save(found, f"{out}.{distributed.rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
