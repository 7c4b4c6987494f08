"""Reads a stage's journal: whole lines only, from any offset. Knows no mlflow; the shipper and the plots share it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_tasks.stage.journal import JOURNAL_KEYS, read_lines


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One update."""

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def read_journal(path: Path) -> list[JournalLine]:
    """All whole lines of a journal; none when there is no file yet."""
    return read_from(path, 0)[0]


def read_from(path: Path, offset: int) -> tuple[list[JournalLine], int]:
    """The whole lines after `offset` bytes, and the offset behind them.

    A journal shorter than the offset is another journal (the stage was begun anew) and is read from its start.
    """
    if path.exists() and path.stat().st_size < offset:
        offset = 0
    lines, end = read_lines(path, JOURNAL_KEYS | {"timestamp_ms": int}, offset)
    return [_line(fields) for fields in lines], end


def _line(fields: dict[str, Any]) -> JournalLine:
    metrics = {name: float(value) for name, value in fields["metrics"].items() if value is not None}
    return JournalLine(step=fields["step"], timestamp_ms=fields["timestamp_ms"], metrics=metrics)
