"""The forward and backward pass of a network through torch.compile: fused kernels in the place of single operations.

The network itself stays as it is: what is compiled is a function that calls it, so state dicts, copies, averages,
validation and exports know nothing of it. One compilation serves micro-batches of any number of images, because that
dimension is dynamic, and with other sizes of images a step height and width are, too.

Nothing of a run depends on it: where compilation fails, for want of a C++ compiler or of Triton or of a cache folder,
or because a network cannot be compiled, the step goes on without.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from detector import distributed
from detector.memory import attempt, is_out_of_memory
from detector.step.state import TrainState
from detector.step.statistics import Statistics
from detector.step.step import StepRules

Mode = Literal["default", "max"]

BACKEND = "inductor"
MODES = {"default": None, "max": "max-autotune-no-cudagraphs"}  # torch.compile's names; a CUDA graph has one shape
REMEDIES = {  # a word of the name of an error anywhere in the chain, or of what it says: what to do
    "InvalidCxxCompiler": "install g++ or clang++, or name one in CXX",
    "CppCompileError": "the C++ compiler refused; name another in CXX",
    "TritonMissing": "install triton",
    "PermissionError": "name a folder to write to in TORCHINDUCTOR_CACHE_DIR",
    "NotADirectoryError": "name a folder to write to in TORCHINDUCTOR_CACHE_DIR",
    "FileExistsError": "name a folder to write to in TORCHINDUCTOR_CACHE_DIR",
    "Read-only file system": "name a folder to write to in TORCHINDUCTOR_CACHE_DIR",
    "No space left on device": "make room, or name another folder in TORCHINDUCTOR_CACHE_DIR",
}


class Compiled:
    """`StepRules.forward` for a network that is compiled; plain until `prepare`, and again where that fails."""

    def __init__(self, mode: Mode, sizes: bool, say: Callable[[str], None]):
        """sizes: whether images are of other sizes from step to step; `say` is told of a failure."""
        self.mode, self.say = mode, say
        self.dynamic = (0, 2, 3) if sizes else (0,)
        self.run: Callable[[Tensor], Any] | None = None

    def __call__(self, network: nn.Module, batch: Any) -> Any:
        images = batch.network_input()
        # A blank batch is run with norms at rest, which would be another compilation, and is rare.
        if self.run is None or not len(batch.samples):
            return network(images)
        try:
            return self.compiled(images)
        except Exception as error:
            if is_out_of_memory(error) or not compiling_failed(error):
                raise
            self.give_up(reason(error))
        return network(images)

    def begin(self, network: nn.Module) -> None:
        """From here on what is called is the network compiled, which happens in the next call."""
        torch.compiler.reset()  # what an earlier run in this process compiled counts towards torch's limit
        self.run = torch.compile(network, backend=BACKEND, mode=MODES[self.mode])

    def compiled(self, images: Tensor) -> Any:
        for dimension in self.dynamic:
            if images.shape[dimension] > 1:  # of one is another compilation in any case
                torch._dynamo.mark_dynamic(images, dimension)
        assert self.run is not None
        return self.run(images)

    def give_up(self, why: str) -> None:
        self.run = None
        self.say(f"warning: compile: {why}; the run goes on without")


def prepare(state: TrainState, rules: StepRules, images: int, side: int, channels: int = 3) -> float | None:
    """Compile what the steps of a run need, before the first of them; returns the seconds that it took.

    A forward and a backward pass of so many grey images of side x side pixels, fewer where memory runs out, which leave
    no trace. None where nothing is compiled: not asked for, or it failed on any rank, and then on all. Every rank must
    call it, with the network in the modes of a step.
    """
    compiled = rules.forward
    if not isinstance(compiled, Compiled):
        return None
    start, why = time.monotonic(), ""
    try:
        if not rules.apart:
            raise RuntimeError("bn=sync: its layers wait for other devices")
        compiled.begin(state.network)
        with untouched(state):
            while images and attempt(partial(passed, state, rules, compiled, images, side, channels)) is None:
                images //= 2
    except Exception as error:
        why = reason(error)
    end_workers()
    if failed := [one for one in distributed.gather(why) if one]:
        compiled.give_up(failed[0])
        return None
    return time.monotonic() - start


def passed(state: TrainState, rules: StepRules, compiled: Compiled, images: int, side: int, channels: int) -> bool:
    """A forward and a backward pass, whose gradients nobody gets."""
    dtype = next(state.network.parameters()).dtype
    grey = torch.full((images, side, side, channels), 0.5, dtype=dtype, device=state.device).permute(0, 3, 1, 2)
    with state.precision.autocast(), rules.keeping():
        found = compiled.compiled(grey)
    ends = [end for end in tree_leaves(found) if isinstance(end, Tensor) and end.requires_grad]
    trained = [parameter for parameter in state.network.parameters() if parameter.requires_grad]
    if trained and ends:
        torch.autograd.grad(sum(end.float().sum() for end in ends), trained, allow_unused=True)
    return True


@contextmanager
def untouched(state: TrainState) -> Iterator[None]:
    """A context whose passes teach the norm layers nothing."""
    statistics = Statistics(state.network)
    try:
        yield
    finally:
        statistics.back()


def compiling_failed(error: BaseException) -> bool:
    """Whether an error is of the compiler, and not of the network."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def reason(error: BaseException) -> str:
    """An error of the compiler in a line, with what to do about it, where that is known."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__ or chain[-1].__context__) and (
        inner not in chain
    ):
        chain.append(inner)
    names = " ".join(f"{type(one).__name__} {one}" for one in chain)
    remedy = next((remedy for word, remedy in REMEDIES.items() if word in names), "")
    line = next(iter(str(chain[-1]).strip().splitlines()), "")
    said = line if isinstance(chain[-1], RuntimeError) and line else f"{type(chain[-1]).__name__}: {line}"
    return f"{said} ({remedy})" if remedy else said


def end_workers() -> None:
    """End the processes that compiled, where there are any."""
    if workers := sys.modules.get("torch._inductor.async_compile"):
        workers.shutdown_compile_workers()
