"""Reads a stage's journal: whole lines only, from any offset. Knows no mlflow; the shipper and the plots share it."""

import json
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import TrackingError


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
    if not path.exists():
        return [], 0
    if path.stat().st_size < offset:
        offset = 0
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read()
    # The writer may be in the middle of a line: what follows the last newline is for the next time.
    whole = content[: content.rfind(b"\n") + 1]
    return [_parse(line, path) for line in whole.splitlines() if line.strip()], offset + len(whole)


def _parse(line: bytes, path: Path) -> JournalLine:
    try:
        fields = json.loads(line)
        metrics = {name: float(value) for name, value in fields["metrics"].items() if value is not None}
        return JournalLine(step=int(fields["step"]), timestamp_ms=int(fields["timestamp_ms"]), metrics=metrics)
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise TrackingError(
            f"a line of the journal is broken: {line[:80]!r}",
            place=str(path),
            mend="remove the line, or the stage's folder to train it again",
        ) from fault
