"""What to sample and for which rows; without torch, so that the step that asks need not load it."""

from pathlib import Path

from grpo_tasks.data.table import PromptRow, read_prompts
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.results import ModelRef, Result

GREEDY = -1
"""Sample number of the greedy completion."""


class SampleSpec(Result):
    """What to sample; the step writes it as spec.json."""

    model: ModelConfig
    ref: ModelRef
    prompts: Path
    """Accepted rows (schemas/tables.py Prompts)."""
    max_prompts: int | None
    """The first so many by prompt id, which is a hash; None takes all."""
    num_samples: int
    temperature: float
    greedy: bool
    rollout: RolloutConfig
    resources: ResourcesConfig
    seed: int


def chosen_rows(prompts: Path, limit: int | None) -> list[PromptRow]:
    """The rows that are sampled for, in order of their ids: the same ones whatever the order of the file."""
    return sorted(read_prompts(prompts), key=lambda row: row.prompt_id)[:limit]
