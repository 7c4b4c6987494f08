"""The worker's end of its socket: `answer_requests` is the main function of a process that runs a user's code.

Requests and replies are JSON in frames on a socket of their own, so nothing that the code prints can be taken for a reply:

    frame = MAGIC | length of the payload in bytes | payload

A hang is ended from outside. The code can reach everything in this process, so the parent checks every reply (worker_process.py).
"""

import asyncio
import ctypes
import inspect
import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from grpo_tasks.processes.lifetime import die_with_parent
from schemas.errors import UserError
from schemas.secret import hide_output

MAGIC = b"GRPO"
HEADER = struct.Struct("!4sQ")
"""MAGIC and the length of the payload in bytes."""
CHUNK_BYTES = 2**20
"""Bytes passed to one system call."""

# Kept here because a user's code may replace them in their modules, as gevent does.
_dumps, _loads = json.dumps, json.loads
_read: Callable[[int, int], bytes] = os.read
_write: Callable[[int, bytes], int] = os.write

# One loop for all calls, as in TRL: a client that a function opened in one call still works in the next.
_LOOP = asyncio.Runner()


def awaited(result: Any) -> Any:
    """What a function of the user's returned; the result of the coroutine if it is async."""

    async def wait() -> Any:
        return await result

    return _LOOP.run(wait()) if inspect.isawaitable(result) else result


def answer_requests(handlers: Mapping[str, Callable[[dict[str, Any]], Mapping[str, Any]]]) -> None:
    """Answer each request by the handler of its kind, until the parent closes the socket; a `UserError` is answered too."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # Line by line, so that output from before a hang or a crash is not lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    hide_output()
    with suppress(EOFError):
        while True:
            _, size = HEADER.unpack(_read_exactly(descriptor, HEADER.size))
            request = _loads(_read_exactly(descriptor, size))
            try:
                reply = handlers[request["what"]](request)
            except UserError as error:
                reply = {"error": error.to_json()}
            # Output of C code is still in the buffer of the C library.
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
                ctypes.CDLL(None).fflush(None)
            # A completion can hold lone surrogates. UTF-8 has no form for them, and the parent refuses their escapes.
            text = _dumps({"request": request["request"], **reply}, ensure_ascii=False)
            write_frame(descriptor, text.encode(errors="replace"))


def frame(payload: bytes) -> bytes:
    """The payload with its header."""
    return HEADER.pack(MAGIC, len(payload)) + payload


def write_frame(descriptor: int, payload: bytes) -> None:
    """Write a frame to a blocking file descriptor. Raises OSError when the other end is closed."""
    rest = frame(payload)
    while rest:
        rest = rest[_write(descriptor, rest[:CHUNK_BYTES]) :]


def _read_exactly(descriptor: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = _read(descriptor, min(size - len(received), CHUNK_BYTES))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
