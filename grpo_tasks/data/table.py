"""The tables of the validation step as later steps read them. The trainer needs no polars: it is imported where it is used."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import DamagedError
from schemas.prompts import PromptRow

if TYPE_CHECKING:
    import polars as pl

QUARANTINE = "quarantine.parquet"
PASS_RATE_COLUMNS = ("pass_rate", "pass_rate_low", "pass_rate_high")
"""Columns of a stage's rows that validated rows do not have: the pass rate and its interval."""


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow]:
    """Rows of train.parquet or eval.parquet in reading order; raises as `read_table` does.

    With a limit: the first `limit` rows by prompt_id. It is a hash, so the sample does not depend on the order of the file.
    """
    rows = _read_arrow(path, lambda table: table.to_pylist())
    if limit is not None and limit < len(rows):
        rows = sorted(rows, key=lambda row: row["prompt_id"])[:limit]
    names = ("prompt_id", "source", "line", "answer", "prompt_tokens", "task")
    given = []
    for row in rows:
        known = {name: row[name] for name in (*names, *PASS_RATE_COLUMNS) if name in row}
        answers = None if row["answers"] is None else tuple(row["answers"])
        given.append(PromptRow(**known, messages=tuple(row["prompt"]), extra=orjson.loads(row["extra"]), answers=answers))
    return given


def read_chats(path: Path, limit: int | None = None) -> list[list[dict[str, str]]]:
    """Messages of the rows that `read_prompts` returns, as plain lists that JSON can hold."""
    return [[dict(message) for message in row.messages] for row in read_prompts(path, limit)]


def read_table(path: Path) -> "pl.DataFrame":
    """A Parquet table that a step has written; `DamagedError` where it is missing, or its content is not Parquet any more."""
    import polars as pl

    # polars panics on a column name that is not UTF-8
    table = _read_arrow(path, pl.from_arrow, pl.exceptions.PolarsError, pl.exceptions.PanicException)
    assert isinstance(table, pl.DataFrame)
    return table


def _read_arrow(path: Path, convert: Callable[[pa.Table], Any], *errors: type[BaseException]) -> Any:
    try:
        # Arrow, because it checks what it reads: polars takes text and offsets from a damaged file on trust.
        columns = pq.read_table(path, partitioning=None)
        columns.validate(full=True)
        return convert(columns)
    except (pa.ArrowException, OSError, ValueError, *errors) as error:
        raise DamagedError(
            f"the table cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}",
            place=str(path),
            fix="run the command that made it again; the step runs again when its files have changed",
        ) from error


def pass_rate_columns(rows: Sequence[PromptRow]) -> dict[str, list[float | None]]:
    """The pass rates of rows as columns of a table; none where no pass rate is known."""
    if all(row.pass_rate is None for row in rows):
        return {}
    return {name: [getattr(row, name) for row in rows] for name in PASS_RATE_COLUMNS}


def prompt_id(
    messages: Sequence[Mapping[str, str]], answer: str | None, *, answers: Sequence[str] | None = None, task: str = ""
) -> str:
    """`json_digest` of messages and answer. `answers` and `task` count only where a row has them: other ids stay as they were."""
    row: dict[str, object] = {
        "messages": [{"role": one["role"], "content": one["content"]} for one in messages],
        "answer": answer,
    }
    if answers is not None or task:
        row |= {"answers": answers, "task": task}
    return json_digest(orjson.dumps(row))


def json_digest(json: bytes) -> str:
    """First 16 hex digits of the SHA-256."""
    return hashlib.sha256(json).hexdigest()[:16]
