"""A network cut into stages over several processes takes the steps of one that is whole."""

import json

import pytest
import ranks
import torch
from scenes import TINY, TINY26
from stage_worker import steps

pytestmark = pytest.mark.slow
WINDOWS = [
    [2, 2, 2, 2, 2, 2, 2, 2],
    [1, 9, 0, 3, 14, 0, 0],  # ragged
    [0, 0, 0, 200, 0, 3, 2, 1],  # one crowded image
    [3],  # fewer micro-batches than stages, and fewer images than replicas
    [0, 0],  # background only
]


def case(model=TINY, starts=(0,), **options):
    return {"model": str(model), "starts": list(starts), "windows": WINDOWS, **options}


def on_ranks(processes, out, *cases):
    done = ranks.run(processes, "stage_worker.py", out, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, [case(starts=(0, 5)), case(TINY26, (0, 9)), case(starts=(0, 1), checkpoint="all")]),
        (2, [case(TINY26, (0, 12), checkpoint="stages"), case(starts=(0, 7), frozen=6), case(starts=(0, 5), frozen=7)]),
        (4, [case(starts=(0, 3, 7, 10)), case(TINY26, (0, 8)), case(starts=(0, 11))]),
    ],
    ids=["two", "two, with frozen and checkpointed layers", "four, and two of two"],
)
def test_the_gradient_of_stages_and_replicas_is_that_of_one_process(tmp_path, processes, cases):
    found = on_ranks(processes, tmp_path / "out.pt", *cases)
    for one, (rows, weights) in zip(cases, found, strict=True):
        expected, after = steps(**{**one, "starts": [0], "checkpoint": "off"})
        for (gradient, *report), (whole, *told) in zip(rows, expected, strict=True):
            assert float((gradient - whole).norm() / whole.norm()) < 1e-10
            for now, then in zip(report, told, strict=True):
                assert now == pytest.approx(then, rel=1e-9)
        for name, value in after.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def test_norm_layers_learn_what_they_learn_without_stages_to_the_bit(tmp_path):
    """Of the same micro-batches: one replica is one process, and two of two stages are two processes."""
    options = {"norms": "batch"}
    (_, two), (_, also) = on_ranks(2, tmp_path / "a", case(starts=(0, 5), **options), case(starts=(0,), **options))
    ((_, four),) = on_ranks(4, tmp_path / "b", case(starts=(0, 5), **options))
    _, alone = steps(**case(**options))
    for staged, expected in ((two, alone), (four, also)):
        assert expected["model.0.bn.num_batches_tracked"] > 0
        for name, value in expected.items():
            assert torch.equal(staged[name], value), name
