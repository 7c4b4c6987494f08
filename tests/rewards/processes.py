"""The processes of a reward worker."""

import psutil

from grpo_tasks.rewards.worker import RewardWorker


def server_process(worker: RewardWorker) -> psutil.Process:
    """The process that reward functions run in."""
    assert worker._process is not None
    family = psutil.Process(worker._process.pid).children(recursive=True)
    return next(one for one in family if "grpo_tasks.rewards.serve" in one.cmdline())
