"""Waits for what other processes do."""

import time

import psutil

LIMIT_S = 600.0
"""Far more than anything takes on a free machine."""


def until(condition):
    """Wait until the condition is true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def has_ended(pid):
    """Whether no such process runs; one that its parent has not collected yet has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
