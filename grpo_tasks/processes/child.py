"""Runs the heavy work of a step in a child process: its memory is free when the step ends, and a crash ends nothing else."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from grpo_tasks.processes.entry import DISK_FULL, ERROR, LOG, NOTICES
from grpo_tasks.processes.fork_server import IMPORTS
from schemas.errors import ChildDied, DiskFullError, Notice, UserError

POLL_S = 0.1
GRACE_S = 10.0
"""Longest wait for a child to end after a signal."""
LOG_LINES_SHOWN = 15


def run_module(module: str, directory: Path, *, tick: Callable[[], None] | None = None) -> None:
    """Run `python -m module directory` to its end; its output goes to `directory`/log.txt, its notices become warnings here.

    `tick` is called a few times a second while the child runs. An exception in it, such as Ctrl-C, ends the child too.

    Raises:
        UserError: the one that the child wrote to error.json.
        ChildDied: the child ended with an error code or a signal and wrote no error.
    """
    notices, shown = directory / NOTICES, set[str]()
    notices.unlink(missing_ok=True)  # of an earlier run of the step
    child = Child(module, directory)
    try:
        running = True
        while running:
            running = child.is_running(POLL_S)
            # Ranks of a stage say the same; a line that is being written has no end yet.
            lines = notices.read_text(encoding="utf-8").splitlines(keepends=True) if notices.exists() else []
            for line in dict.fromkeys(line.strip() for line in lines if line.endswith("\n")):
                if line not in shown:
                    shown.add(line)
                    warnings.warn(line, Notice, stacklevel=2)
            if tick is not None:
                tick()
    finally:
        child.end()
    if child.exit_code != 0:
        raise error_of(child.exit_code, module, directory)


class Child:
    """A child process, forked by a fork server that has imported the libraries already (fork_server.py)."""

    idle_servers: list[Connection] = []  # noqa: RUF012 - shared by all children of this process on purpose
    """Fork servers that wait for work. A server forks one child at a time; children that run at once have a server each."""

    def __init__(self, module: str, directory: Path) -> None:
        log = directory / LOG
        # Environment and working directory of this moment: the server may have been started with others.
        request = {
            "module": module,
            "directory": str(directory),
            "log": str(log),
            "environment": dict(os.environ),
            "cwd": str(Path.cwd()),
        }
        self.exit_code = -signal.SIGKILL
        """Negative for a signal. SIGKILL also stands for a child whose server was killed, because the child dies with it."""
        self._pid: int | None = None
        """Pid of the child while it runs."""
        # An idle server may have been killed meanwhile: try the next one, in the end a new one.
        while self._pid is None:
            is_new = not Child.idle_servers
            self._server = _start_server(log) if is_new else Child.idle_servers.pop()
            try:
                self._server.send_bytes(json.dumps(request).encode())
                self._pid = int(self._server.recv_bytes())
            except (EOFError, OSError):
                self._server.close()
                if is_new:
                    # The reason is in the log, where the server's output goes too.
                    self.exit_code = 1
                    return

    def is_running(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds for the child to end; True when it still runs then."""
        if self._pid is None:
            return False
        if not self._server.poll(wait_s):
            return True
        self._pid = None
        try:
            self.exit_code = int(self._server.recv_bytes())
            Child.idle_servers.append(self._server)
        except (EOFError, OSError):
            self._server.close()
        return False

    def end(self) -> None:
        """End the child: by SIGTERM first, by SIGKILL if it does not end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)
                self.is_running(GRACE_S)


def prepare_child(*modules: str) -> None:
    """Start a fork server while this process is busy with other things: the next child then need not wait for its imports.

    `modules` are what later children import beside the libraries that all of them need. The server imports them once.
    """
    if not Child.idle_servers:
        # If it cannot start, the next child starts another one, with a log.
        Child.idle_servers.append(_start_server(Path(os.devnull)))
    if modules:
        # The server may have been killed. The next child finds that out, and starts another one.
        with contextlib.suppress(OSError):
            Child.idle_servers[-1].send_bytes(json.dumps({IMPORTS: modules}).encode())


def _start_server(log: Path) -> Connection:
    """Start a fork server whose own output goes to `log`; it ends when the connection is closed."""
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


def error_of(exit_code: int, module: str, directory: Path) -> UserError:
    """Why a child that ended with this code has no result."""
    if exit_code == DISK_FULL:
        return no_room(directory)
    if (directory / ERROR).exists():
        return UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
    tail = (directory / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return ChildDied(
        "\n".join([f"{module} {how}; the end of its log:", *(f"    {line}" for line in tail)]),
        place=str(directory / LOG),
        fix="run the same command again: finished steps are skipped, a stage continues from its last checkpoint"
        + (" (signal 9 is often the kernel out of memory: use smaller batches)" if exit_code == -9 else ""),
    )


def no_room(directory: Path) -> DiskFullError:
    """The error of a step, or of a run, whose disk is full."""
    free = shutil.disk_usage(directory).free
    return DiskFullError(
        f"the disk is full ({free / 2**20:.0f} MiB are free now)",
        place=str(directory),
        fix="free some space, then run the same command again: it continues from the last complete checkpoint; "
        "resources.output_dir moves the runs to another disk, stages.N.save_total_limit keeps fewer checkpoints",
    )
