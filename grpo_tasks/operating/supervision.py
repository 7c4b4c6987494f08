"""Starts the servers and workers of a stack again when they end: for `grpo ui` in its own process, for `grpo up` in another one.

    python -m grpo_tasks.operating.supervision FOLDER      started by `Stack.start`; ends with SIGTERM, or with the stack

A process that ends again at once is started less and less often, up to once a minute: its log says why. The supervisor itself is
watched by nobody; `grpo up` starts it again with everything else that has ended. It also rotates the logs.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_tasks.operating.commands import VARIABLE
from grpo_tasks.operating.servers import Stack

POLL_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after the first restart of a process, and the longest one; a process that ends sooner than the pause doubles it."""

MOST_LOG_BYTES = 20 * 2**20
"""Size of a log of a server or worker from which it is rotated."""


class Restarts:
    """When each process may be started again."""

    def __init__(self) -> None:
        self._pause_s: dict[str, float] = {}
        self._started_at: dict[str, float] = {}

    def due(self, name: str, now: float) -> bool:
        """Whether the process may be started at `now` (seconds of a monotonic clock)."""
        return name not in self._started_at or now - self._started_at[name] >= self._pause_s[name]

    def started(self, name: str, now: float) -> None:
        """Note a restart. The pause before the next one doubles, unless the process had run for the longest pause."""
        steady = name not in self._started_at or now - self._started_at[name] > 2 * LONGEST_PAUSE_S
        self._pause_s[name] = FIRST_PAUSE_S if steady else min(2 * self._pause_s[name], LONGEST_PAUSE_S)
        self._started_at[name] = now


def supervise(stack: Stack, postgres: str | None, *, stop_requested: Callable[[], bool] = lambda: False) -> None:
    """Start again whatever ends, until `stop_requested` or until `grpo down` has stopped the stack."""
    restarts = Restarts()
    while not stop_requested() and (ended := stack.ended()) is not None:
        rotate_logs(stack.folder)
        for name in ended:
            now = time.monotonic()
            if restarts.due(name, now) and stack.restart(name, postgres):
                restarts.started(name, now)
        time.sleep(POLL_S)


def rotate_logs(folder: Path, *, most_bytes: int = MOST_LOG_BYTES) -> list[Path]:
    """Move what a log holds beyond `most_bytes` to NAME.log.1, which replaces an older one; returns the logs that were moved.

    The processes keep their files open. They append, so after the file is cut to nothing they go on at its start; the few lines
    that are written between the copy and the cut are lost.
    """
    moved = []
    for log in folder.glob("*.log"):
        # A full disk is no reason to stop supervising.
        with suppress(OSError):
            if log.stat().st_size > most_bytes:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)
                moved.append(log)
    return moved


def main(folder: Path) -> None:
    """Supervise the stack of `folder`."""
    signals: list[int] = []
    # A flag instead of an exception: a process that was started but not recorded could not be stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    stack = Stack(folder, report=lambda line: print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True))
    supervise(stack, os.environ.get(VARIABLE), stop_requested=lambda: bool(signals))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
