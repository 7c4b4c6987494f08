"""Reads the complete lines of a stage's journal. Does not know MLflow; the shipper and the plots share it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_tasks.stage.journal import JOURNAL_KEYS
from grpo_tasks.stage.tail import JsonLinesTail


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One update."""

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def read_journal(path: Path) -> list[JournalLine]:
    """All complete lines of a journal; none when there is no file yet."""
    return read_new_lines(journal_tail(path))


def journal_tail(path: Path) -> JsonLinesTail:
    """A tail that follows a journal from its start."""
    return JsonLinesTail(path, JOURNAL_KEYS | {"timestamp_ms": int})


def read_new_lines(tail: JsonLinesTail) -> list[JournalLine]:
    """The complete lines written since the tail was read last."""
    return [_line(fields) for fields in tail.read()]


def _line(fields: dict[str, Any]) -> JournalLine:
    metrics = {name: float(value) for name, value in fields["metrics"].items() if value is not None}
    return JournalLine(step=fields["step"], timestamp_ms=fields["timestamp_ms"], metrics=metrics)
