"""The parent's side of the two sockets of a reward worker. Every wait has a deadline, whatever the other side does.

data      requests and answers; its other end is in the worker, where reward functions can write to it too
control   orders to the supervisor, and its report of how the worker ended; out of the reach of reward functions
"""

import json
import math
import select
import socket
import time
from contextlib import suppress
from typing import Any

from grpo_tasks.processes.framing import HEADER, HOW, MARK, READY, frame

REPORT_S = 5.0
"""Longest wait for the report of a worker that has ended: all that it started is ended first."""
READY_S = 0.5
"""Longest wait for the supervisor before a call; without it a little of what is printed is put to the call before."""
CHUNK_BYTES = 2**20


class MalformedReplyError(Exception):
    """Bytes that are no answer."""


class WorkerEndedError(Exception):
    """The worker or its supervisor is gone."""


class WorkerLink:
    """Two connected pairs of sockets; `far` are the ends for the other side, to be closed here once it has them."""

    def __init__(self) -> None:
        self.data, far_data = socket.socketpair()
        self.control, far_control = socket.socketpair()
        self.far = (far_data, far_control)
        for ours in (self.data, self.control):
            ours.setblocking(False)
        self.received = 0
        """Bytes of the present answer that have arrived."""

    def close(self) -> None:
        """Close both, also where a forked process holds copies: the supervisor then ends the worker."""
        for one in (self.data, self.control):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for one in (self.data, self.control, *self.far):
            one.close()

    def begin(self, label: str, deadline: float) -> None:
        """Tell the supervisor that a call begins; wait, not for long, until it has put away what was printed before."""
        self.order(label)
        select.select([self.control], [], [], max(0.0, min(READY_S, deadline - time.monotonic())))
        self._ended()

    def order(self, label: str) -> None:
        """Tell the supervisor that a call begins (its label), or that it has ended (empty)."""
        # A supervisor that is gone, or that does not read, shows when the answer is waited for.
        with suppress(OSError):
            self.control.send(f"{label}\n".encode())

    def send(self, payload: bytes, deadline: float) -> None:
        """Send a frame.

        Raises:
            TimeoutError: the worker did not read all of it by the deadline (of time.monotonic).
            WorkerEndedError: there is nobody to read it.
        """
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
        """The payload of the next frame, which must be all that has arrived.

        Raises:
            TimeoutError: it was not complete by the deadline (of time.monotonic).
            MalformedReplyError: the bytes are no frame, announce more than `max_bytes`, or more of them came than announced.
            WorkerEndedError: nobody is left to send it.
        """
        arrived, whole = bytearray(), math.inf
        while len(arrived) < whole:
            arrived += self._read(deadline)
            self.received = len(arrived)
            whole = _size(arrived, max_bytes)
        if len(arrived) > whole or self.stray():
            raise MalformedReplyError("wrote more than one answer")
        return bytes(arrived[HEADER.size :])

    def stray(self) -> bool:
        """Whether bytes wait that nobody asked for."""
        try:
            return bool(self.data.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def report(self) -> dict[str, Any]:
        """How the worker ended, as the supervisor says; empty when it says nothing."""
        self.order(HOW)
        text, deadline = b"", time.monotonic() + REPORT_S
        with suppress(OSError, ValueError):
            while not text.endswith(b"\n"):
                if not select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return {}
                part = self.control.recv(CHUNK_BYTES)
                if not part:
                    return {}
                text = (text + part).lstrip(READY)
            report: dict[str, Any] = json.loads(text)
            return report
        return {}

    def _read(self, deadline: float) -> bytes:
        while True:
            self._wait(select.POLLIN, deadline)
            try:
                part = self.data.recv(CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerEndedError from error
            if not part:
                raise WorkerEndedError
            return part

    def _wait(self, event: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        # Looked at before the socket: bytes that trickle in must not move the deadline.
        if left < 0:
            raise TimeoutError
        poll = select.poll()
        poll.register(self.data, event)
        poll.register(self.control, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(math.ceil(left * 1000))}
        if not ready:
            raise TimeoutError
        # The answer counts, even where the worker ended right after it.
        if self.data.fileno() in ready:
            return
        if self._ended():
            raise WorkerEndedError
        self._wait(event, deadline)

    def _ended(self) -> bool:
        """Whether the supervisor reports the end, or is gone; what else it says is put away."""
        try:
            while self.control.recv(1, socket.MSG_PEEK) == READY:
                self.control.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _size(arrived: bytearray, max_bytes: int) -> float:
    """Bytes of the whole frame; infinite until its header is there."""
    if not MARK.startswith(bytes(arrived[: len(MARK)])):
        raise MalformedReplyError("wrote bytes that are no answer")
    if len(arrived) < HEADER.size:
        return math.inf
    size = int(HEADER.unpack_from(arrived)[1])
    if size > max_bytes:
        raise MalformedReplyError(f"announced an answer of {size:,} bytes where {max_bytes:,} are the most it can have")
    return HEADER.size + size
