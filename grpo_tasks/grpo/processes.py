"""The processes that train one stage together; with one process everything here is the identity.

Every process samples and scores its share of a rollout's groups, then all of them know the whole rollout; every process
computes the gradient of its share of the completions, then all of them hold the sum. Weights and optimizer are alike everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among its like."""

    accelerator: Accelerator

    @property
    def count(self) -> int:
        """How many there are."""
        return self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Number of this one; 0 writes the files."""
        return self.accelerator.process_index

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.accelerator.is_main_process

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This process's part of what all of them have to do; parts differ by one at most."""
        return items[len(items) * self.rank // self.count : len(items) * (self.rank + 1) // self.count]

    def everyone(self, mine: Item) -> list[Item]:
        """What each process has, in order of their ranks."""
        found: list[Item] = gather_object([mine])
        return found

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, in one message for all of a kind."""
        if self.count == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for same in by_dtype.values():
            flat = torch.cat([tensor.flatten() for tensor in same])
            torch.distributed.all_reduce(flat)
            for tensor, summed in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def wait(self) -> None:
        """Until all processes have come this far."""
        self.accelerator.wait_for_everyone()
