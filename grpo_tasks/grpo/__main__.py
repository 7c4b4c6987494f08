"""`python -m grpo_tasks.grpo STAGE_DIR`: train one stage, or go on with it; by hand or by the Prefect step alike."""

from pathlib import Path

from grpo_tasks.grpo.stage_dir import StageDir, StageSpec
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.compose import RewardSuite
from schemas.child import run_child


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
        Trainer(directory, suite).train()


if __name__ == "__main__":
    run_child(main)
