"""`python -m grpo_tasks.grpo STAGE_DIR`: train a stage, or resume it; by hand and by the pipeline alike.

With several nodes torchrun starts every rank with this command. On one node this module starts the ranks itself.
"""

# ruff: noqa: E402 - import_libraries comes before what imports them
import os
from pathlib import Path

from grpo_tasks.policy.libraries import import_libraries

import_libraries()

from grpo_tasks.grpo.launch import rollout_servers, start_ranks
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.processes.entry import run_child
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.conversations.player import player
from grpo_tasks.stage.stage_dir import StageDir, StageSpec


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    if spec.resources.num_processes > 1 and "RANK" not in os.environ:
        start_ranks(directory.root, spec.resources.num_processes)
        return
    with (
        RewardSuite(
            spec.rewards, spec.stage.rewards, completion=spec.completion, tasks=spec.task_rewards, log=directory.log
        ) as suite,
        rollout_servers(spec, directory) as servers,
        player(spec.interaction, spec.start, spec.model, spec.rollout, completion=spec.completion, log=directory.log) as found,
    ):
        Trainer(directory, suite, servers, found).train()


if __name__ == "__main__":
    run_child(main)
