"""`failing_rank.py PLACE RANK detector-arguments`: the command line, on a rank of which something fails at a place."""

import os
import signal
import sys

import torch

from detector import checkpoint_file
from detector.cli import main
from detector.data.cache import ImageCache
from detector.errors import DataError
from detector.evaluation import evaluate
from detector.model.network import Network
from detector.run import loop, recover
from detector.step.ema import Ema

PLACES = {
    # place: (owner, attribute, error)
    "network": (Network, "run_layers", RuntimeError("a mistake in the network")),
    "backward": (torch.autograd, "backward", RuntimeError("a mistake in the backward pass")),
    "average": (Ema, "update", RuntimeError("a mistake in the average")),
    "image": (ImageCache, "image", DataError("a.png: cannot be decoded")),
    "checkpoint": (checkpoint_file, "write", OSError(28, "No space left on device")),
    "validation": (evaluate, "find_objects", RuntimeError("a mistake in the validation")),
    "anywhere": (recover, "take", RuntimeError("a mistake between two agreements")),
    "killed": (Network, "run_layers", signal.SIGKILL),
    "between epochs": (loop, "epoch_row", RuntimeError("a mistake between epochs")),
}


def fail(place):
    owner, name, error = PLACES[place]
    real, calls = getattr(owner, name), 0

    def failing(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls > 1:  # what begins well
            if isinstance(error, signal.Signals):
                os.kill(os.getpid(), error)
            raise error
        return real(*arguments, **options)

    setattr(owner, name, failing)


if __name__ == "__main__":
    if os.environ["RANK"] == sys.argv[2]:
        fail(sys.argv[1])
    sys.exit(main(sys.argv[3:]))
