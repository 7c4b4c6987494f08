"""Raw rows -> Parquet, one row group a batch, so that a million rows never stand in memory as Python objects."""

from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_tasks.data.records import Row
from grpo_tasks.data.rules import Fault

_BATCH = 20_000
_MESSAGE = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
_FAULT = pa.struct([("rule", pa.large_string()), ("value", pa.large_string())])
RAW_ARROW = pa.schema(
    [
        ("side", pa.large_string()),
        ("source", pa.large_string()),
        ("line", pa.int64()),
        ("question", pa.large_string()),
        ("messages", pa.large_list(_MESSAGE)),
        ("answer", pa.large_string()),
        ("extra", pa.large_string()),
        ("faults", pa.large_list(_FAULT)),
    ]
)
"""schemas/tables.py Raw, as Arrow writes it."""


class RawWriter:
    """Collects rows into columns and writes them a batch at a time; a context manager that closes the file."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, RAW_ARROW, compression="lz4")
        self._places: list[tuple[str, str, int]] = []
        self._rows: list[Row] = []

    def add(self, row: Row, *, side: str, source: str, line: int) -> None:
        """Take one row."""
        self._places.append((side, source, line))
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        rows, places = self._rows, self._places
        columns = [
            pa.array([side for side, _, _ in places], pa.large_string()),
            pa.array([source for _, source, _ in places], pa.large_string()),
            pa.array([line for _, _, line in places], pa.int64()),
            pa.array([row.question for row in rows], pa.large_string()),
            _messages(rows),
            pa.array([row.answer for row in rows], pa.large_string()),
            pa.array([row.extra for row in rows], pa.large_string()),
            pa.array(
                [[_fault(fault) for fault in row.faults] if row.faults else None for row in rows], RAW_ARROW.field("faults").type
            ),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=RAW_ARROW))
        self._rows, self._places = [], []


def _messages(rows: list[Row]) -> pa.Array:
    # Built from flat columns: a list of dicts per row would cost five times as much.
    ends, roles, contents = [0], list[str](), list[str]()
    for row in rows:
        roles.extend(row.roles or ())
        contents.extend(row.contents or ())
        ends.append(len(roles))
    values = pa.StructArray.from_arrays(
        [pa.array(roles, pa.large_string()), pa.array(contents, pa.large_string())], fields=list(_MESSAGE)
    )
    missing = pa.array([row.roles is None for row in rows])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values, type=RAW_ARROW.field("messages").type, mask=missing)


def _fault(fault: Fault) -> dict[str, str]:
    return {"rule": fault.rule, "value": fault.value}
