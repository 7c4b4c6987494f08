"""A lock between the processes of this machine that ends with its holder, however the holder ends.

    with alone(folder / "publish.lock", who="the run small", waiting=log.info):    one process (or thread) at a time
    with alone(..., shared=True):                                                  many of these, or one of the others

It is `flock` on a file that stays. The file names its last holder, for the message of whoever waits. What it does not do: exclude
other machines, or let the holder take the same lock twice.
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
    """Hold the lock while the block runs; wait for it as long as it takes.

    Args:
        path: the lock's file; made where there is none.
        who: the holder in words, shown to those who wait.
        shared: let others who share it hold it too.
        waiting: called once, with the present holder in words, when the lock is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        if not _taken(file, shared):
            if waiting is not None:
                file.seek(0)
                waiting(file.read().strip() or "another process")
            # Not one blocking call: a cancelled run is interrupted by a flag that Python sees only between two calls.
            while not _taken(file, shared):
                time.sleep(POLL_S)
        # The name is a courtesy; a full disk must not cost the lock.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{who} (process {os.getpid()})".strip())
            file.flush()
        yield


def _taken(file: TextIO, shared: bool) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
