"""Ties the life of a process to the life of the process that started it.

    parent    starts the child with GRPO_PARENT_PID=<own pid> in its environment (`PARENT`)
    child     calls `die_with_parent` first of all; the kernel then kills it when the parent ends, even by kill -9

Linux only, by `prctl`; elsewhere the functions do nothing. Standard library only: every child imports this first.
"""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from typing import Self

import psutil

PARENT = "GRPO_PARENT_PID"
"""Environment variable with the pid of the process that a child must not outlive."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

TOLERANCE_S = 1.0
"""Start times are computed from the time of the last boot, which moves a little when the clock is adjusted."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that ended before the call above sends no signal any more; this process has another parent by now.
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends; otherwise it would become a child of process 1."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine, past or present. The kernel reuses the pid of one that has ended; no other has both."""

    pid: int
    born: float
    """Start time in seconds since the epoch."""

    @classmethod
    def of(cls, pid: int | None = None) -> Self:
        """The identity of a running process, by default of this one; raises psutil.NoSuchProcess if there is none."""
        process = psutil.Process(pid)
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """The process; None when it has ended, even if another one has its pid now or its parent has not collected it yet."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.born) < TOLERANCE_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process() is not None
