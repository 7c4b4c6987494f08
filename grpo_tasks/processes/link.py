"""The parent's side of the two sockets of a reward worker. Every wait has a deadline, whatever the other side does.

data      requests and answers; its other end is in the worker, where a reward function can write to it too
control   orders to the supervisor, and its report of how the worker ended; reward functions cannot reach it
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
"""Longest wait for the report of a worker that has ended: the supervisor first ends everything the worker started."""
READY_S = 0.5
"""Longest wait for the supervisor before a call. Without the wait, lines printed early could count for the call before."""
CHUNK_BYTES = 2**20


class GarbledError(Exception):
    """The worker sent bytes that are not an answer."""


class WorkerEndedError(Exception):
    """The worker or its supervisor has ended."""


class Link:
    """Two pairs of connected sockets; `far` are the ends for the other side, to be closed here once that side has them."""

    def __init__(self) -> None:
        self.data, far_data = socket.socketpair()
        self.control, far_control = socket.socketpair()
        self.far = (far_data, far_control)
        for ours in (self.data, self.control):
            ours.setblocking(False)
        self.received = 0
        """Bytes of the current answer that have arrived."""

    def close(self) -> None:
        """Close both sockets, even if a forked process holds copies of them; the supervisor then ends the worker."""
        for sock in (self.data, self.control):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for sock in (self.data, self.control, *self.far):
            sock.close()

    def begin(self, label: str, deadline: float) -> None:
        """Report to the supervisor that a call begins; wait shortly until it has dealt with what was printed before."""
        self.order(label)
        select.select([self.control], [], [], max(0.0, min(READY_S, deadline - time.monotonic())))
        # Removes the READY that has arrived.
        self._has_ended()

    def order(self, label: str) -> None:
        """Report to the supervisor that a call begins (its label) or has ended (empty)."""
        # If the supervisor has ended or does not read, the wait for the answer finds out.
        with suppress(OSError):
            self.control.send(f"{label}\n".encode())

    def send(self, payload: bytes, deadline: float) -> None:
        """Send a frame.

        Raises:
            TimeoutError: the worker did not read all of it by the deadline (of time.monotonic).
            WorkerEndedError: the worker has ended.
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
        """The payload of the next frame, after which nothing more may have arrived.

        Raises:
            TimeoutError: it was not complete by the deadline (of time.monotonic).
            GarbledError: the bytes are not a frame, announce more than `max_bytes`, or are more than announced.
            WorkerEndedError: the worker has ended without an answer.
        """
        arrived, frame_bytes = bytearray(), math.inf
        while len(arrived) < frame_bytes:
            arrived += self._read(deadline)
            self.received = len(arrived)
            frame_bytes = _frame_bytes(arrived, max_bytes)
        if len(arrived) > frame_bytes or self.stray():
            raise GarbledError("wrote more than one answer")
        return bytes(arrived[HEADER.size :])

    def stray(self) -> bool:
        """Whether bytes have arrived that answer no request."""
        try:
            return bool(self.data.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def report(self) -> dict[str, Any]:
        """How the worker ended, as reported by the supervisor; empty if it reports nothing."""
        self.order(HOW)
        text, deadline = b"", time.monotonic() + REPORT_S
        with suppress(OSError, ValueError):
            while not text.endswith(b"\n"):
                if not select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return {}
                chunk = self.control.recv(CHUNK_BYTES)
                if not chunk:
                    return {}
                text = (text + chunk).lstrip(READY)
            report: dict[str, Any] = json.loads(text)
            return report
        return {}

    def _read(self, deadline: float) -> bytes:
        while True:
            self._wait(select.POLLIN, deadline)
            try:
                chunk = self.data.recv(CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerEndedError from error
            if not chunk:
                raise WorkerEndedError
            return chunk

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the data socket is ready for `event`, or has something to read from an ended worker."""
        left = deadline - time.monotonic()
        # Checked before the socket: bytes that trickle in must not extend the deadline.
        if left < 0:
            raise TimeoutError
        poll = select.poll()
        poll.register(self.data, event)
        poll.register(self.control, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(math.ceil(left * 1000))}
        if not ready:
            raise TimeoutError
        # An answer counts even if the worker ended right after it.
        if self.data.fileno() in ready:
            return
        if self._has_ended():
            raise WorkerEndedError
        self._wait(event, deadline)

    def _has_ended(self) -> bool:
        """Whether the supervisor reports the end of the worker, or has ended itself; every READY before that is removed."""
        try:
            while self.control.recv(1, socket.MSG_PEEK) == READY:
                self.control.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _frame_bytes(arrived: bytearray, max_bytes: int) -> float:
    """Length of the frame with its header; infinite until the header has arrived."""
    if not MARK.startswith(bytes(arrived[: len(MARK)])):
        raise GarbledError("wrote bytes that are not an answer")
    if len(arrived) < HEADER.size:
        return math.inf
    size = int(HEADER.unpack_from(arrived)[1])
    if size > max_bytes:
        raise GarbledError(f"announced an answer of {size:,} bytes, but an answer has at most {max_bytes:,}")
    return HEADER.size + size
