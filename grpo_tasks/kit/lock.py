"""A lock between the processes of one machine. The kernel releases it when its holder ends, however it ends.

One process (or thread) has it at a time, or any number of those that share it. It is `flock` on a file that is never removed,
which names its last holder, for the message to those who wait. The lock does not exclude other machines, and its holder cannot
acquire it a second time. A link is refused: the name of the holder would replace what the linked file holds.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from schemas.errors import UserError

POLL_S = 0.1


@contextmanager
def file_lock(
    path: Path, *, holder: str = "", shared: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock while the block runs; wait for it as long as necessary. The file is created if it does not exist.

    `holder` is shown to those who wait, `on_wait` is called once with the name of the current holder. Raises UserError where the
    path is a link, or no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as file:
        if not _try_lock(file, shared):
            if on_wait is not None:
                file.seek(0)
                on_wait(file.read().strip() or "another process")
            # Polling instead of one blocking call: Python notices the cancellation of a run only between two calls.
            while not _try_lock(file, shared):
                time.sleep(POLL_S)
        # The name is only for a message: a full disk is no reason to fail.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{holder} (process {os.getpid()})".strip())
            file.flush()
        yield


def private_folder(path: Path) -> Path:
    """The folder, created if need be; `UserError` where others may write to it: a lock there could be their link."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return path
    raise UserError(
        "the folder of the locks is not one that only you can write to",
        place=str(path),
        fix=f"rm -r {path}, or set TMPDIR to a folder of your own",
    )


def _opened(path: Path) -> TextIO:
    refused = UserError("a lock has to be a file, not a link, a pipe or a device", place=str(path), fix=f"rm {path}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise refused from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return os.fdopen(descriptor, "a+", encoding="utf-8")


def _try_lock(file: TextIO, shared: bool) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
