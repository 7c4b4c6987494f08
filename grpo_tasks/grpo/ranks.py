"""The processes that train one stage together; with one process everything here is the identity.

Every process samples and scores its share of a rollout's groups, then all of them know the whole rollout; every process
computes the gradient of its share of the completions, then all of them hold the sum. Weights and optimizer are alike everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import Tensor

from grpo_tasks.stage.stage_dir import StageSpec

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among its like."""

    accelerator: Accelerator

    @classmethod
    def of(cls, spec: StageSpec, device: torch.device) -> "Processes":
        """Those that were started for the stage (torchrun's environment variables); else this one alone."""
        # Full fine-tuning keeps float32 weights and computes in the configured precision; adapters bring their own casts.
        half = spec.model.lora is None and device.type == "cuda" and spec.model.dtype != "float32"
        precision = {"bfloat16": "bf16", "float16": "fp16"}[spec.model.dtype] if half else "no"
        # NCCL's own limit of 10 minutes is shorter than many a round of sampling.
        limit = InitProcessGroupKwargs(timeout=timedelta(minutes=spec.resources.distributed_timeout_minutes))
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, kwargs_handlers=[limit])
        if spec.model.lora is not None and spec.model.dtype == "float16":
            # The adapter is float32, but its gradient comes through activations in float16, whose smallest number is 6e-8: of an
            # update of 262,144 tokens half of the gradient became 0.
            accelerator.scaler = torch.amp.GradScaler(device.type)
        return cls(accelerator)

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
