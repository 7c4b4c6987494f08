"""What goes over the socket between worker.py and serve.py: one frame a message, its mark and length in front.

The mark tells an answer from bytes that a reward function wrote to a descriptor it should not know.
"""

import os
import struct
from collections.abc import Callable

MARK = b"GRPO"
HEADER = struct.Struct("!4sQ")
"""Mark and length of the payload in bytes."""
MAX_TEXT = 4_000
"""Most characters of any text in an answer."""
HOW = "?"
"""Order to the supervisor: the worker's socket is closed, say how it ended. Any other names the call that begins, or is empty."""
READY = b"."
"""The supervisor's answer to an order that names a call: what is printed from now on belongs to it."""

# Held here because a reward may replace os.read and os.write in its process (gevent does).
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
    """The next frame's payload from a blocking descriptor; EOFError when the other side is closed."""
    _, size = HEADER.unpack(_read_exactly(descriptor, HEADER.size))
    return _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = _read(descriptor, min(size - len(parts), 2**20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
