"""Raw rows -> Arrow, a batch at a time, so that a million rows never stand in memory as Python objects."""

import itertools
from collections.abc import Sequence

import pyarrow as pa

from grpo_tasks.data.records import Row
from grpo_tasks.data.rules import Fault

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


def raw_table(rows: Sequence[Row], lines: Sequence[int], *, side: str, source: str) -> pa.Table:
    """The rows of one source, each with its line, as a table of RAW_ARROW."""
    questions, roles, contents, answers, extras, faults = zip(*rows, strict=True)
    told = [[_fault(fault) for fault in found] if found else None for found in faults]
    columns = [
        pa.repeat(pa.scalar(side, pa.large_string()), len(rows)),
        pa.repeat(pa.scalar(source, pa.large_string()), len(rows)),
        pa.array(lines, pa.int64()),
        pa.array(questions, pa.large_string()),
        _messages(roles, contents),
        pa.array(answers, pa.large_string()),
        pa.array(extras, pa.large_string()),
        pa.array(told, RAW_ARROW.field("faults").type),
    ]
    return pa.Table.from_arrays(columns, schema=RAW_ARROW)


def _messages(roles: Sequence[Sequence[str] | None], contents: Sequence[Sequence[str] | None]) -> pa.Array:
    # Built from flat columns: a list of dicts per row would cost five times as much.
    ends = list(itertools.accumulate((len(row) if row else 0 for row in roles), initial=0))
    values = pa.StructArray.from_arrays([_flat(roles), _flat(contents)], fields=list(_MESSAGE))
    missing = pa.array([row is None for row in roles])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values, type=RAW_ARROW.field("messages").type, mask=missing)


def _flat(column: Sequence[Sequence[str] | None]) -> pa.Array:
    return pa.array(list(itertools.chain.from_iterable(filter(None, column))), pa.large_string())


def _fault(fault: Fault) -> dict[str, str]:
    return {"rule": fault.rule, "value": fault.value}
