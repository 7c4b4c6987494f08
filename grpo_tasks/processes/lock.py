"""A lock between the processes of one machine. The kernel releases it when its holder ends, however it ends.

    with alone(folder / "publish.lock", who="the run small", waiting=log.info):    exclusive: one process (or thread) at a time
    with alone(..., shared=True):                                                  shared: any number of these, no exclusive one

It is `flock` on a file that is never removed. The file names its last holder, for the message to those who wait. The lock does
not exclude other machines, and its holder cannot acquire it a second time.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

POLL_S = 0.1


@contextmanager
def alone(path: Path, *, who: str = "", shared: bool = False, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock while the block runs; wait for it as long as necessary.

    Args:
        path: file of the lock; created if it does not exist.
        who: name of this holder, shown to those who wait.
        shared: hold it together with others who share it.
        waiting: called once with the name of the current holder, if there is a wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        if not _try_lock(file, shared):
            if waiting is not None:
                file.seek(0)
                waiting(file.read().strip() or "another process")
            # Polling instead of one blocking call: Python notices the cancellation of a run only between two calls.
            while not _try_lock(file, shared):
                time.sleep(POLL_S)
        # The name is only for a message: a full disk is no reason to fail.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{who} (process {os.getpid()})".strip())
            file.flush()
        yield


def _try_lock(file: TextIO, shared: bool) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
