"""Records of a source -> parts of rows.parquet, in order."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from grpo_tasks.data.raw_table import raw_table
from grpo_tasks.data.records import Columns, Record, Row, read_row
from grpo_tasks.data.seen import Seen

_ROWS = 20_000


class Part(NamedTuple):
    """Some rows of a source."""

    table: pa.Table
    """schemas/tables.py Raw."""
    seen: Seen


def read_parts(records: Iterable[Record], columns: Columns, *, side: str, source: str) -> Iterator[Part]:
    """Read rows out of records, so many at a time that memory stays small."""
    rows, lines, seen = list[Row](), list[int](), Seen()
    for record in records:
        seen.note(record, columns)
        rows.append(read_row(record, columns))
        lines.append(record.line)
        if len(rows) >= _ROWS:
            yield Part(raw_table(rows, lines, side=side, source=source), seen)
            rows, lines, seen = [], [], Seen()
    if rows:
        yield Part(raw_table(rows, lines, side=side, source=source), seen)


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """Rows hold no cycles; searching a million of them for some took a fifth of the reading time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
