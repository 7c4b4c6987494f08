"""Kills a process (kill -9) right before its n-th file operation or request, which no timer would hit; runs work in parallel."""

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FILES = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"})
"""Audit events of calls that change files (`open` counts only for writing)."""
REQUESTS = frozenset({"http.client.send"})
LIMIT_S = 600

# Forked by a server, so that a child finds the libraries imported. Not by this process: torch's threads do not survive a fork.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["grpo_tasks.grpo.__main__", "grpo_tasks.tracking.log_model", "grpo_tasks.tracking.runs"])


def preload_only(*modules: str) -> None:
    """Import less for the children of this process; has an effect only before the first child starts."""
    PROCESSES.set_forkserver_preload(list(modules))


def count_calls(work: Callable[[], object], calls: frozenset[str], under: str = "") -> int:
    """How many such calls the work makes when it is not killed."""
    with _process(work, calls, under, 0) as (process, result):
        process.join(LIMIT_S)
        assert process.exitcode == 0
        return result.recv()


def is_killed_at(number: int, work: Callable[[], object], calls: frozenset[str], under: str = "") -> bool:
    """Run the work and kill its process right before the call of this number (from 1); False if it makes fewer calls."""
    with _process(work, calls, under, number) as (process, _):
        process.join(LIMIT_S)
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0


def some(total: int, how_many: int, seed: int) -> list[int]:
    """Numbers of calls to be killed at: one at random from each of `how_many` equal ranges."""
    draw, width = random.Random(seed), total / how_many
    return sorted({1 + int(width * index + draw.random() * width) for index in range(how_many)})


def at_once(processes: int, work: Callable[[], object]) -> list[int | None]:
    """Do the work in several processes that start at the same moment; their exit codes."""
    barrier = PROCESSES.Barrier(processes)
    started = [PROCESSES.Process(target=_together, args=(work, barrier)) for _ in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT_S)
        process.kill()
    return [process.exitcode for process in started]


def _together(work, barrier):
    barrier.wait(LIMIT_S)
    work()


@contextmanager
def _process(work, calls, under, number) -> Iterator[tuple]:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_watched, args=(work, calls, under, number, theirs))
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def _watched(work, calls, under, number, result):
    seen = 0

    def count_or_kill(event, arguments):
        nonlocal seen
        if event not in calls or (under and not str(arguments[0]).startswith(under)):
            return
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_or_kill)
    work()
    result.send(seen)
