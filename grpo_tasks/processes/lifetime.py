"""Ties the life of a process to the life of the process that started it.

    parent    starts the child with GRPO_PARENT_PID=<own pid> in its environment (`PARENT`)
    child     calls `die_with_parent` first of all; the kernel then kills it when the parent ends, even by kill -9

Linux only, by `prctl`; elsewhere the functions do nothing. Standard library only: every child imports this first.
"""

import ctypes
import os
import signal
import sys

PARENT = "GRPO_PARENT_PID"
"""Environment variable with the pid of the process that a child must not outlive."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


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
