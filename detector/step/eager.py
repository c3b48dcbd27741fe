"""torch's optimizers without `torch._dynamo`, which costs a run as many seconds to import as torch itself.

It serves torch.compile alone, but torch's own methods import it when they are first called, to keep out of what is
compiled. Nobody compiles a step here, so these are the same methods without that wrapping.
"""

import inspect

import torch
from torch.optim import Optimizer


class Eager(Optimizer):
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class SGD(Eager, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class AdamW(Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
