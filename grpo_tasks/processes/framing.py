"""Messages on the two sockets between a parent and its worker process: frames on one, orders in plain lines on the other.

    frame = MAGIC | length of the payload in bytes | payload

Untrusted code in the worker can write to any of its file descriptors. MAGIC tells a frame from most such bytes; the parent checks
the payload as well.
"""

import struct

MAGIC = b"GRPO"
HEADER = struct.Struct("!4sQ")
"""MAGIC and the length of the payload in bytes."""
CHUNK_BYTES = 2**20
"""Bytes passed to one system call."""

EXIT_QUERY = "?"
"""Order to the supervisor: report how the worker ended, because its socket is closed. Any other order is the label of the call
that begins, or is empty when a call has ended."""
READY = b"."
"""The supervisor's reply to an order with a label: output from now on belongs to that call."""


def frame(payload: bytes) -> bytes:
    """The payload with its header."""
    return HEADER.pack(MAGIC, len(payload)) + payload
