"""`python -m grpo_tasks.supervised STAGE_DIR`: train a stage of kind sft or rejection, or resume it.

As `python -m grpo_tasks.grpo`: with several nodes torchrun starts every rank, on one node this module does.
"""

# ruff: noqa: E402 - import_libraries comes before what imports them
import os
from contextlib import ExitStack
from pathlib import Path

from grpo_tasks.policy.libraries import import_libraries

import_libraries()

from grpo_tasks.grpo.launch import rollout_servers, start_ranks
from grpo_tasks.processes.entry import run_child
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.conversations.player import player
from grpo_tasks.stage.run import SUPERVISED
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.supervised.trainer import DemonstrationTrainer, RejectionTrainer


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    stage = spec.stage
    if spec.resources.num_processes > 1 and "RANK" not in os.environ:
        start_ranks(directory.root, spec.resources.num_processes, SUPERVISED)
        return
    samples = stage.kind == "rejection" or stage.eval_steps is not None
    suite = RewardSuite(spec.rewards, stage.rewards, completion=spec.completion, tasks=spec.task_rewards, log=directory.log)
    with ExitStack() as stack:
        # Demonstrations are neither sampled nor scored: no process of reward functions, no server.
        servers, found = [], None
        if samples:
            stack.enter_context(suite)
            servers = stack.enter_context(rollout_servers(spec, directory))
        if samples or spec.interaction.active:
            # A prompt shows the tools, whoever continues it and whoever offers them.
            settings = (spec.interaction, spec.start, spec.model, spec.rollout)
            found = stack.enter_context(player(*settings, completion=spec.completion, log=directory.log))
        trainer = DemonstrationTrainer if stage.kind == "sft" else RejectionTrainer
        trainer(directory, suite, servers, found).train()


if __name__ == "__main__":
    run_child(main)
