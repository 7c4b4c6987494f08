"""Which prompts an update uses, how many updates there are, and the optimizer with its learning rate.

The order of prompts is a pure function of (seed, stage, epoch), so a resumed stage needs no sampler state.
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
    """Prompts in a new order each epoch, cut into rollouts of equal size; a rollout may span two epochs."""

    num_prompts: int
    per_rollout: int
    seed: int

    def prompts_of(self, rollout: int) -> list[int]:
        """Row numbers of the prompts of one rollout (counted from 0)."""
        places = range(rollout * self.per_rollout, (rollout + 1) * self.per_rollout)
        orders = {place // self.num_prompts: None for place in places}
        shuffled = {epoch: self._order(epoch) for epoch in orders}
        return [int(shuffled[place // self.num_prompts][place % self.num_prompts]) for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng(completion_seed(self.seed, "epoch", epoch)).permutation(self.num_prompts)


def num_updates(stage: StageConfig, num_prompts: int) -> int:
    """Updates of a stage: max_steps, or as many whole rollouts as cover num_train_epochs."""
    if stage.max_steps is not None:
        return stage.max_steps
    rollouts = math.ceil(stage.num_train_epochs * num_prompts / prompts_per_rollout(stage))
    return rollouts * stage.updates_per_rollout


def prompts_per_rollout(stage: StageConfig) -> int:
    """Prompts sampled at once: those of all the updates that one rollout feeds."""
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
    """Learning rate over the stage's updates, as transformers' Trainer would set it."""
    warmup = stage.warmup_steps or math.ceil(stage.warmup_ratio * updates)
    return get_scheduler(stage.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=updates)
