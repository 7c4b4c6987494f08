"""Which prompts a rollout uses, how many updates a stage has, and the optimizer with its learning rate.

The order of the prompts is a pure function of (seed, stage, epoch), so a resumed stage needs no sampler state.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from grpo_tasks.rollout.engine import completion_seed
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptSchedule:
    """Prompts in a new order each epoch, split into rollouts of equal size; a rollout may span two epochs."""

    num_prompts: int
    per_rollout: int
    seed: int

    def prompts_of(self, rollout: int) -> list[int]:
        """Row numbers of the prompts of one rollout (counted from 0)."""
        # Positions in the endless sequence of all epochs.
        positions = range(rollout * self.per_rollout, (rollout + 1) * self.per_rollout)
        orders = {epoch: self._order(epoch) for epoch in {position // self.num_prompts for position in positions}}
        return [int(orders[position // self.num_prompts][position % self.num_prompts]) for position in positions]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng(completion_seed(self.seed, "epoch", epoch)).permutation(self.num_prompts)


def num_updates(stage: StageConfig, num_prompts: int) -> int:
    """Updates of a stage: max_steps, or as many complete rollouts as cover num_train_epochs."""
    if stage.max_steps is not None:
        return stage.max_steps
    rollouts = math.ceil(stage.num_train_epochs * num_prompts / prompts_per_rollout(stage))
    return rollouts * stage.updates_per_rollout


def prompts_per_rollout(stage: StageConfig) -> int:
    """Prompts of a rollout: those of all the updates that train on it."""
    rounds = (stage.steps_per_generation or stage.gradient_accumulation_steps) // stage.gradient_accumulation_steps
    return rounds * stage.completions_per_update // stage.num_generations


def make_optimizer(stage: StageConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer named by `stage.optim`.

    Raises:
        ConfigError: an 8-bit optimizer without bitsandbytes.
    """
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
