"""How the processes of a run share its work: each runs one stage of the network, for one replica of it."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from detector import distributed
from detector.errors import ConfigError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Mesh:
    """Replicas x stages, which together are the processes of a run.

    The stages of a replica are neighbours in rank, so that what they send one another stays on a machine. Without
    stages every process is a replica.
    """

    stages: int = 1
    rank: int = 0  # of this process
    size: int = 1  # processes

    @classmethod
    def of(cls, stages: int) -> "Mesh":
        """That of the processes of this run. ConfigError where they are no whole replicas."""
        size = distributed.world_size()
        if stages > 1 and size == 1:
            raise ConfigError(
                f"pipeline: {stages} stages are as many devices, and this run has one; name more, as in device=0,1 or "
                "device=cpu:2, or set pipeline=off"
            )
        if size % stages:
            few = max(size // stages, 1) * stages
            raise ConfigError(
                f"pipeline: {size} devices are no whole number of replicas of {stages} stages; name {few} or "
                f"{few + stages} devices, or another number of stages"
            )
        return cls(stages, distributed.rank(), size)

    @property
    def replicas(self) -> int:
        """Copies of the network that share a window's images."""
        return self.size // self.stages

    @property
    def replica(self) -> int:
        """Which of them this process belongs to."""
        return self.rank // self.stages

    @property
    def stage(self) -> int:
        """Which part of the network this process runs."""
        return self.rank % self.stages

    @property
    def first(self) -> bool:
        """Whether it takes the images."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it makes the loss."""
        return self.stage == self.stages - 1

    def rank_of(self, stage: int) -> int:
        """The rank of a stage of this replica."""
        return self.replica * self.stages + stage


class Groups:
    """What stages talk through. Every rank must make it, at the same time.

    Over NCCL each direction has a group of its own: in one queue for both, two neighbours that send to each other would
    wait for ever. And what the host must know, it gets without asking a GPU.
    """

    def __init__(self) -> None:
        self.control = self.down = self.up = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self.control = dist.new_group(backend="gloo")
            self.down, self.up = dist.new_group(), dist.new_group()

    def from_first(self, mesh: Mesh, value: Value) -> Value:
        """The value of the first stage of this replica, on all its stages; all of them must call it."""
        if mesh.first:
            for stage in range(1, mesh.stages):
                dist.send_object_list([value], mesh.rank_of(stage), group=self.control)
            return value
        box: list[Any] = [None]
        dist.recv_object_list(box, mesh.rank_of(0), group=self.control)
        return box[0]
