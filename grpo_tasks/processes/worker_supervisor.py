"""`python -P -m grpo_tasks.processes.worker_supervisor MODULE DATA CONTROL MEMORY`: starts a worker that runs a user's functions.

CONTROL carries orders in plain lines: the label of the call that begins, an empty one when a call has ended, or EXIT_QUERY. The
log (stderr) gets the first lines of each call from one pipe, on which everything that the worker starts writes.

DATA and CONTROL are file descriptors, MEMORY a limit in bytes. Whatever a function leaves running becomes a child of the
supervisor (Linux), which kills all of it when the worker or the parent ends or the memory of all exceeds the limit; a second
process does the same if the supervisor is killed.
"""

import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import psutil

from grpo_tasks.processes.lifetime import PARENT, adopt_orphans, start_module

EXIT_QUERY = "?"
"""Order: report how the worker ended, because its socket is closed."""
READY = b"."
"""The reply to an order with a label: output from now on belongs to that call."""
CHECK_S, IDLE_CHECK_S = 0.05, 1.0
"""Time between two checks of the memory during a call, and outside, when only something left behind could use memory."""
MAX_CHECK_SHARE = 0.05
"""Largest share of a core that the checks may take. They are slow on a machine with many processes."""
EXIT_LIMIT_S, KILL_LIMIT_S = 0.5, 5.0
"""Time limits for a worker to end after it has closed its socket, and for killed processes to end."""
MAX_LINES, MAX_BYTES = 100, 16_384
CHUNK_BYTES, MAX_PIPE_BYTES = 65_536, 2**20
"""The size of a pipe on Linux, and the largest that an unprivileged process can set."""


class Output:
    """Passes on the beginning of the output of a call, and counts the rest. A call cannot fill the disk."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._begin("")

    def _begin(self, label: str) -> None:
        self.label, self._lines, self._bytes = label, MAX_LINES, MAX_BYTES
        self._dropped_lines = self._dropped_bytes = 0
        # Whether the last line that was kept, and the last that was dropped, still lack their line end.
        self._kept_open = self._dropped_open = False

    def feed(self, data: bytes) -> None:
        """Take in output of the current call."""
        kept = self._keep(data) if self._dropped_bytes == 0 else b""
        if kept:
            self._write(kept)
            self._lines -= kept.count(b"\n")
            self._bytes -= len(kept)
            self._kept_open = not kept.endswith(b"\n")
        dropped = data[len(kept) :]
        if dropped:
            self._dropped_bytes += len(dropped)
            self._dropped_lines += dropped.count(b"\n")
            self._dropped_open = not dropped.endswith(b"\n")

    def next_call(self, label: str) -> None:
        """Write how much of the call was dropped, and begin the next call (empty label: none)."""
        if self._kept_open:
            self._write(b"\n")
        if self._dropped_bytes:
            by = f" printed by {self.label}" if self.label else ""
            lines = self._dropped_lines + self._dropped_open
            self._write(f"... {lines:,} more lines{by} ({self._dropped_bytes:,} bytes)\n".encode())
        self._begin(label)

    def _keep(self, data: bytes) -> bytes:
        kept, end = data[: self._bytes], 0
        for _ in range(self._lines):
            following = kept.find(b"\n", end) + 1
            if not following:
                return kept
            end = following
        return kept[:end]

    def _write(self, data: bytes) -> None:
        # A full disk must not stop the function: the trainer runs into it too and reports it.
        with suppress(OSError):
            while data:
                data = data[os.write(self._target, data) :]


class WorkerSupervisor:
    """Starts the worker, watches its end, output and memory, and obeys the parent."""

    def __init__(self, module: str, data: int, control: socket.socket, limit_bytes: int) -> None:
        self.control, self.limit_bytes = control, limit_bytes
        self.outer, self.parent = os.getppid(), int(os.environ[PARENT])
        self.log = Output(2)
        self.busy = True
        self._next_check = 0.0
        self._exit_deadline = math.inf
        self._orders = b""
        self.output, printed = os.pipe()
        # A session of its own, so that a function that signals its process group does not reach the supervisor.
        self.worker = start_module(module, data, output=printed, pass_fds=(data,), own_session=True)
        os.close(printed)
        os.close(data)
        os.set_blocking(self.output, False)
        control.setblocking(False)
        self.code: int | None = None

    def run(self) -> dict[str, int]:
        """Supervise until the worker or the parent ends. Returns how the worker ended; empty when it was not its own doing."""
        # Becomes readable when a child ends, so that poll can wait for it.
        ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.output, ended):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, event in poll.poll(1000 * (CHECK_S if self.busy else IDLE_CHECK_S)):
                if descriptor == self.output:
                    self._drain(CHUNK_BYTES)
                    # All writers have closed the pipe and it is empty: poll would report it for ever.
                    if event & select.POLLHUP and not event & select.POLLIN:
                        poll.unregister(self.output)
                elif descriptor == ended:
                    os.read(ended, CHUNK_BYTES)
                elif not self._obey():
                    return {}
            self._reap()
            if self.code is not None:
                return {"code": self.code}
            if time.monotonic() > self._exit_deadline:
                return {}
            if time.monotonic() >= self._next_check:
                used = self._check_memory()
                if used > self.limit_bytes:
                    return {"memory": used}
                if self._parent_is_gone():
                    return {}

    def end(self, report: dict[str, int]) -> None:
        """Kill every process that is left, then report to the parent how the worker ended."""
        end_descendants()
        self._drain(sys.maxsize)
        self.log.next_call("")
        with suppress(OSError):
            self.control.send(json.dumps(report).encode() + b"\n")

    def _obey(self) -> bool:
        """Carry out the parent's orders; False when it has closed the socket."""
        try:
            orders = self.control.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._orders = (self._orders + orders).split(b"\n")
        for line in map(bytes.decode, lines):
            if line == EXIT_QUERY:
                self._exit_deadline = time.monotonic() + EXIT_LIMIT_S
                continue
            # What is still in the pipe was printed by the call before.
            self._drain(MAX_PIPE_BYTES)
            self.log.next_call(line)
            self.busy = bool(line)
            if line:
                with suppress(OSError):
                    self.control.send(READY)
        return bool(orders)

    def _drain(self, max_bytes: int) -> None:
        """Read the output that is waiting, at most `max_bytes`: a function may print faster than it can be read."""
        with suppress(OSError):
            while max_bytes > 0:
                data = os.read(self.output, CHUNK_BYTES)
                if not data:
                    return
                self.log.feed(data)
                max_bytes -= len(data)

    def _reap(self) -> None:
        """Collect ended processes, adopted ones too, and note the exit code of the worker."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.worker.pid:
                    self.code = self.worker.returncode = os.waitstatus_to_exitcode(status)

    def _check_memory(self) -> int:
        """Bytes of memory in use by the worker and everything that it has started."""
        # Pages that several processes share count once, but only when the answer depends on it: resident memory is cheap to read
        # but counts them for each process, and the exact proportional set size is slow.
        began = time.monotonic()
        processes = psutil.Process().children(recursive=True)

        def total(size: Callable[[psutil.Process], int]) -> int:
            used = 0
            for process in processes:
                with suppress(psutil.Error):
                    used += size(process)
            return used

        used = total(lambda one: int(one.memory_info().rss))
        if used > self.limit_bytes:
            used = total(lambda one: int(getattr(full := one.memory_full_info(), "pss", full.rss)))
        self._next_check = began + max(CHECK_S, (time.monotonic() - began) / MAX_CHECK_SHARE)
        return used

    def _parent_is_gone(self) -> bool:
        """Whether the parent has ended although its end of the socket is open: a process forked from it may hold a copy."""
        if os.getppid() != self.outer:
            return True
        try:
            return psutil.Process(self.outer).ppid() != self.parent
        except psutil.Error:
            return True


def end_descendants() -> None:
    """Kill all processes below this one until none is left, including those that start in the meantime."""
    deadline, own = time.monotonic() + KILL_LIMIT_S, psutil.Process()
    while time.monotonic() < deadline:
        for process in own.children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def main() -> NoReturn:
    """Fork: the inner process supervises, the outer one waits for its end and then kills whatever is left."""
    module = sys.argv[1]
    data, control, limit_bytes = map(int, sys.argv[2:5])
    adopt_orphans()
    inner = os.fork()
    if inner:
        os.close(data)
        os.close(control)
        os.waitpid(inner, 0)
        end_descendants()
        os._exit(0)
    adopt_orphans()
    supervisor = WorkerSupervisor(module, data, socket.socket(fileno=control), limit_bytes)
    supervisor.end(supervisor.run())
    os._exit(0)


if __name__ == "__main__":
    main()
