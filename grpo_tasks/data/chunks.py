"""Records of a source -> chunks of rows.parquet, in order. A big JSONL file is read by several processes.

Memory holds a few chunks, never all rows as Python objects.
"""

import difflib
import gc
import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pyarrow as pa

from grpo_tasks.data.jsonl import Span, line_spans, read_span
from grpo_tasks.data.records import OPTIONAL, PREFERRED, Columns, RawRow, Record, known_form, read_row
from grpo_tasks.processes.lifetime import PARENT, die_with_parent
from schemas.config.data import template_columns
from schemas.errors import DataError

PARALLEL_FROM_BYTES = 32 * 2**20
"""Size of a file from which starting worker processes saves time."""
_MAX_WORKERS = 8
_CHUNK_ROWS = 20_000

_TEXT = pa.large_string()
_MESSAGE = pa.struct([("role", _TEXT), ("content", _TEXT)])
_FAULT = pa.struct([("rule", _TEXT), ("value", _TEXT)])
RAW_ARROW = pa.schema(
    {
        "split": _TEXT,
        "source": _TEXT,
        "line": pa.int64(),
        "question": _TEXT,
        "messages": pa.large_list(_MESSAGE),
        "answer": _TEXT,
        "extra": _TEXT,
        "faults": pa.large_list(_FAULT),
        "text": _TEXT,
        "answers": pa.large_list(_TEXT),
        "task": _TEXT,
    }
)
"""schemas/tables.py Raw as an Arrow schema."""


@dataclass(slots=True)
class ScanSummary:
    """Counts over the rows of a source or of a chunk, and the columns that were found."""

    rows: int = 0
    readable: int = 0
    with_prompt: int = 0
    with_answer: int = 0
    with_task: int = 0
    of_form: int = 0
    """Rows that ask by a well-known form."""
    form: str = ""
    """That of the first such row."""
    columns: list[str] = field(default_factory=list)
    """Of the first readable row."""

    def count(self, record: Record, columns: Columns) -> None:
        """Count one row."""
        self.rows += 1
        fields = record.fields
        if fields is None:
            return
        if not self.readable:
            self.columns = list(dict.fromkeys(str(key) for key in fields))
        self.readable += 1
        if columns.template is None:
            asked = columns.prompt in fields or columns.question in fields
        else:
            asked = all(name in fields or name.endswith(OPTIONAL) for name in template_columns(columns.template))
        self.with_answer += columns.answer in fields
        self.with_task += columns.task in fields
        if not asked and (form := known_form(fields, columns)):
            self.of_form += 1
            self.form = self.form or form
            # Supervised data has no answer column: the assistant's last message is the answer, or Alpaca's output.
            self.with_answer += columns.answer not in fields and columns.answer is not None and form != PREFERRED
            asked = True
        self.with_prompt += asked

    def add(self, later: "ScanSummary") -> None:
        """Add the counts of rows that come after these."""
        self.columns = self.columns if self.readable else later.columns
        self.form = self.form or later.form
        for name in ("rows", "readable", "with_prompt", "with_answer", "with_task", "of_form"):
            setattr(self, name, getattr(self, name) + getattr(later, name))

    def check(self, place: str, columns: Columns) -> None:
        """Raise `DataError` when the source has no rows, no readable row, or no row with a prompt or the task column."""
        if not self.rows:
            raise DataError("the source has no rows", place=place, fix="add rows, or remove the source from the config")
        if not self.readable:
            raise DataError("no line of the file can be read", place=place, fix="check the file, or set the source's format")
        if not self.with_prompt and columns.template is not None:
            missing = next((name for name in template_columns(columns.template) if name not in self.columns), columns.template)
            raise missing_column(place, self.columns, "question", missing)
        if not self.with_prompt:
            raise missing_column(place, self.columns, "question_column", columns.question, columns.prompt)
        if columns.task is not None and not self.with_task:
            raise missing_column(place, self.columns, "task_column", columns.task)


def missing_column(place: str, columns: Sequence[str], setting: str, *wanted: str, otherwise: str = "") -> DataError:
    """The error that no row of a source has any of the wanted columns, which a setting of the section data names."""
    by_lower_case = {name.lower(): name for name in columns}
    near = [by_lower_case[match] for name in wanted for match in difflib.get_close_matches(name.lower(), by_lower_case, n=1)]
    fix = f"set data.{setting}: {near[0]}" if near and setting != "question" else f"set data.{setting} to one of them"
    return DataError(
        f"no row has a column {' or '.join(wanted)}; the columns are: {', '.join(columns)}",
        place=place,
        fix=f"{fix}{otherwise}",
    )


class Chunk(NamedTuple):
    """Consecutive rows of a source."""

    table: pa.Table  # RAW_ARROW
    summary: ScanSummary


def read_chunks(records: Iterable[Record], columns: Columns, *, split: str, source: str) -> Iterator[Chunk]:
    """Chunks of at most _CHUNK_ROWS rows."""
    rows, lines, summary = list[RawRow](), list[int](), ScanSummary()
    for read in records:
        renamed = columns.rename and read.fields is not None
        record = read._replace(fields=columns.renamed(read.fields or {})) if renamed else read
        summary.count(record, columns)
        rows.append(read_row(record, columns))
        lines.append(record.line)
        if len(rows) >= _CHUNK_ROWS:
            yield Chunk(raw_table(rows, lines, split=split, source=source), summary)
            rows, lines, summary = [], [], ScanSummary()
    if rows:
        yield Chunk(raw_table(rows, lines, split=split, source=source), summary)


def num_workers() -> int:
    """One for each core that this process may use, at most _MAX_WORKERS: beyond that, writing the table takes the time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, _MAX_WORKERS)


def read_chunks_in_parallel(path: Path, columns: Columns, *, split: str, source: str, workers: int) -> Iterator[Chunk]:
    """What `read_chunks` makes of `jsonl.read_jsonl`, in the same order, read by `workers` processes; not for JSON arrays.

    `DataError` where the file is not UTF-8 text, or a worker was killed.
    """
    spawn = multiprocessing.get_context("spawn")
    with _spawn_environment():
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(os.getpid(),))
    pending = deque[Future[list[Chunk]]]()
    try:
        for span in line_spans(path):
            # Two spans per worker keep every worker busy; more would only fill the memory with chunks that wait for the writer.
            if len(pending) >= 2 * workers:
                yield from pending.popleft().result()
            with _spawn_environment():
                pending.append(pool.submit(_read_span_chunks, path, span, columns, split, source))
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that was reading the file was killed",
            place=source,
            fix="run it again with more free memory; if it printed an error of its own, see the output above",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def raw_table(rows: Sequence[RawRow], lines: Sequence[int], *, split: str, source: str) -> pa.Table:
    """RAW_ARROW of rows of one source."""
    questions, roles, contents, answer, extras, faults, texts, answers, tasks = zip(*rows, strict=True)
    # None instead of an empty list for the many rows without a fault
    fault_dicts = [[fault._asdict() for fault in found] if found else None for found in faults]
    values = {"split": [split] * len(rows), "source": [source] * len(rows), "line": lines, "question": questions}
    values |= {"answer": answer, "extra": extras, "faults": fault_dicts, "text": texts, "answers": answers, "task": tasks}
    columns = {name: pa.array(column, RAW_ARROW.field(name).type) for name, column in values.items()}
    # Built from flat columns and offsets: converting a list of dicts per row would cost five times as much.
    offsets = pa.array(itertools.accumulate((len(row) if row else 0 for row in roles), initial=0), pa.int64())
    flat = [pa.array(itertools.chain.from_iterable(filter(None, column)), _TEXT) for column in (roles, contents)]
    absent, kind = pa.array([row is None for row in roles]), RAW_ARROW.field("messages").type
    messages = pa.StructArray.from_arrays(flat, fields=list(_MESSAGE))
    columns["messages"] = pa.LargeListArray.from_arrays(offsets, messages, type=kind, mask=absent)
    return pa.table(columns, schema=RAW_ARROW)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Rows contain no reference cycles; searching a million of them for cycles took a fifth of the reading time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _start_worker(parent: int) -> None:
    # The variable may still name the parent of the parent; die_with_parent would then end this process at once.
    os.environ[PARENT] = str(parent)
    die_with_parent()
    # Ctrl-C reaches the whole process group; the parent shuts its workers down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # see no_garbage_collection


def _read_span_chunks(path: Path, span: Span, columns: Columns, split: str, source: str) -> list[Chunk]:
    records = read_span(path, span, answer_column=columns.original(columns.answer))
    return list(read_chunks(records, columns, split=split, source=source))


@contextmanager
def _spawn_environment() -> Iterator[None]:
    """How a worker starts: without the working directory on its path, and without the program that started this one.

    `spawn` imports the parent's main module in every worker. Workers do not need it; it may take seconds (Prefect), and a user's
    script without an `if __name__ == "__main__"` guard would run again. The executor starts helper processes when it is made and
    workers inside `submit`.
    """
    main, safe_path = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH")
    sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if safe_path is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe_path
