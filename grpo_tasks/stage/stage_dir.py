"""The stage directory: everything about one stage, on disk.

spec.json                what to train (StageSpec), written by whoever starts the stage
train.parquet            where pass rates are known: the rows that the stage trains on, with their pass rates
left_out.parquet         rows that it leaves out because of their pass rate
metrics.jsonl            journal, one line per update
events.jsonl             guards, resumes, handled reward errors
completions/             step-000020.parquet: all completions of that update with rewards and advantages
checkpoints/             step-000050/, each with a manifest of hashes
best/                    the weights with the highest eval_reward
final/                   the trained weights (an adapter, or the complete model)
token_budget.json        what `max_tokens_per_microbatch: auto` has measured (grpo/token_budget.py)
servers.jsonl            rollout servers that joined while the stage trained, one JSON line each (url, weights_url)
result.json              written last; a stage that has it is finished
log.txt                  output of the trainer and of the reward functions
"""

from pathlib import Path
from typing import Self

from pydantic import Field

from grpo_tasks.processes.child import LOG, RESULT, SPEC
from schemas.config.completion import CompletionConfig
from schemas.config.data import TaskConfig
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.results.base import Result
from schemas.results.data import DataReport
from schemas.results.model import ModelRef
from schemas.results.sweep import Pruning

OWN_DISK = "GRPO_OWN_DISK"
"""Environment variable of ranks whose stage directory is not on a disk that all nodes share."""


class StageSpec(Result):
    """What to train, as in spec.json."""

    key: str
    stage: StageConfig
    seed: int
    model: ModelConfig
    start: ModelRef
    completion: CompletionConfig = Field(default_factory=CompletionConfig)
    rewards: RewardsConfig
    rollout: RolloutConfig
    resources: ResourcesConfig
    train: Path
    """Accepted training rows (schemas/tables.py Prompts)."""
    eval: Path | None = None
    """Accepted held-out rows."""
    tasks: dict[str, TaskConfig] = Field(default_factory=dict)
    """data.tasks of the config: mixing weights, and the reward functions of each task."""
    pruning: Pruning | None = None
    """Only in a sweep: where the other runs are, and when this one ends early. No part of the key."""
    interaction: InteractionConfig = Field(default_factory=InteractionConfig)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        stage: StageConfig,
        start: ModelRef,
        data: DataReport,
        *,
        key: str,
        train: Path,
        resources: ResourcesConfig,
    ) -> Self:
        """A stage by the settings of a config, on the rows `train`."""
        return cls(
            key=key,
            stage=stage,
            seed=config.seed,
            model=config.model,
            start=start,
            completion=config.completion,
            rewards=config.rewards,
            rollout=config.rollout,
            resources=resources,
            train=train,
            eval=data.eval,
            tasks=config.data.tasks,
            interaction=config.interaction,
        )

    @property
    def with_correction(self) -> Self:
        """This, with the correction for the sampler that `auto` stands for."""
        if self.stage.importance_sampling_correction != "auto":
            return self
        chosen = "token_truncate" if self.rollout.engine == "vllm" else "none"
        return self.model_copy(update={"stage": self.stage.model_copy(update={"importance_sampling_correction": chosen})})

    @property
    def max_completion_tokens(self) -> int:
        """The most tokens after a prompt."""
        return self.interaction.longest(self.rollout)

    @property
    def task_rewards(self) -> dict[str, list[str] | None]:
        """The reward functions that apply to each task; None: all of the stage."""
        return {name: task.rewards for name, task in self.tasks.items()}


class StageDir:
    """The paths in a stage directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spec, self.result, self.log = root / SPEC, root / RESULT, root / LOG
        self.train, self.left_out = root / "train.parquet", root / "left_out.parquet"
        self.journal, self.events = root / "metrics.jsonl", root / "events.jsonl"
        self.checkpoints, self.best, self.final = root / "checkpoints", root / "best", root / "final"
        self.token_budget, self.servers = root / "token_budget.json", root / "servers.jsonl"

    def completions(self, step: int) -> Path:
        """Table of the completions of one update."""
        return self.root / "completions" / f"step-{step:06d}.parquet"
