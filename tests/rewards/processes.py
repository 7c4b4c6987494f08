"""The processes of a reward worker, and waiting for them."""

import time
from collections.abc import Callable

import psutil

from grpo_tasks.rewards.worker import RewardWorker


def server_process(worker: RewardWorker) -> psutil.Process:
    """The process that reward functions run in."""
    assert worker._process is not None
    family = psutil.Process(worker._process.pid).children(recursive=True)
    return next(one for one in family if "grpo_tasks.rewards.serve" in one.cmdline())


def is_gone(pid: int) -> bool:
    """Whether the process has ended, collected by its parent or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait at most 20 s for a condition."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
