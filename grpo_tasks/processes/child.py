"""Heavy work in a process of its own: torch's memory is given back when a step ends, and a crash takes nothing else along."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from grpo_tasks.processes.entry import DISK_FULL, ERROR, LOG
from schemas.errors import ChildDied, DiskFullError, UserError

POLL_S = 0.1
GRACE_S = 10.0


def run_module(module: str, directory: Path, *, tick: Callable[[], None] | None = None) -> None:
    """Run `python -m module directory` to its end; its output goes to `directory`/log.txt.

    `tick` is called a few times a second meanwhile. Whatever ends this function early ends the child too.

    Raises:
        UserError: the child left one.
        ChildDied: it ended badly without saying why.
    """
    child = Child(module, directory)
    try:
        while child.running(POLL_S):
            if tick is not None:
                tick()
    finally:
        child.end()
    if child.code != 0:
        raise _error_of(child.code, module, directory)


class Child:
    """A child process, forked by a server of this process that has the libraries loaded (fork_server.py)."""

    idle: list[Connection] = []  # noqa: RUF012 - the servers of the whole process
    """Servers that wait for work; one forks one child at a time."""

    def __init__(self, module: str, directory: Path) -> None:
        log = directory / LOG
        request = {"module": module, "directory": str(directory), "log": str(log), "environment": dict(os.environ)}
        self.code = -signal.SIGKILL
        """Exit code, negative for a signal; SIGKILL also where the server was killed, for its child dies with it."""
        self._pid: int | None = None
        # A server that waited too long may be gone.
        while self._pid is None:
            fresh = not Child.idle
            self._server = _start_server(log) if fresh else Child.idle.pop()
            try:
                self._server.send_bytes(json.dumps(request).encode())
                self._pid = int(self._server.recv_bytes())
            except (EOFError, OSError):
                self._server.close()
                if fresh:
                    self.code = 1
                    return

    def running(self, wait_s: float) -> bool:
        """Whether it still runs, after at most `wait_s` seconds."""
        if self._pid is None:
            return False
        if not self._server.poll(wait_s):
            return True
        self._pid = None
        try:
            self.code = int(self._server.recv_bytes())
            Child.idle.append(self._server)
        except (EOFError, OSError):
            self._server.close()
        return False

    def end(self) -> None:
        """End it, if need be by force."""
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)
                self.running(wait_s)


def _start_server(log: Path) -> Connection:
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as file:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_tasks.processes.fork_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=(theirs.fileno(),),
        )
    return Connection(ours.detach())


def _error_of(code: int, module: str, directory: Path) -> UserError:
    if code == DISK_FULL:
        return no_room(directory)
    if (directory / ERROR).exists():
        return UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
    tail = (directory / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ChildDied(
        "\n".join([f"{module} {how}; the end of its log:", *(f"    {line}" for line in tail)]),
        place=str(directory / LOG),
        fix="start the same command again: finished steps are kept, a stage goes on from its last checkpoint"
        + (" (signal 9 is often the kernel out of memory: smaller batches)" if code == -9 else ""),
    )


def no_room(directory: Path) -> DiskFullError:
    """The error of a step, or of a run, that could not write."""
    free = shutil.disk_usage(directory).free
    return DiskFullError(
        f"there is no room left to write to ({free / 2**20:.0f} MiB are free now)",
        place=str(directory),
        fix="free some space, then start the same command again: it goes on from the last whole checkpoint; "
        "resources.output_dir moves the runs elsewhere, stages.N.save_total_limit keeps fewer checkpoints",
    )
