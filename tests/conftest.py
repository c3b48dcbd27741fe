"""The same arithmetic on every machine that tests: few threads, no GPU nondeterminism."""

import torch

torch.set_num_threads(2)
