"""A big JSONL file -> parts of rows.parquet, read by several processes side by side, in the order of the file.

file --cut at line ends--> Span --(serve_spans.py, another process)--> Part
"""

import itertools
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from grpo_tasks.data.jsonl import Span, line_spans
from grpo_tasks.data.parts import Part
from grpo_tasks.data.records import Columns
from grpo_tasks.data.seen import Seen
from grpo_tasks.processes.lifetime import PARENT
from schemas.errors import DataError

BIG = 32 * 2**20
"""Bytes of a file from which on the start of the processes is worth it."""
_MOST = 8


def num_processes() -> int:
    """One for each core this process may use, up to a number beyond which writing the table is what takes the time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, _MOST)


def read_parts_side_by_side(path: Path, columns: Columns, *, side: str, source: str, processes: int) -> Iterator[Part]:
    """`parts.read_parts` of `jsonl.read_jsonl`, but with so many processes; the file is no JSON array.

    Raises:
        DataError: the file is no UTF-8 text at all; a process was ended from outside.
    """
    setting = {"path": str(path), "side": side, "source": source, "columns": columns._asdict()}
    with ExitStack() as stack:
        readers = [stack.enter_context(_Reader(setting)) for _ in range(processes)]
        at_work = deque[_Reader]()
        for reader, span in zip(itertools.cycle(readers), line_spans(path), strict=False):
            part = reader.receive() if reader in at_work else None
            reader.send(span)
            at_work.append(reader)
            if part is not None:
                at_work.popleft()
                yield part
        for reader in at_work:
            yield reader.receive()


class _Reader:
    """One process, which reads a span at a time; a context manager that ends it."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self._place = setting["source"]
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.data.serve_spans", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {PARENT: str(os.getpid())},
            )
        self._connection = Connection(ours.detach())
        self._tell(setting)

    def send(self, span: Span) -> None:
        """Have the process read a span."""
        self._tell(span)

    def receive(self) -> Part:
        """What it read; waits."""
        try:
            seen = Seen(**json.loads(self._connection.recv_bytes()))
            table = pa.ipc.open_stream(self._connection.recv_bytes()).read_all()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        return Part(table, seen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _tell(self, message: object) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._ended() from error

    def _ended(self) -> DataError:
        return DataError(
            f"a process that read the file ended with code {self._process.wait()}",
            place=self._place,
            fix="its own words stand above, if it had any; run it again when it was killed, with more memory free",
        )
