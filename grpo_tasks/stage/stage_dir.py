"""The stage directory: the truth on disk about one stage.

spec.json                what to do (StageSpec), written by whoever starts the stage
metrics.jsonl            journal, one line an update
events.jsonl             guards, resumes, handled reward errors
completions/             step-000020.parquet, all completions of that update with rewards and advantages
checkpoints/             step-000050/, each with a manifest of hashes
best/                    the weights of the highest eval_reward
final/                   the trained weights (adapter, or whole model)
result.json              written last; a stage with it is finished
log.txt                  what the trainer and the reward functions print
"""

from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.processes.entry import LOG, RESULT, SPEC
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results import ModelRef, Result


class StageSpec(Result):
    """All that a stage needs to know."""

    key: str
    stage: StageConfig
    seed: int
    model: ModelConfig
    start: ModelRef
    """The model this stage starts from."""
    rewards: RewardsConfig
    rollout: RolloutConfig
    resources: ResourcesConfig
    train: Path
    """Accepted training rows (schemas/tables.py Prompts)."""
    eval: Path | None = None
    """Accepted held-out rows."""


@dataclass(frozen=True, slots=True)
class StageDir:
    """Names inside a stage directory."""

    root: Path

    @property
    def spec(self) -> Path:
        """What to do."""
        return self.root / SPEC

    @property
    def journal(self) -> Path:
        """One line an update."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened besides."""
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        """What is printed."""
        return self.root / LOG

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def best(self) -> Path:
        """The weights of the highest eval_reward."""
        return self.root / "best"

    @property
    def final(self) -> Path:
        """The trained weights."""
        return self.root / "final"

    @property
    def result(self) -> Path:
        """The finished stage's `StageResult`."""
        return self.root / RESULT

    def completions(self, step: int) -> Path:
        """Table of the completions of one update."""
        return self.root / "completions" / f"step-{step:06d}.parquet"
