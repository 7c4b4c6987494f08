"""A process that runs a user's functions, seen from the parent: start it, exchange requests and replies with a limit, end it.

    WorkerProcess.exchange  --JSON-->  MODULE (started by worker_supervisor.py, output to the log)  --JSON-->  reply | WorkerFault

Why a process: a function can hang, crash, exhaust the memory or patch libraries, and only ending its process stops that. An
exchange that does any of it costs the process and nothing else. What a fault means is decided by the caller.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.processes.link import MalformedReplyError, WorkerEndedError, WorkerLink

CLOSE_S = 10.0
"""Time limit for the supervisor to end everything that it started."""
MEMORY_SHARE = 0.8
"""Largest share of the machine's memory that a worker may use, whatever the configuration says: the trainer needs the rest."""

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """An exchange that ended the worker."""

    kind: Literal["hung", "memory", "ended", "broken"]
    detail: str
    """hung: empty. memory: empty. ended: how, such as `exit code 3`. broken: what it wrote. The same for the same cause."""
    measured: int = 0
    """hung: bytes of a reply that had arrived. memory: bytes that were in use."""


class WorkerProcess:
    """One child process.

    Args:
        module: module that is run in the child; its only argument is the descriptor of its socket.
        limit_bytes: memory in bytes that the child and everything that it starts may use.
        log: file that receives the beginning of what is printed during each exchange. None: the output is discarded.
        environment: variables that the child has besides those of this process.
    """

    def __init__(
        self, module: str, limit_bytes: float, *, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.module, self.log, self._environment = module, log, dict(environment or {})
        self.limit_bytes = int(min(limit_bytes, MEMORY_SHARE * psutil.virtual_memory().total))
        self._process: subprocess.Popen[bytes] | None = None
        self._link: WorkerLink | None = None

    @property
    def running(self) -> bool:
        """Whether the child was started and no fault has ended it."""
        return self._link is not None

    def start(self) -> None:
        """Start the child. It answers the first exchange when it has imported its module."""
        self._link = WorkerLink()
        data, control = self._link.worker_ends
        with data, control, (self.log or Path(os.devnull)).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.processes.worker_supervisor", self.module]
                + [str(number) for number in (data.fileno(), control.fileno(), self.limit_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(data.fileno(), control.fileno()),
                env=os.environ | self._environment | {PARENT: str(os.getpid())},
                # A session of its own, so that Ctrl-C in the terminal reaches the parent only.
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process and everything that it started."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            _wait(self._process)
        self._process = self._link = None

    def has_unread_bytes(self) -> bool:
        """Whether something in the child writes to the socket on its own, so that no later reply of it could be trusted."""
        assert self._link is not None
        return self._link.has_unread_bytes()

    def has_ended(self) -> bool:
        """Whether the child has ended between two exchanges."""
        assert self._link is not None
        return self._link.has_ended()

    def exchange(
        self, message: Mapping[str, Any], label: str, limit_s: float, max_bytes: int, read: Callable[[bytes, str], Reply]
    ) -> Reply | WorkerFault:
        """Send a request and read its reply. A fault ends the child.

        Args:
            message: the request, as JSON values.
            label: name of the exchange for the log.
            limit_s: time limit in seconds.
            max_bytes: maximum size of the reply.
            read: makes the reply of the payload and the id of the request; raises MalformedReplyError for any other payload.
        """
        assert self._link is not None
        # Random, so that a function cannot prepare a reply to a later request.
        request = secrets.token_hex(8)
        payload = json.dumps({"request": request, **message}).encode()
        deadline = time.monotonic() + limit_s
        self._link.begin_call(label, deadline)
        try:
            self._link.send(payload, deadline)
            reply = read(self._link.receive(max_bytes, deadline), request)
        except TimeoutError:
            fault = WorkerFault("hung", "", self._link.received)
        except MalformedReplyError as error:
            fault = WorkerFault("broken", str(error))
        except WorkerEndedError:
            fault = self._exit_fault()
        else:
            self._link.send_order("")
            return reply
        self.close()
        return fault

    def _exit_fault(self) -> WorkerFault:
        assert self._link is not None
        report = self._link.read_exit_report()
        if "memory" in report:
            return WorkerFault("memory", "", report["memory"])
        code = report.get("code")
        if code is None:
            return WorkerFault("ended", "it closed the socket")
        return WorkerFault("ended", f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}")


def _signal_name(number: int) -> str:
    """The name of a signal; the number of a real-time signal, which has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the supervisor to end. Kill it and all its descendants if it does not."""
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        with suppress(psutil.Error):
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    one.kill()
        process.kill()
        process.wait()
