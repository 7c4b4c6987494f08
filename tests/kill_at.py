"""kill -9 just before the n-th call that matters, in a process of its own: what no timer hits. And work by several at once."""

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FILES = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"})
"""Calls that change what is on disk (`open` only for writing)."""
REQUESTS = frozenset({"http.client.send"})
LIMIT_S = 600

# A forked child has the libraries loaded; this process has used torch, whose threads do not survive a fork.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["grpo_tasks.grpo.__main__", "grpo_tasks.tracking.log_model", "grpo_tasks.tracking.runs"])


def preload_only(*modules: str) -> None:
    """For tests whose children need less than all; has an effect when they are the first of their process."""
    PROCESSES.set_forkserver_preload(list(modules))


def count_calls(work: Callable[[], object], calls: frozenset[str], under: str = "") -> int:
    """How many such calls the work makes when nobody disturbs it."""
    with _process(work, calls, under, 0) as (process, told):
        process.join(LIMIT_S)
        assert process.exitcode == 0
        return told.recv()


def is_killed_at(number: int, work: Callable[[], object], calls: frozenset[str], under: str = "") -> bool:
    """Run the work, kill its process just before the call of this number (from 1); whether it came so far."""
    with _process(work, calls, under, number) as (process, _):
        process.join(LIMIT_S)
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0


def some(total: int, how_many: int, seed: int) -> list[int]:
    """Numbers of calls to be killed at: spread over all of them, otherwise at random."""
    draw, width = random.Random(seed), total / how_many
    return sorted({1 + int(width * part + draw.random() * width) for part in range(how_many)})


def at_once(processes: int, work: Callable[[], object]) -> list[int | None]:
    """Do the work in so many processes that begin at the same moment; their exit codes."""
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


def _watched(work, calls, under, number, told):
    seen = 0

    def look(event, arguments):
        nonlocal seen
        if event not in calls or (under and not str(arguments[0]).startswith(under)):
            return
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    work()
    told.send(seen)
