"""How far the weights of two checkpoints are apart: relative to their size, and at most.

python scripts/compare_weights.py runs/a/weights/last.pt runs/b/weights/last.pt
"""

import sys
from pathlib import Path

import torch

from detector.checkpoint_file import read


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """All floating tensors of a state dict, one after the other, in fp64."""
    return torch.cat([value.double().flatten() for value in state.values() if value.is_floating_point()])


def main(first: Path, second: Path) -> None:
    a, b = read(first), read(second)
    for part in ("model", "ema"):
        one, other = flat(a[part]), flat(b[part])
        apart = (one - other).norm() / other.norm()
        print(f"{part:5}  relative difference {apart:.1e}, largest {(one - other).abs().max():.1e}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
