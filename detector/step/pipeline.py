"""A window's micro-batches through the stages of a network, one behind the other: the step's arithmetic in parts.

Each stage is a process that runs some of the layers. All hold the whole network, its average and its optimizer: what a
device has no room for is activations, and of these it keeps its own layers' alone. The layers of other stages get no
gradient here, so that the sum over all processes is the gradient of the whole network, and all that follows is as
without stages.

One forward, one backward (Narayanan et al., "PipeDream", 2019): a stage starts as many micro-batches as stages follow
it, and then each backward pass makes room for the next forward pass. So it keeps at most as many micro-batches as there
are stages, and the order of its backward passes is that of the micro-batches. Where memory does not suffice for one
image in each, fewer micro-batches are under way at a time (`depth`); with one of them no two stages work at once.

A stage that fails goes on through its schedule without computing: it takes what comes, and says that nothing follows.
So no stage waits for one that failed, and in the end all know. torch.distributed.pipelining has no such answer, and
one shape for all micro-batches: see docs/distributed.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from detector.mesh import Groups, Mesh
from detector.step.messages import Link, Message, dense


class Layered(Protocol):
    """A network that runs layer by layer (`detector.model.network.Network`)."""

    model: nn.ModuleList

    def run_layers(self, maps: dict[int, Any], start: int, stop: int) -> dict[int, Any]:
        """Maps by the layers that made them, -1 being the images, to those that the layers from `stop` on read."""


class Passes(Protocol):
    """What a step makes of a micro-batch (`detector.step.step.Passes`)."""

    def at_rest(self, batch: Any) -> AbstractContextManager[None]:
        """A context for its forward and its backward pass."""

    def running(self) -> AbstractContextManager[None]:
        """A context for its forward pass."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """What its backward pass begins with."""


class Neighbour(NamedTuple):
    """The stage before or after this one, and both directions to it; none beyond the first and the last."""

    hears: Link | None = None
    tells: Link | None = None

    def receive(self, wanted: bool) -> Message | None:
        return self.hears.receive(wanted) if self.hears else None

    def send(self, message: Message | None) -> None:
        if self.tells:
            self.tells.send(message)


class Pass(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    batch: Any
    came: list[Tensor]  # leaves of this stage's graph: maps of the stages before
    made: list[Tensor]  # its roots: maps for the stages after, or the loss


def one_forward_one_backward(stage: int, stages: int, count: int, depth: int) -> Iterator[tuple[bool, int]]:
    """The passes of a stage in their order, for `count` micro-batches: whether it is a backward pass, and of which.

    No stage has more than `depth` micro-batches between their two passes.
    """
    ahead = min(stages - 1 - stage, depth - 1, count)
    yield from ((False, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield False, number + ahead
        yield True, number


class Pipeline:
    """The stage that this process runs of a network, and its neighbours.

    starts: the first layer of each stage, so the first is 0. terms: how many loss terms there are.
    """

    def __init__(self, mesh: Mesh, network: Layered, starts: Sequence[int], terms: int, device: torch.device):
        assert len(starts) == mesh.stages
        bounds = [*starts, len(network.model)]
        self.mesh, self.terms, self.device = mesh, terms, device
        self.depth = mesh.stages  # micro-batches that are under way at once, at most
        self.start, self.stop = bounds[mesh.stage], bounds[mesh.stage + 1]
        mine = network.model[self.start : self.stop]
        self.own = frozenset(id(module) for module in mine.modules())
        self.groups: Groups | None = None
        self._before = self._after = Neighbour()

    def connect(self) -> None:
        """Find the neighbours; every rank must call it, at the same time."""
        self.groups = Groups()
        mesh, control, down, up = self.mesh, self.groups.control, self.groups.down, self.groups.up
        if not mesh.first:
            rank = mesh.rank_of(mesh.stage - 1)
            self._before = Neighbour(Link(rank, control, down, self.device), Link(rank, control, up, self.device))
        if not mesh.last:
            rank = mesh.rank_of(mesh.stage + 1)
            self._after = Neighbour(Link(rank, control, up, self.device), Link(rank, control, down, self.device))

    @property
    def waited(self) -> float:
        """Seconds that this stage has waited for others so far."""
        return sum(link.seconds for link in (self._before.hears, self._after.hears) if link)

    def from_first(self, value: Any) -> Any:
        """The value of the first stage of this replica, on all its stages."""
        return self.groups.from_first(self.mesh, value)

    def run(self, network: Layered, micro_batches: Iterator[Any], count: int, passes: Passes) -> None:
        """Take this stage's part in all passes of a window of `count` micro-batches.

        Raises the error that came first on this stage, or ElsewhereError where it was another's; all stages come back.
        """
        held: dict[int, Pass] = {}
        error: Exception | None = None
        for backward, number in one_forward_one_backward(self.mesh.stage, self.mesh.stages, count, self.depth):
            source, target = (self._after, self._before) if backward else (self._before, self._after)
            made: Message | None = None
            try:
                came = source.receive(wanted=error is None)
                if error is None and backward:
                    made = self._backward(held.pop(number), came, passes)
                elif error is None:
                    held[number], made = self._forward(network, next(micro_batches), came, passes)
            except Exception as failed:
                error = error or failed.with_traceback(None)
                held.clear()  # nothing of this window will be used
            target.send(made)
        for neighbour in (self._before, self._after):
            if neighbour.tells:
                neighbour.tells.arrived()
        if error is not None:
            raise error

    def _forward(
        self, network: Layered, batch: Any, came: Message | None, passes: Passes
    ) -> tuple[Pass, Message | None]:
        """Run the stage's layers on what came, or the first stage's on the images."""
        leaves: list[Tensor] = []
        with passes.at_rest(batch):
            with passes.running():
                if came is None:
                    maps = {-1: batch.network_input()}
                else:
                    maps, leaves = unpacked(came)
                maps = network.run_layers(maps, self.start, self.stop)
            if self.mesh.last:
                return Pass(batch, leaves, [passes.loss(maps[self.stop - 1], batch)]), None
            made, message = packed(maps)
        return Pass(batch, leaves, made), message

    def _backward(self, held: Pass, came: Message | None, passes: Passes) -> Message | None:
        """Take the gradients of what the stage has made, and return those of what it was made of."""
        with passes.at_rest(held.batch):
            if came is None:
                held.made[0].backward()
            elif reached := [(root, one) for root, one in zip(held.made, came.tensors, strict=True) if one is not None]:
                torch.autograd.backward(*zip(*reached, strict=True))
        return Message([None if leaf.grad is None else dense(leaf.grad) for leaf in held.came])


def packed(maps: dict[int, Any]) -> tuple[list[Tensor], Message]:
    """Maps, each a tensor or several, as a list of tensors and as a message, which says what belongs where."""
    layers, made = [], []
    for layer, one in sorted(maps.items()):
        several = not isinstance(one, Tensor)
        layers.append((layer, len(one) if several else None))
        made += one if several else [one]
    return made, Message([dense(one) for one in made], (layers, [one.requires_grad for one in made]))


def unpacked(message: Message) -> tuple[dict[int, Any], list[Tensor]]:
    """Maps as they were packed, and their tensors, which are leaves of a new graph."""
    layers, wanting = message.about
    leaves = [one.requires_grad_(wants) for one, wants in zip(message.tensors, wanting, strict=True)]
    maps, rest = {}, iter(leaves)
    for layer, count in layers:
        maps[layer] = next(rest) if count is None else tuple(islice(rest, count))
    return maps, leaves
