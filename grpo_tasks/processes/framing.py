"""Frames on the socket between a reward worker and its parent: a mark and the length, then the message.

The mark distinguishes an answer from bytes that a reward function wrote to a descriptor it should not know.
"""

import os
import struct
from collections.abc import Callable

MARK = b"GRPO"
HEADER = struct.Struct("!4sQ")
"""Mark and length of the payload in bytes."""
MAX_TEXT = 4_000
"""Longest text in an answer, in characters."""
HOW = "?"
"""Order to the supervisor to report how the worker ended. Every other order is the label of the call that begins, or empty."""
READY = b"."
"""The supervisor's answer to an order with a label: what is printed from now on belongs to that call."""

# Bound at import, because a reward function may replace os.read and os.write in its process (gevent does).
_read: Callable[[int, int], bytes] = os.read
_write: Callable[[int, bytes], int] = os.write


def frame(payload: bytes) -> bytes:
    """The payload with its header."""
    return HEADER.pack(MARK, len(payload)) + payload


def write_frame(descriptor: int, payload: bytes) -> None:
    """Write a frame to a blocking descriptor."""
    rest = frame(payload)
    while rest:
        rest = rest[_write(descriptor, rest[: 2**20]) :]


def read_frame(descriptor: int) -> bytes:
    """The payload of the next frame from a blocking descriptor.

    Raises:
        EOFError: the other side is closed.
    """
    _, size = HEADER.unpack(_read_exactly(descriptor, HEADER.size))
    return _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = _read(descriptor, min(size - len(received), 2**20))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
