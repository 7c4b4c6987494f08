"""Which prompts a rollout uses, how many updates a stage has, and the optimizer with its learning rate.

The order of the prompts is a pure function of (seed, stage, epoch), so a resumed stage needs no sampler state. With several tasks
the number of prompts before a rollout decides which tasks come next, so neither does a mixture.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from grpo_tasks.rollout.engine import completion_seed
from schemas.config.data import TaskConfig
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TaskShare:
    """The rows of one task, and its share of the prompts."""

    name: str
    weight: float
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Tasks by turns, so that any run of prompts holds each task as often as its weight says, to within a prompt or two.

    The j-th prompt of a task (from 0) is due at (j + 1/2) / weight, and prompts follow each other as they are due.
    """

    tasks: tuple[TaskShare, ...]

    @classmethod
    def of(cls, row_tasks: Sequence[str], settings: Mapping[str, TaskConfig]) -> "Mixture | None":
        """The mixture of rows by their tasks; None where all rows have the same chance: one task, or none configured."""
        names = sorted(set(row_tasks))
        if not settings or len(names) == 1:
            return None
        rows = {name: tuple(index for index, task in enumerate(row_tasks) if task == name) for name in names}
        default = TaskConfig().weight
        weights = {name: settings[name].weight if name in settings else default for name in names}
        return cls(tuple(TaskShare(name, weights[name], rows[name]) for name in names))

    def turns(self, start: int, end: int) -> list[tuple[TaskShare, int]]:
        """Task of each of the prompts `start` .. `end` - 1, and how many prompts of that task come before it."""
        # All prompts due before this time come before `start`; so the walk is short, wherever it begins.
        safe = max(0.0, (start - len(self.tasks)) / sum(task.weight for task in self.tasks))
        counts = [max(0, math.ceil(safe * task.weight - 0.5)) for task in self.tasks]
        turns = []
        for position in range(sum(counts), end):
            due = [(count + 0.5) / task.weight for count, task in zip(counts, self.tasks, strict=True)]
            turn = due.index(min(due))
            if position >= start:
                turns.append((self.tasks[turn], counts[turn]))
            counts[turn] += 1
        return turns


@dataclass(frozen=True, slots=True)
class PromptSchedule:
    """Prompts in a new order each epoch, of each task with a mixture, split into rollouts of equal size."""

    num_prompts: int
    per_rollout: int
    seed: int
    mixture: Mixture | None = None

    def prompts_of(self, rollout: int) -> list[int]:
        """Row numbers of the prompts of one rollout (counted from 0)."""
        # Positions in the endless sequence of all epochs.
        positions = range(rollout * self.per_rollout, (rollout + 1) * self.per_rollout)
        orders: dict[tuple[int | str, ...], np.ndarray] = {}

        def drawn(position: int, size: int, *parts: int | str) -> int:
            epoch, place = divmod(position, size)
            if (*parts, epoch) not in orders:
                draw = np.random.default_rng(completion_seed(self.seed, *parts, epoch))
                orders[*parts, epoch] = draw.permutation(size)
            return int(orders[*parts, epoch][place])

        if self.mixture is None:
            return [drawn(position, self.num_prompts, "epoch") for position in positions]
        turns = self.mixture.turns(positions.start, positions.stop)
        return [task.rows[drawn(number, len(task.rows), "task", task.name)] for task, number in turns]


def num_updates(stage: StageConfig, num_prompts: int) -> int:
    """Updates of a stage: max_steps, or as many complete rollouts as cover num_train_epochs."""
    if stage.max_steps is not None:
        return stage.max_steps
    return math.ceil(stage.num_train_epochs * num_prompts / stage.prompts_per_rollout) * stage.updates_per_rollout


def make_optimizer(stage: StageConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer named by `stage.optim`; ConfigError for an 8-bit one without bitsandbytes."""
    options: dict[str, Any] = {
        "lr": stage.learning_rate,
        "betas": (stage.adam_beta1, stage.adam_beta2),
        "eps": stage.adam_epsilon,
        "weight_decay": stage.weight_decay,
    }
    if stage.optim in ("adamw_torch", "adamw_torch_fused"):
        return torch.optim.AdamW(parameters, fused=stage.optim.endswith("fused"), **options)
    try:
        from bitsandbytes.optim import adamw
    except ImportError as error:
        raise ConfigError(
            f"optim {stage.optim} needs bitsandbytes",
            place=f"stage {stage.name}",
            fix="pip install '.[gpu]', or optim: adamw_torch",
        ) from error
    kind = adamw.PagedAdamW8bit if stage.optim.startswith("paged") else adamw.AdamW8bit
    return kind(parameters, **options)


def make_scheduler(stage: StageConfig, optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    """The learning rate over the updates of a stage, as transformers' Trainer sets it."""
    warmup = stage.warmup_steps or math.ceil(stage.warmup_ratio * updates)
    return get_scheduler(stage.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=updates)
