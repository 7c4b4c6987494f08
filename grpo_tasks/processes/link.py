"""The parent's end of the two sockets of a worker process. Every wait has a deadline, whatever the other side does.

    data     requests and replies. The other end is in the worker, where untrusted code can write to it too.
    control  orders to the supervisor, and its report of how the worker ended. Untrusted code cannot reach it.

Deadlines are values of time.monotonic().
"""

import json
import math
import select
import socket
import time
from contextlib import suppress
from typing import Any

from grpo_tasks.processes.framing import CHUNK_BYTES, EXIT_QUERY, HEADER, MAGIC, READY, frame

REPORT_LIMIT_S = 5.0
"""Time limit in seconds for the report of how a worker ended. Before that, the supervisor kills everything the worker started."""
READY_LIMIT_S = 0.5
"""Time limit in seconds for the supervisor to acknowledge a call. Without it, output may be attributed to the call before."""


class MalformedReplyError(Exception):
    """The bytes that arrived are not a reply."""


class WorkerEndedError(Exception):
    """The worker or its supervisor has ended."""


class WorkerLink:
    """Two connected pairs of sockets.

    `worker_ends` are the data and control sockets for the other side. Close them here once the child process has inherited them:
    as long as any copy is open, the end of the worker does not show as an end of file.
    """

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
        """Tell the supervisor that a call begins, and wait a moment until it has assigned earlier output to the call before."""
        self.send_order(label)
        self._control_ready(min(time.monotonic() + READY_LIMIT_S, deadline))
        self._ended()

    def send_order(self, order: str) -> None:
        """Send an order to the supervisor: a call begins (its label), has ended (empty), or EXIT_QUERY. Never raises."""
        # If the supervisor has ended or does not read, the wait for the reply finds out.
        with suppress(OSError):
            self.control.send(f"{order}\n".encode())

    def send(self, payload: bytes, deadline: float) -> None:
        """Send a frame to the worker.

        Raises:
            TimeoutError: the worker did not read all of it by the deadline.
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
        """The payload of the next frame. Nothing may follow the frame.

        Args:
            max_bytes: maximum size of the payload.
            deadline: when to give up.

        Raises:
            TimeoutError: the frame was not complete by the deadline.
            MalformedReplyError: the bytes are no frame, announce more than `max_bytes`, or continue after the frame.
            WorkerEndedError: the worker has ended.
        """
        received, frame_size = bytearray(), math.inf
        while len(received) < frame_size:
            received += self._read(deadline)
            self.received = len(received)
            frame_size = _frame_size(received, max_bytes)
        if len(received) > frame_size or self.has_unread_bytes():
            raise MalformedReplyError("wrote more than one reply")
        return bytes(received[HEADER.size :])

    def has_unread_bytes(self) -> bool:
        """Whether bytes have arrived that belong to no request."""
        try:
            return bool(self.data.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def has_ended(self) -> bool:
        """Whether the worker or its supervisor has ended, although nothing was asked of it."""
        return self._ended()

    def read_exit_report(self) -> dict[str, Any]:
        """How the worker ended, as its supervisor reports; empty when no report comes within REPORT_LIMIT_S."""
        self.send_order(EXIT_QUERY)
        text, deadline = b"", time.monotonic() + REPORT_LIMIT_S
        with suppress(OSError, ValueError):
            while not text.endswith(b"\n"):
                # Wait first: recv on a non-blocking socket raises at once when nothing has arrived.
                if not self._control_ready(deadline):
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
        """Wait until the data socket is ready for `event` (POLLIN or POLLOUT)."""
        remaining = deadline - time.monotonic()
        # Checked before the socket: a worker that sends one byte at a time must not postpone the deadline.
        if remaining < 0:
            raise TimeoutError
        # The control socket is watched too: the supervisor reports there when the worker has ended although another process still
        # holds a copy of its data socket.
        poll = select.poll()
        poll.register(self.data, event)
        poll.register(self.control, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(math.ceil(remaining * 1000))}
        if not ready:
            raise TimeoutError
        # A reply counts even if the worker ended right after it, so the data socket comes first.
        if self.data.fileno() in ready:
            return
        if self._ended():
            raise WorkerEndedError
        self._wait(event, deadline)

    def _control_ready(self, deadline: float) -> bool:
        """Wait until the control socket can be read."""
        # poll instead of select, which fails for file descriptors above 1023.
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return bool(poll.poll(math.ceil(max(0.0, deadline - time.monotonic()) * 1000)))

    def _ended(self) -> bool:
        """Whether the supervisor reports an end or has ended itself. Pending READY bytes are consumed."""
        try:
            while self.control.recv(1, socket.MSG_PEEK) == READY:
                self.control.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


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
