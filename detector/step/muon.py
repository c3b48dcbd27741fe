"""Muon's orthogonalisation: many matrices at once, each rank its share of them.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). `torch.optim.Muon` of newer torch has
it for itself only: it takes matrices and no convolutions, one at a time, on every rank, and its function is private.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from detector import distributed
from detector.precision import native_precision

X1, X3, X5 = 3.4445, -4.7750, 2.0315  # of X, A X and A A X, where A = X X^T
ITERATIONS = 5
EPSILON = 1e-7  # added to a matrix's norm
FILLED = 0.75  # a matrix of a padded batch has at least this share of the batch's rows
MOST = 2**22  # elements of a batch of several: what a rank can be given or spared

Shape = tuple[int, int]


class Plan(NamedTuple):
    """Which matrices go together, and which rank takes them: the same on all ranks.

    The batches are the same for any number of ranks, too, and so are the bits of their results.
    """

    shares: list[list[list[int]]]  # of each rank: batches, each the numbers of matrices of one width
    lengths: list[int]  # elements of each rank's results

    @property
    def length(self) -> int:
        """Elements of the largest share."""
        return max(self.lengths)


def orthogonalized(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The matrices, each of its own shape and all on one device, with their singular values brought near 1.

    They come to about .68 to 1.13, and their vectors stay. Every rank must call it with the same matrices; each works
    on its share, and all get the same bits. Where a rank fails, all raise, see `distributed.gather_made`.
    """
    if not matrices:
        return []
    shapes = [(one.shape[0], one.shape[1]) for one in matrices]
    work, device = plan(tuple(shapes), distributed.world_size()), matrices[0].device

    def mine() -> Tensor:
        made = torch.empty(work.length, dtype=torch.bfloat16, device=device)
        done = 0
        for batch in work.shares[distributed.rank()]:
            for one in iterated([matrices[number] for number in batch]):
                made[done : done + one.numel()].view(one.shape).copy_(one)
                done += one.numel()
        return made

    gathered = distributed.gather_made(mine, work.length, device).float()
    found: list[Tensor] = [gathered] * len(matrices)
    for flat, share in zip(gathered, work.shares, strict=True):
        numbers = [number for batch in share for number in batch]
        sizes = [shapes[number][0] * shapes[number][1] for number in numbers]
        for number, one in zip(numbers, flat[: sum(sizes)].split(sizes), strict=True):
            found[number] = one.view(shapes[number])
    return found


def iterated(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Five Newton-Schulz iterations of matrices of one longer side, as one batch padded with rows of zeros.

    Products are added up in fp32, and each of A, of its polynomial and of X is rounded to bf16, once. Where bf16 is
    emulated, the same numbers are multiplied as fp32: six times as fast on a CPU without it.
    """
    native = matrices[0].device.type == "cuda" and native_precision(matrices[0].device) == "bf16"
    dtype = torch.bfloat16 if native else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(dtype)

    tall = [one.shape[0] > one.shape[1] for one in matrices]
    x = pad_sequence([one.T if up else one for one, up in zip(matrices, tall, strict=True)], batch_first=True)
    x = rounded(x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + EPSILON))
    for _ in range(ITERATIONS):
        a = rounded(torch.bmm(x, x.mT))
        polynomial = rounded(torch.baddbmm(a, a, a, beta=X3, alpha=X5))
        x = rounded(torch.baddbmm(x, polynomial, x, beta=X1))
    rows = [min(one.shape) for one in matrices]
    return [one[:count].T if up else one[:count] for one, count, up in zip(x, rows, tall, strict=True)]


@lru_cache
def plan(shapes: tuple[Shape, ...], ranks: int) -> Plan:
    """The matrices in batches, the largest work first, each to the rank that has the least until then."""
    batches = batched(shapes)
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for batch in sorted(batches, key=lambda batch: cost(batch, shapes), reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(batch)
        loads[rank] += cost(batch, shapes)
    lengths = [sum(shapes[i][0] * shapes[i][1] for batch in share for i in batch) for share in shares]
    return Plan(shares, lengths)


def batched(shapes: Sequence[Shape]) -> list[list[int]]:
    """The numbers of the matrices, those of one longer side together unless they would be mostly padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(shapes)), key=lambda i: (max(shapes[i]), min(shapes[i])), reverse=True):
        rows, width = sides(shapes[number])
        if batches:
            height, same = sides(shapes[batches[-1][0]])
            if width == same and rows >= FILLED * height and (len(batches[-1]) + 1) * height * width <= MOST:
                batches[-1].append(number)
                continue
        batches.append([number])
    return batches


def sides(shape: Shape) -> Shape:
    """Rows and width of a matrix as it is iterated: lying, not standing."""
    return min(shape), max(shape)


def cost(batch: Sequence[int], shapes: Sequence[Shape]) -> int:
    """Multiplications of a batch in one iteration."""
    height, width = sides(shapes[batch[0]])
    return len(batch) * height * height * (2 * width + height)
