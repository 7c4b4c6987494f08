"""`python -m grpo_tasks.grpo STAGE_DIR`: train a stage of any kind, or resume it; by hand and by the pipeline alike.

With several nodes torchrun starts every rank with this command. On one node this module starts the ranks itself.
"""

# ruff: noqa: E402 - import_libraries comes before what imports them
import os
from contextlib import ExitStack
from pathlib import Path

from grpo_tasks.processes.libraries import import_libraries

import_libraries()

from grpo_tasks.grpo.launch import rollout_servers, start_ranks
from grpo_tasks.grpo.supervised import DemonstrationTrainer, RejectionTrainer
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
    stage = spec.stage
    if spec.resources.num_processes > 1 and "RANK" not in os.environ:
        start_ranks(directory.root, spec.resources.num_processes)
        return
    trainer = {"grpo": Trainer, "sft": DemonstrationTrainer, "rejection": RejectionTrainer}[stage.kind]
    suite = RewardSuite(spec.rewards, stage.rewards, completion=spec.completion, tasks=spec.task_rewards, log=directory.log)
    # Demonstrations are neither sampled nor scored: no process of reward functions, no server.
    samples = stage.kind != "sft" or stage.eval_steps is not None
    with ExitStack() as stack:
        servers, found = [], None
        if samples:
            stack.enter_context(suite)
            servers = stack.enter_context(rollout_servers(spec, directory))
        if samples or spec.interaction.active:
            # Prompts list the tools even when nothing is sampled.
            settings = (spec.interaction, spec.start, spec.model, spec.rollout)
            found = stack.enter_context(player(*settings, completion=spec.completion, log=directory.log))
        trainer(directory, suite, servers, found).train()


if __name__ == "__main__":
    run_child(main)
