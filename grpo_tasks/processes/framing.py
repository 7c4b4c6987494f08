"""Messages on the two sockets between a parent and its worker process: frames on one, orders in plain lines on the other.

    frame = MAGIC | length of the payload in bytes | payload

Untrusted code in the worker can write to any of its file descriptors. MAGIC tells a frame from most such bytes; the parent checks
the payload as well.
"""

import os
import struct
from collections.abc import Callable

MAGIC = b"GRPO"
HEADER = struct.Struct("!4sQ")
"""MAGIC and the length of the payload in bytes."""
MAX_TEXT_CHARS = 4_000
"""Maximum length of any text in a reply."""
CHUNK_BYTES = 2**20
"""Bytes passed to one system call."""

EXIT_QUERY = "?"
"""Order to the supervisor: report how the worker ended, because its socket is closed. Any other order is the label of the call
that begins, or is empty when a call has ended."""
READY = b"."
"""The supervisor's reply to an order with a label: output from now on belongs to that call."""

# Kept here because code in the worker may replace os.read and os.write in its process, as gevent does.
_read: Callable[[int, int], bytes] = os.read
_write: Callable[[int, bytes], int] = os.write


def frame(payload: bytes) -> bytes:
    """The payload with its header."""
    return HEADER.pack(MAGIC, len(payload)) + payload


def write_frame(descriptor: int, payload: bytes) -> None:
    """Write a frame to a blocking file descriptor. Raises OSError when the other end is closed."""
    rest = frame(payload)
    while rest:
        rest = rest[_write(descriptor, rest[:CHUNK_BYTES]) :]


def read_frame(descriptor: int) -> bytes:
    """The payload of the next frame from a blocking file descriptor. Raises EOFError when the other end is closed."""
    _, size = HEADER.unpack(_read_exactly(descriptor, HEADER.size))
    return _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = _read(descriptor, min(size - len(received), CHUNK_BYTES))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
