"""Run by torchrun, once a rank: a compiled step of a tiny network, and one after compiling failed on one rank alone.

Usage: compiled_worker.py OUT
"""

import sys

import torch
from test_compiling import small_rules, small_state, small_step

from detector import distributed
from detector.step import compiling


def kept(graph, examples):
    return graph.forward


def broken(graph, examples):
    if distributed.rank() == 1:
        raise RuntimeError("only here")
    return graph.forward


def step(backend):
    """Whether it was compiled, the weights after it, and what was said."""
    compiling.BACKEND, said = backend, []
    state, rules = small_state(torch.float64), small_rules(said.append)
    seconds = compiling.prepare(state, rules, 2, 64)
    assert small_step(state, rules).applied
    return seconds is not None, state.network.layer.conv.weight.detach(), said


def main(out: str) -> None:
    with distributed.process_group(torch.device("cpu")):
        found = {backend.__name__: step(backend) for backend in (kept, broken)}
        if distributed.is_main():
            torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
