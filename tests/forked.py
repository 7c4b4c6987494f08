"""The trainer's command in processes that are forked with everything imported, which takes each longer than a short stage."""

import os
from pathlib import Path

from grpo_tasks.processes.serve import HOST, free_port
from tests.kill_at import LIMIT_S, PROCESSES


def train_in_processes(root: Path, count: int = 1) -> None:
    """Train a stage in so many processes: those that `python -m grpo_tasks.grpo` starts for the ranks."""
    environments = [dict(os.environ) for _ in range(count)]
    if count > 1:
        common = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        environments = [own | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, own in enumerate(environments)]
    started = [PROCESSES.Process(target=_train, args=(root, Path.cwd(), environment)) for environment in environments]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    assert [process.exitcode for process in started] == [0] * count


def _train(root: Path, cwd: Path, environment: dict[str, str]) -> None:
    from grpo_tasks.grpo.__main__ import main

    # Those of the test, not those of the process that forks.
    os.environ.clear()
    os.environ |= environment
    os.chdir(cwd)
    main(root)
