"""The ranks of a stage: the processes that train it together. With one process everything here is the identity.

Each rank samples and scores its share of a rollout's groups, and computes the gradient of its share of the completions. The
complete rollout, the summed gradient, weights and optimizer are equal on all ranks.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import Tensor

from grpo_tasks.stage.stage_dir import OWN_DISK, StageSpec

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank and the others."""

    accelerator: Accelerator
    group: "torch.distributed.ProcessGroup | None" = None
    """For `gather`; None: the default one."""

    @classmethod
    def of(cls, spec: StageSpec, device: torch.device) -> "Ranks":
        """The ranks that were started for the stage (torchrun's environment variables), or this process alone."""
        # Full fine-tuning keeps float32 weights and computes in the configured precision; adapters bring their own casts.
        half = spec.model.lora is None and device.type == "cuda" and spec.model.dtype != "float32"
        precision = {"bfloat16": "bf16", "float16": "fp16"}[spec.model.dtype] if half else "no"
        # A round of sampling often takes longer than NCCL's own limit of 10 minutes.
        limit = InitProcessGroupKwargs(timeout=timedelta(minutes=spec.resources.distributed_timeout_minutes))
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, kwargs_handlers=[limit])
        if accelerator.device.type != device.type:
            # accelerate keeps the device of the first Accelerator of a process.
            raise RuntimeError(f"accelerate computes on {accelerator.device}, and {device} was asked for")
        if spec.model.lora is not None and spec.model.dtype == "float16":
            # The adapter is float32, but its gradient passes through activations in float16, whose smallest number is 6e-8: in an
            # update of 262,144 tokens half of the gradient became 0. The scaler multiplies the loss to prevent that.
            accelerator.scaler = torch.amp.GradScaler(device.type)
        return cls(accelerator)

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self.accelerator.process_index

    @property
    def writes(self) -> bool:
        """True on the one rank that writes files."""
        return self.accelerator.is_main_process

    def in_other_thread(self) -> "Ranks":
        """The same ranks for another thread, whose messages would be mixed up with those of this one. All ranks call it."""
        if self.count == 1:
            return self
        limit = self.accelerator.init_handler.timeout if self.accelerator.init_handler is not None else None
        return Ranks(self.accelerator, torch.distributed.new_group(backend="gloo", timeout=limit))

    @property
    def keeps_checkpoints(self) -> bool:
        """True on each rank that writes checkpoints: one in all, or one on each node where nodes share no disk, because a roll
        back reads them on every node."""
        return self.accelerator.is_local_main_process if OWN_DISK in os.environ else self.writes

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items that this rank works on; shares differ by one item at most."""
        return items[len(items) * self.rank // self.count : len(items) * (self.rank + 1) // self.count]

    def gather(self, mine: Item) -> list[Item]:
        """The item of every rank, in the order of the ranks; all ranks have to call it."""
        if self.group is None:
            found: list[Item] = gather_object([mine])
            return found
        places: list[Item] = [mine] * self.count
        torch.distributed.all_gather_object(places, mine, group=self.group)
        return places

    def in_turn(self, make: Callable[[], Item]) -> Item:
        """What every rank makes for itself, on each machine one rank after the other; nothing in it may be collective."""
        made: list[Item] = []
        mine = self.accelerator.local_process_index
        for turn in range(1 + max(self.gather(mine))):
            if turn == mine:
                made.append(make())
            self.wait()
        return made[0]

    def sum_in_place(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, with one message for each dtype."""
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
        """Wait until all ranks have called this."""
        self.accelerator.wait_for_everyone()
