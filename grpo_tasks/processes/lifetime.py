"""How a process starts and ends: with the process that started it, or by a signal. Every child imports this first.

`start_module` puts its process id into the environment of the child (`PARENT`), which calls `die_with_parent` first of all; the
kernel then kills it when the parent ends, even by kill -9: by `prctl`, so on Linux only.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, Self

import psutil

PARENT = "GRPO_PARENT_PID"
"""Environment variable with the pid of the process that a child must not outlive."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TOLERANCE_S = 1.0
"""Start times are computed from the time of the last boot, which moves a little when the clock is adjusted."""
Handler = Callable[[int, FrameType | None], Any]
STOPPING = "stopping; what is finished stays"


def start_module(
    module: str,
    *arguments: object,
    output: IO[bytes] | int | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    own_session: bool = False,
    popen: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
) -> "subprocess.Popen[bytes]":
    """Start `python -P -m module arguments` as a child of this process, with all variables of `environment` if it is given.

    `output` receives what it prints, by default where that of this process goes. `own_session`: Ctrl-C in the terminal, and
    signals to the process group, do not reach it. `popen` starts it, for whoever has to see a `Popen` of its own kind.
    """
    return popen(
        # -P: a file in the working directory, such as datasets.py, must not replace a library.
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**(os.environ if environment is None else environment), PARENT: str(os.getpid())},
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=own_session,
    )


def wait_until(condition: Callable[[], object], *, every_s: float, limit_s: float = math.inf) -> bool:
    """Call `condition` again and again until it holds; False when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


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
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine, past or present. The kernel reuses the pid of one that has ended; no other has both."""

    pid: int
    born: float
    """Start time in seconds since the epoch."""

    @classmethod
    def of(cls, pid: int | None = None) -> Self:
        """The identity of a running process, by default of this one; raises psutil.NoSuchProcess if there is none."""
        process = psutil.Process(pid)
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """The process; None when it has ended, even if another one has its pid now or its parent has not collected it yet."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.born) < TOLERANCE_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process() is not None


class Signalled(KeyboardInterrupt):
    """A signal asks the process to end. Python would end at once, and MLflow would show the run as running for ever."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number

    def end_process(self) -> NoReturn:
        """End this process by the same signal: whoever started it sees by what it ended."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(self.number, signal.SIG_DFL)
        os.kill(os.getpid(), self.number)
        raise AssertionError


@contextmanager
def ended_by(*numbers: int, said: str = "") -> Iterator[None]:
    """Within the block these signals raise `Signalled`, unless they are ignored (`nohup`) or somebody else handles them.

    `said` goes to the standard error output at once: what the process holds may take seconds to release.
    """

    def handle(number: int, _: FrameType | None) -> NoReturn:
        if said:
            # Not print: the signal may have interrupted one. A line of progress may stand in the terminal.
            os.write(2, b"\r\x1b[2K" * os.isatty(2) + f"{said}\n".encode())
        raise Signalled(number)

    free = [number for number in numbers if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    with handled(dict.fromkeys(free, handle)):
        yield


@contextmanager
def handled(handlers: dict[int, Handler]) -> Iterator[None]:
    """Handle signals in this way within the block. Only the main thread can; in any other nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep signals that end the process until the block is over: it starts something and notes it, or does neither."""
    held: list[int] = []
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: held.append(number))):
        yield
    if held:
        os.kill(os.getpid(), held[0])
