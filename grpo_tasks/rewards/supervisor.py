"""`python -P -m grpo_tasks.rewards.supervisor DATA CONTROL MEMORY`: starts the reward worker and answers for all it starts.

    RewardWorker --control--> supervisor --starts--> serve.py --starts--> whatever a reward function starts
                                  |   ^------- one pipe: all they print -------|
                                  v
                                 log (stderr), the first lines of every call

Whatever a reward function leaves behind, however it detaches itself, becomes a child of the supervisor (Linux) and is ended when
the worker ends, when the parent closes the control socket or is gone, or when the memory of them all goes over the limit
(MEMORY in bytes). A second process does the same should the supervisor itself be killed. Imports little: it has to start at once.
"""

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import NoReturn

import psutil

from grpo_tasks.processes.framing import HOW, READY
from grpo_tasks.processes.lifetime import PARENT, adopt_orphans

LOOK_S = 0.05
"""Seconds between two looks at the memory during a call."""
IDLE_S = 1.0
"""The same between calls, when only a thread that a function left could use any."""
LOOK_SHARE = 0.05
"""Largest share of a core that the looks may take, on a machine with many processes."""
HOW_S = 0.5
"""Longest time for the end of a worker that has closed its socket."""
END_S = 5.0
"""Longest time for the end of processes that were killed."""
MAX_LINES = 100
"""Lines kept of what is printed during one call."""
MAX_BYTES = 16_384
"""Bytes kept of what is printed during one call."""
CHUNK_BYTES = 65_536


class Output:
    """Passes on the beginning of what is printed during a call, and counts the rest."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._begin("")

    def _begin(self, label: str) -> None:
        self.label, self._lines, self._bytes = label, MAX_LINES, MAX_BYTES
        self._cut_lines = self._cut_bytes = 0
        # Whether the last line, of what was passed on and of the rest, has no end yet.
        self._open = self._cut_open = False

    def feed(self, data: bytes) -> None:
        """Take what was printed."""
        kept = self._keep(data) if self._cut_bytes == 0 else b""
        if kept:
            self._write(kept)
            self._lines -= kept.count(b"\n")
            self._bytes -= len(kept)
            self._open = not kept.endswith(b"\n")
        cut = data[len(kept) :]
        if cut:
            self._cut_bytes += len(cut)
            self._cut_lines += cut.count(b"\n")
            self._cut_open = not cut.endswith(b"\n")

    def next_call(self, label: str) -> None:
        """Say how much was left out, and begin anew."""
        if self._open:
            self._write(b"\n")
        if self._cut_bytes:
            of = f" printed by {self.label}" if self.label else ""
            self._write(f"... {self._cut_lines + self._cut_open:,} more lines{of} ({self._cut_bytes:,} bytes)\n".encode())
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
        # A full disk must not stop the reward: the trainer meets it and says so.
        with suppress(OSError):
            while data:
                data = data[os.write(self._target, data) :]


class Supervisor:
    """The worker, its output, its memory, and the orders of the parent."""

    def __init__(self, data: int, control: socket.socket, limit_bytes: int) -> None:
        self.control, self.limit_bytes = control, limit_bytes
        self.outer, self.parent = os.getppid(), int(os.environ[PARENT])
        self.log = Output(2)
        self.busy = True
        self._next_look = 0.0
        self._asked_until = math.inf
        self._orders = b""
        self.output, printed = os.pipe()
        self.worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_tasks.rewards.serve", str(data)],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(data,),
            env=os.environ | {PARENT: str(os.getpid())},
            # A function that signals its process group means itself.
            start_new_session=True,
        )
        os.close(printed)
        os.close(data)
        os.set_blocking(self.output, False)
        control.setblocking(False)
        self.code: int | None = None

    def run(self) -> dict[str, int]:
        """Until there is nothing left to do; how the worker ended."""
        poll, ended = select.poll(), _notice_children()
        for descriptor in (self.control.fileno(), self.output, ended):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, event in poll.poll(1000 * (LOOK_S if self.busy else IDLE_S)):
                if descriptor == self.output:
                    self._drain(CHUNK_BYTES)
                    if event & select.POLLHUP and not event & select.POLLIN:
                        poll.unregister(self.output)
                elif descriptor == ended:
                    os.read(ended, CHUNK_BYTES)
                elif not self._obey():
                    return {}
            self._reap()
            if self.code is not None:
                return {"code": self.code}
            if time.monotonic() > self._asked_until:
                return {}
            if time.monotonic() >= self._next_look:
                used = self._look()
                if used > self.limit_bytes:
                    return {"memory": used}
                if self._forsaken():
                    return {}

    def end(self, report: dict[str, int]) -> None:
        """End every process that is left; then say how the worker ended."""
        end_descendants()
        self._drain(sys.maxsize)
        self.log.next_call("")
        with suppress(OSError):
            self.control.send(json.dumps(report).encode() + b"\n")

    def _obey(self) -> bool:
        """Take the parent's orders; False when it has closed the socket."""
        try:
            orders = self.control.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._orders = (self._orders + orders).split(b"\n")
        for line in map(bytes.decode, lines):
            if line == HOW:
                self._asked_until = time.monotonic() + HOW_S
                continue
            # What the call before has printed belongs to it; a pipe holds no more than this.
            self._drain(2**20)
            self.log.next_call(line)
            self.busy = bool(line)
            if line:
                with suppress(OSError):
                    self.control.send(READY)
        return bool(orders)

    def _drain(self, most: int) -> None:
        with suppress(OSError):
            while most > 0:
                data = os.read(self.output, CHUNK_BYTES)
                if not data:
                    return
                self.log.feed(data)
                most -= len(data)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.worker.pid:
                    self.code = self.worker.returncode = os.waitstatus_to_exitcode(status)

    def _look(self) -> int:
        """Bytes of memory of the worker and all it has started."""
        began = time.monotonic()
        used = memory_of(psutil.Process().children(recursive=True), self.limit_bytes)
        took = time.monotonic() - began
        self._next_look = began + max(LOOK_S, took / LOOK_SHARE)
        return used

    def _forsaken(self) -> bool:
        """Whether the parent is gone though its end of the socket is open (a process forked from it holds a copy)."""
        if os.getppid() != self.outer:
            return True
        try:
            return psutil.Process(self.outer).ppid() != self.parent
        except psutil.Error:
            return True


def memory_of(processes: list[psutil.Process], limit_bytes: int) -> int:
    """Bytes of memory in use; pages that several of them share count once (told apart only when it matters)."""
    used = 0
    for process in processes:
        with suppress(psutil.Error):
            used += process.memory_info().rss
    if used <= limit_bytes:
        return used
    used = 0
    for process in processes:
        with suppress(psutil.Error):
            full = process.memory_full_info()
            used += getattr(full, "pss", full.rss)
    return used


def end_descendants() -> None:
    """Kill all processes below this one until none is left; those that are started meanwhile too."""
    deadline, own = time.monotonic() + END_S, psutil.Process()
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


def _notice_children() -> int:
    """A descriptor that becomes readable when a child ends."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return ended


def main() -> NoReturn:
    """Two processes: one that supervises, and one that waits for its end and clears up after it."""
    data, control, limit_bytes = map(int, sys.argv[1:4])
    adopt_orphans()
    inner = os.fork()
    if inner:
        os.close(data)
        os.close(control)
        os.waitpid(inner, 0)
        end_descendants()
        os._exit(0)
    adopt_orphans()
    supervisor = Supervisor(data, socket.socket(fileno=control), limit_bytes)
    supervisor.end(supervisor.run())
    os._exit(0)


if __name__ == "__main__":
    main()
