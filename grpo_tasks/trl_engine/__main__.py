"""`python -m grpo_tasks.trl_engine STAGE_DIR`: train a stage with TRL, or resume it."""

from pathlib import Path

from grpo_tasks.processes.child import run_child
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.trl_engine.trainer import train


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    tasks = spec.task_rewards
    with RewardSuite(spec.rewards, spec.stage.rewards, completion=spec.completion, tasks=tasks, log=directory.log) as suite:
        train(directory, spec, suite)


if __name__ == "__main__":
    run_child(main)
