"""The processes that share a training step. Alone, every verb is the identity.

Each rank reads its own sequences; gradients, counts and decisions are summed over ranks, so that all take the same
steps and none waits for one that has stopped.
"""

import contextlib
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = timedelta(hours=2)
"""The others wait while the leading process validates."""


@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def leads(self) -> bool:
        """Whether this process validates, logs and saves."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """In place. A rank that had nothing to learn adds zeros."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


ALONE = Team()


@contextlib.contextmanager
def joined_team(device: str) -> Generator[Team]:
    """The team that torchrun started this process in, as its environment says."""
    if "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
