"""The heavy work of a step in a child process: its memory is free when the step ends, and a crash ends nothing else.

    run_module (here)  ->  python -m MODULE DIRECTORY, forked by fork_server.py  ->  run_child (there)

Both sides know only the files in DIRECTORY: spec.json (what to do), result.json (what came of it, besides the files that the step
makes) or error.json (the error that the user is shown), notices.txt (what the user should know meanwhile, a line each),
progress.json (how far it has come, while it runs) and log.txt (everything that it prints).
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_tasks.kit.files import replacing
from grpo_tasks.kit.progress import Progress, listening, report
from grpo_tasks.processes.lifetime import die_with_parent, start_module
from grpo_tasks.processes.serve import tail
from schemas.errors import ChildDied, DiskFullError, Notice, UserError, disk_full
from schemas.secret import hide_output

SPEC, RESULT, ERROR, NOTICES, LOG = "spec.json", "result.json", "error.json", "notices.txt", "log.txt"
PROGRESS = "progress.json"
DISK_FULL = 28
"""Exit code of a child whose disk is full, where error.json cannot be written either; 28 is ENOSPC."""
IMPORTS = "imports"
"""Key of a request to the fork server that asks for no child, only for imports."""
POLL_S = 0.1
GRACE_S = 10.0
"""Longest wait for a child to end after a signal."""


def run_module(module: str, directory: Path, *, tick: Callable[[], None] | None = None) -> None:
    """Run `python -m module directory` to its end; its notices become warnings here, and who listens here hears its progress.

    `tick` is called a few times a second while the child runs. An exception in it, such as Ctrl-C, ends the child too. Raises the
    `UserError` that the child left, or `ChildDied` where it ended badly without one.
    """
    notices, shown, heard = directory / NOTICES, set[str](), ""
    notices.unlink(missing_ok=True)  # of an earlier run of the step
    (directory / PROGRESS).unlink(missing_ok=True)
    report(Progress("starting its process"))
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
            said = (directory / PROGRESS).read_text(encoding="utf-8") if (directory / PROGRESS).exists() else ""
            if said not in ("", heard):
                heard = said
                report(Progress(**json.loads(said)))
            if tick is not None:
                tick()
    finally:
        child.end()
        (directory / PROGRESS).unlink(missing_ok=True)
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

    `modules` are what later children import in addition to the libraries that all of them need.
    """
    if not Child.idle_servers:
        # If it cannot start, the next child starts another one, with a log.
        Child.idle_servers.append(_start_server(Path(os.devnull)))
    if modules:
        # The server may have been killed. The next child finds that out, and starts another one.
        with contextlib.suppress(OSError):
            Child.idle_servers[-1].send_bytes(json.dumps({IMPORTS: modules}).encode())


def _start_server(log: Path) -> Connection:
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as file:
        start_module("grpo_tasks.processes.fork_server", theirs.fileno(), output=file, pass_fds=(theirs.fileno(),))
    return Connection(ours.detach())


def error_of(exit_code: int, module: str, directory: Path) -> UserError:
    """Why a child that ended with this code has no result."""
    if exit_code == DISK_FULL:
        return no_room(directory)
    if (directory / ERROR).exists():
        return UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return ChildDied(
        f"{module} {how}; the end of its log:\n{tail(directory / LOG)}",
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


def run_child(work: Callable[[Path], None]) -> None:
    """Main function of a child process: run `work` on the folder that is its only argument."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {Path(sys.argv[0]).parent.name} DIRECTORY (a folder with {SPEC})")
    directory = Path(sys.argv[1])
    die_with_parent()
    hide_output()
    (directory / ERROR).unlink(missing_ok=True)
    show = warnings.showwarning

    def showwarning(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        show(message, category, *rest, **options)
        if issubclass(category, Notice):
            with (directory / NOTICES).open("a", encoding="utf-8") as file:
                file.write(" ".join(str(message).split()) + "\n")

    warnings.showwarning = showwarning
    warnings.simplefilter("default", Notice)

    try:
        try:
            # One of the ranks speaks for all.
            with _written_progress(directory) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
                work(directory)
        except UserError as error:
            (directory / ERROR).write_text(error.to_json(), encoding="utf-8")
            traceback.print_exc()
            sys.exit(error.exit_code)
    except Exception as error:
        if not disk_full(error):
            raise
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(DISK_FULL)


@contextlib.contextmanager
def _written_progress(directory: Path) -> Iterator[None]:
    """Within the block a thread writes the latest progress into the folder: what is reported a thousand times a second, too."""
    latest, ended = deque[Progress](maxlen=1), threading.Event()

    def write() -> None:
        while not ended.wait(POLL_S):
            if not latest:
                continue
            progress = latest.popleft()
            # The disk may be full: the work itself says so.
            with contextlib.suppress(OSError), replacing(directory / PROGRESS) as unfinished:
                unfinished.write_text(json.dumps(asdict(progress)), encoding="utf-8")

    threading.Thread(target=write, name="progress", daemon=True).start()
    try:
        with listening(latest.append):
            yield
    finally:
        ended.set()
