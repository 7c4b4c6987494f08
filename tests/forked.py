"""Work in processes that are forked with everything imported: to import it takes each longer than a short stage."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from grpo_tasks.processes.serve import HOST, free_port
from tests.kill_at import LIMIT_S, PROCESSES


def train_in_processes(root: Path, count: int = 1) -> None:
    """Train a stage in so many processes: those that `python -m grpo_tasks.grpo` starts for the ranks."""
    in_processes(partial(_train, root), count)


def in_processes(work: Callable[[], None], count: int) -> None:
    """Do the work in so many processes, which know each other as ranks, with the environment of this one."""
    environments = [dict(os.environ) for _ in range(count)]
    if count > 1:
        common = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        environments = [own | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, own in enumerate(environments)]
    started = [PROCESSES.Process(target=_do, args=(work, Path.cwd(), environment)) for environment in environments]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    assert [process.exitcode for process in started] == [0] * count


def _do(work: Callable[[], None], cwd: Path, environment: dict[str, str]) -> None:
    # Those of the test, not those of the process that forks.
    os.environ.clear()
    os.environ |= environment
    os.chdir(cwd)
    work()


def _train(root: Path) -> None:
    from grpo_tasks.grpo.__main__ import main

    main(root)
