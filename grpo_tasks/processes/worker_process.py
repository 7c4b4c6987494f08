"""A process that runs a user's functions, seen from the parent: start it, exchange requests and replies with a limit, end it.

Why a process: a function can hang, crash, exhaust the memory or patch libraries, and only ending its process stops that. The
caller says what a reply looks like, and what a fault means.

Two sockets lead to it. Deadlines are values of time.monotonic(); every wait has one, whatever the other side does.

    data     requests and replies. The other end is in the worker, where untrusted code can write to it too.
    control  orders to the supervisor, and its report of how the worker ended. Untrusted code cannot reach it.
"""

import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from grpo_tasks.processes.lifetime import start_module
from grpo_tasks.processes.worker_main import CHUNK_BYTES, HEADER, MAGIC, frame
from grpo_tasks.processes.worker_supervisor import EXIT_QUERY, READY
from schemas.errors import UserError

CLOSE_S = 10.0
"""Time limit for the supervisor to end everything that it started."""
REPORT_LIMIT_S = 5.0
"""Time limit for the report of how a worker ended. Before that, the supervisor kills everything the worker started."""
READY_LIMIT_S = 0.5
"""Time limit for the supervisor to acknowledge a call. Without it, output may be attributed to the call before."""
MEMORY_SHARE = 0.8
"""Largest share of the machine's memory that a worker may use, whatever the configuration says: the trainer needs the rest."""


class MalformedReplyError(Exception):
    """The bytes that arrived are not a reply."""


class WorkerEndedError(Exception):
    """The worker or its supervisor has ended."""


def _read_error(text: Any) -> UserError:
    try:
        return UserError.from_json(text)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no error of ours") from error


ReportedError = Annotated[UserError, PlainValidator(_read_error)]
"""Field of a reply: the error that a handler of the worker raised."""


class Reply(BaseModel):
    """The shape of a reply. A user's code runs in the process that replies, so nothing else is accepted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    request: str

    def _check(self, message: Mapping[str, Any]) -> None:
        """Raise MalformedReplyError if this cannot be the reply to this message."""

    @classmethod
    def read(cls, payload: bytes, request: str, message: Mapping[str, Any]) -> Self:
        """The reply in a payload; raises MalformedReplyError unless it has this shape and belongs to this request."""
        try:
            reply = cls.model_validate_json(payload)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            said = f"{where + ': ' if where else ''}{first['msg']}"
            raise MalformedReplyError(f"sent a reply of the wrong shape ({said})") from None
        if reply.request != request:
            raise MalformedReplyError("sent a reply to another request")
        reply._check(message)
        return reply


Shape = TypeVar("Shape", bound=Reply)


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """An exchange that ended the worker."""

    kind: Literal["hung", "memory", "ended", "broken"]
    detail: str = ""
    """ended: how, such as `exit code 3`. broken: what it wrote. The same for the same cause."""
    measured: int = 0
    """hung: bytes of a reply that had arrived. memory: bytes that were in use."""

    def reason(self, limit_s: float, memory: str) -> str:
        """The end of a sentence that begins with what was called; the same bytes when a run is repeated: no times, no pids."""
        return {
            "hung": f"did not return within {limit_s:g} s",
            "memory": f"used more than {memory} of memory",
            "broken": f"{self.detail} on the socket of its worker process",
            "ended": f"ended its worker process ({self.detail})",
        }[self.kind]


class WorkerProcess:
    """One child process that runs `module`; its only argument is the descriptor of its socket (worker_main.py).

    `limit_bytes` is the memory that the child and everything that it starts may use, `environment` what variables it has besides
    those of this process. `log` receives the beginning of what is printed during each exchange; None: it is discarded.
    """

    def __init__(
        self, module: str, limit_bytes: float, *, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.module, self.log, self._environment = module, log, dict(environment or {})
        self.limit_bytes = int(min(limit_bytes, MEMORY_SHARE * psutil.virtual_memory().total))
        self._process: subprocess.Popen[bytes] | None = None
        self.link: WorkerLink | None = None
        """None: the child was not started, or a fault has ended it."""

    def start(self) -> None:
        """Start the child. It answers the first exchange when it has imported its module."""
        self.link = WorkerLink()
        data, control = self.link.worker_ends
        with data, control, (self.log or Path(os.devnull)).open("ab") as log:
            descriptors = (data.fileno(), control.fileno())
            self._process = start_module(
                "grpo_tasks.processes.worker_supervisor",
                *(self.module, *descriptors, self.limit_bytes),
                output=log,
                environment=os.environ | self._environment,
                pass_fds=descriptors,
                own_session=True,
            )

    def close(self) -> None:
        """End the process and everything that it started."""
        if self.link is not None:
            self.link.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                # The supervisor hangs: its descendants first, which nobody would find after it.
                with suppress(psutil.Error):
                    for one in psutil.Process(self._process.pid).children(recursive=True):
                        with suppress(psutil.Error):
                            one.kill()
                self._process.kill()
                self._process.wait()
        self._process = self.link = None

    def exchange(
        self, what: str, message: Mapping[str, Any], shape: type[Shape], *, limit_s: float, max_bytes: int, label: str = ""
    ) -> Shape | WorkerFault:
        """Send a request and read its reply. A fault ends the child.

        `what` names the handler in the child, `message` holds the rest as JSON values, `label` is the name for the log.
        """
        assert self.link is not None
        # Random, so that a function cannot prepare a reply to a later request.
        request = secrets.token_hex(8)
        payload = json.dumps({"request": request, "what": what, **message}).encode()
        deadline = time.monotonic() + limit_s
        self.link.begin_call(label or what, deadline)
        try:
            self.link.send(payload, deadline)
            reply = shape.read(self.link.receive(max_bytes, deadline), request, message)
        except TimeoutError:
            fault = WorkerFault("hung", measured=self.link.received)
        except MalformedReplyError as error:
            fault = WorkerFault("broken", str(error))
        except WorkerEndedError:
            fault = _exit_fault(self.link.read_exit_report())
        else:
            self.link.send_order("")
            return reply
        self.close()
        return fault


def _exit_fault(report: Mapping[str, Any]) -> WorkerFault:
    if "memory" in report:
        return WorkerFault("memory", measured=report["memory"])
    code = report.get("code")
    if code is None:
        return WorkerFault("ended", "it closed the socket")
    if code >= 0:
        return WorkerFault("ended", f"exit code {code}")
    # A real-time signal has no name.
    names = {number.value: number.name for number in signal.Signals}
    return WorkerFault("ended", f"signal {names.get(-code, -code)}")


class WorkerLink:
    """Two connected pairs of sockets. Close `worker_ends` once the child has inherited them: as long as any copy is open, the end
    of the worker does not show as an end of file."""

    def __init__(self) -> None:
        self.data, worker_data = socket.socketpair()
        self.control, worker_control = socket.socketpair()
        self.worker_ends = (worker_data, worker_control)
        for ours in (self.data, self.control):
            ours.setblocking(False)
        self.received = 0
        """Bytes of the current reply that have arrived."""

    def close(self) -> None:
        """Close both sockets; the supervisor then ends the worker."""
        for ours in (self.data, self.control):
            # close() alone does not end the connection while a process forked from this one holds a copy of the socket.
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        for one in (self.data, self.control, *self.worker_ends):
            one.close()

    def begin_call(self, label: str, deadline: float) -> None:
        """Tell the supervisor that a call begins, and wait a moment until it has assigned earlier output to the last one."""
        self.send_order(label)
        self._control_ready(min(time.monotonic() + READY_LIMIT_S, deadline))
        self.has_ended()

    def send_order(self, order: str) -> None:
        """Send an order (worker_supervisor.py) to the supervisor; never raises."""
        # If the supervisor has ended or does not read, the wait for the reply finds out.
        with suppress(OSError):
            self.control.send(f"{order}\n".encode())

    def send(self, payload: bytes, deadline: float) -> None:
        """Send a frame to the worker; raises TimeoutError or WorkerEndedError if it did not read all of it."""
        self.received = 0
        rest = memoryview(frame(payload))
        while rest:
            self._wait(select.POLLOUT, deadline)
            try:
                rest = rest[self.data.send(rest[:CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerEndedError from error

    def receive(self, max_bytes: int, deadline: float) -> bytes:
        """The payload of the next frame, which nothing may follow.

        `TimeoutError` where it is not complete by the deadline, `WorkerEndedError` where the worker has ended,
        `MalformedReplyError` where the bytes are no frame, announce more than `max_bytes`, or continue after it.
        """
        received, frame_size = bytearray(), math.inf
        while len(received) < frame_size:
            self._wait(select.POLLIN, deadline)
            try:
                chunk = self.data.recv(CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerEndedError from error
            if not chunk:
                raise WorkerEndedError
            received += chunk
            self.received = len(received)
            frame_size = _frame_size(received, max_bytes)
        if len(received) > frame_size or self.has_unread_bytes():
            raise MalformedReplyError("wrote more than one reply")
        return bytes(received[HEADER.size :])

    def has_unread_bytes(self) -> bool:
        """Whether code in the worker writes to the socket on its own: no later reply of it could be trusted."""
        try:
            return bool(self.data.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def has_ended(self) -> bool:
        """Whether the supervisor reports an end or has ended itself. Pending READY bytes are consumed."""
        try:
            while self.control.recv(1, socket.MSG_PEEK) == READY:
                self.control.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def read_exit_report(self) -> dict[str, Any]:
        """How the worker ended, as its supervisor reports; empty when no report comes within REPORT_LIMIT_S."""
        self.send_order(EXIT_QUERY)
        text, deadline = b"", time.monotonic() + REPORT_LIMIT_S
        with suppress(OSError, ValueError):
            # Wait first: recv on a non-blocking socket raises at once when nothing has arrived.
            while self._control_ready(deadline) and (chunk := self.control.recv(CHUNK_BYTES)):
                text = (text + chunk).lstrip(READY)
                if text.endswith(b"\n"):
                    report: dict[str, Any] = json.loads(text)
                    return report
        return {}

    def _wait(self, event: int, deadline: float) -> None:
        while True:
            remaining = deadline - time.monotonic()
            # Checked before the socket: a worker that sends one byte at a time must not postpone the deadline.
            if remaining < 0:
                raise TimeoutError
            # The control socket is watched too: the supervisor reports there when the worker has ended although another process
            # still holds a copy of its data socket.
            poll = select.poll()
            poll.register(self.data, event)
            poll.register(self.control, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(math.ceil(remaining * 1000))}
            if not ready:
                raise TimeoutError
            # A reply counts even if the worker ended right after it, so the data socket comes first.
            if self.data.fileno() in ready:
                return
            if self.has_ended():
                raise WorkerEndedError

    def _control_ready(self, deadline: float) -> bool:
        # poll instead of select, which fails for file descriptors above 1023.
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return bool(poll.poll(math.ceil(max(0.0, deadline - time.monotonic()) * 1000)))


def _frame_size(received: bytearray, max_bytes: int) -> float:
    """Size of the frame in bytes, header included; infinite until the header is complete."""
    if not MAGIC.startswith(bytes(received[: len(MAGIC)])):
        raise MalformedReplyError("wrote bytes that are no reply")
    if len(received) < HEADER.size:
        return math.inf
    size = int(HEADER.unpack_from(received)[1])
    if size > max_bytes:
        raise MalformedReplyError(f"announced a reply of {size:,} bytes where {max_bytes:,} is the maximum")
    return HEADER.size + size
