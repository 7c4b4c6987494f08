"""`python -m grpo_tasks.grpo STAGE_DIR`: train a stage of any kind with the engine it names, or resume it.

With several nodes torchrun starts every rank with this command. On one node this module starts the ranks itself.
"""

# ruff: noqa: E402 - import_libraries comes before what imports them
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from grpo_tasks.processes.fork_server import import_libraries

import_libraries()

from grpo_tasks.grpo.sampler import SERVED, rollout_servers
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.processes.child import ERROR, run_child
from grpo_tasks.processes.lifetime import start_module, wait_until
from grpo_tasks.processes.serve import HOST, free_port
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.conversations import player
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ChildDied, UserError

POLL_S = 0.1


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    stage = spec.stage
    by_trl = stage.engine == "trl" and stage.kind == "grpo"
    if spec.resources.num_processes > 1 and "RANK" not in os.environ and not by_trl:
        _start_ranks(directory.root, spec.resources.num_processes)
        return
    suite = RewardSuite(spec.rewards, stage.rewards, completion=spec.completion, tasks=spec.task_rewards, log=directory.log)
    if by_trl:
        from grpo_tasks.grpo import trl

        with suite:
            trl.train(directory, spec, suite)
        return
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
        Trainer(directory, suite, servers, found).train()


def _start_ranks(directory: Path, num_processes: int) -> None:
    """Start every rank of a stage with this command and wait for all of them; raise what a rank left, or `ChildDied`.

    When one fails, the others are killed: they would wait for it forever.
    """
    rendezvous = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    ranks = [
        start_module(
            "grpo_tasks.grpo",
            directory,
            environment=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_processes)
    ]
    try:
        wait_until(lambda: any(rank.poll() for rank in ranks) or all(rank.poll() == 0 for rank in ranks), every_s=POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
        codes = [rank.wait() for rank in ranks]
        shutil.rmtree(directory / SERVED, ignore_errors=True)
    if any(codes):
        failed = next(number for number, code in enumerate(codes) if code)
        if (directory / ERROR).exists():
            raise UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
        raise ChildDied(
            f"rank {failed} of {num_processes} ended with code {codes[failed]}; the other ranks were ended too",
            place=str(directory),
            fix="see the end of the log; start the same command again: the stage resumes from its last checkpoint",
        )


if __name__ == "__main__":
    run_child(main)
