"""The journal of a stage, one JSON line per update, and its events.

A line is never rewritten: a resumed stage repeats updates whose lines are there already, and readers see each line once.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from schemas.errors import TrainingError
from schemas.metrics import EVAL_REWARD, STEP_TIME

JOURNAL_KEYS = {"step": int, "metrics": dict}
EVENT_KEYS = {"step": int, "event": str, "detail": str}
_NEWEST = 20
"""Stages whose updates tell the duration of an update."""


@dataclass(slots=True)
class Counters:
    """Updates, sampled tokens with their prompts, resumes, seconds of training over all resumes, and how often microbatches are
    halved to fit into memory."""

    step: int = 0
    tokens: int = 0
    resumed: int = 0
    seconds: float = 0.0
    halvings: int = 0


@dataclass(slots=True)
class Journal:
    """Appends to a stage's journal; opening it drops an incomplete last line that a kill left."""

    path: Path
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    writes: bool = True
    """False on all ranks but one."""

    def __post_init__(self) -> None:
        self.steps = {line["step"]: line["metrics"] for line in _opened(self.path, JOURNAL_KEYS, writes=self.writes)}

    @property
    def last_step(self) -> int:
        """0 before the first update."""
        return max(self.steps, default=0)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of an update that is new."""
        if step in self.steps:
            return
        self.steps[step] = dict(metrics)
        if self.writes:
            _append(self.path, {"step": step, "timestamp_ms": time.time_ns() // 1_000_000, "metrics": metrics})

    def window(self, metric: str, *, last: int, size: int) -> list[float]:
        """Values of a metric in the `size` updates up to `last`, without the updates that lack it."""
        steps = range(max(1, last - size + 1), last + 1)
        return [self.steps[step][metric] for step in steps if metric in self.steps.get(step, {})]

    @property
    def evaluations(self) -> dict[int, float]:
        """Held-out rewards, by update."""
        return {step: metrics[EVAL_REWARD] for step, metrics in self.steps.items() if EVAL_REWARD in metrics}

    def best_step(self, last: int) -> int | None:
        """The first update up to `last` with the highest held-out reward; None before the first evaluation."""
        known = [(reward, -step) for step, reward in self.evaluations.items() if step <= last]
        return -max(known)[1] if known else None


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete lines; empty when there is no file yet."""
    return read_lines(path, EVENT_KEYS)[0]


def update_seconds(folder: Path) -> float | None:
    """Median duration of an update of the newest stages in the folder of a config's results; None if there are none."""
    newest = sorted(folder.glob("train_stage/*/metrics.jsonl"), key=lambda path: -path.stat().st_mtime)[:_NEWEST]
    metrics = [line["metrics"] for path in newest for line in read_lines(path, JOURNAL_KEYS)[0]]
    times = [each[STEP_TIME] for each in metrics if STEP_TIME in each]
    return median(times) if times else None


def read_lines(path: Path, keys: Mapping[str, type], offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete lines after `offset` bytes, and the offset after them; none without a file. TrainingError names a bad line."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise TrainingError(
            f"the file cannot be read: {error.strerror}",
            place=str(path),
            fix=f"remove {path.parent} to train the stage from the start",
        ) from error
    # What follows is left for the next call: the writer may be in the middle of a line, or was killed there.
    complete = content[: content.rfind(b"\n") + 1]
    lines: list[dict[str, Any]] = []
    position = offset
    for raw in complete.split(b"\n")[:-1]:
        if raw.strip():
            lines.append(_parsed(raw, keys, path, position))
        position += len(raw) + 1
    return lines, position


def _parsed(raw: bytes, keys: Mapping[str, type], path: Path, position: int) -> dict[str, Any]:
    try:
        line = json.loads(raw)
        numbers = all(isinstance(number, int | float | None) for number in line.get("metrics", {}).values())
        if numbers and all(isinstance(line.get(key), kind) for key, kind in keys.items()):
            return line
        cause = None
    except (ValueError, AttributeError, RecursionError) as error:  # no JSON, or no object
        cause = error
    number = path.read_bytes()[:position].count(b"\n") + 1
    raise TrainingError(
        f"a line is damaged: {raw[:80]!r}",
        place=f"{path}:{number}",
        fix=f"remove that line (only the figures of one update are lost), or {path.parent} to train the stage from the start",
    ) from cause


@dataclass(slots=True)
class Events:
    """What happens in a stage besides the updates; opening it drops an incomplete last line that a kill left."""

    path: Path
    writes: bool = True
    _reported: set[tuple[int, str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._reported = {
            (line["step"], line["event"], line["detail"]) for line in _opened(self.path, EVENT_KEYS, writes=self.writes)
        }

    def report(self, step: int, event: str, detail: str) -> None:
        """Write an event, unless the file has it already because the update is repeated after a resume."""
        if (step, event, detail) not in self._reported:
            self.append(step, event, detail)

    def append(self, step: int, event: str, detail: str) -> None:
        """Write an event that is new every time."""
        self._reported.add((step, event, detail))
        if self.writes:
            _append(self.path, {"step": step, "timestamp_ms": time.time_ns() // 1_000_000, "event": event, "detail": detail})


def _append(path: Path, line: Mapping[str, object]) -> None:
    # One write for the complete line: a reader that follows the file sees all of it or nothing.
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def _opened(path: Path, keys: Mapping[str, type], *, writes: bool) -> list[dict[str, Any]]:
    lines, end = read_lines(path, keys)
    # An incomplete last line is cut off: the next one starts on a line of its own.
    if writes and path.exists() and path.stat().st_size > end:
        with path.open("r+b") as file:
            file.truncate(end)
    return lines


@dataclass(slots=True)
class JsonLinesTail:
    """Reads each complete line of the file once."""

    path: Path
    keys: Mapping[str, type]
    """What every line must have."""
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """The complete lines written since the last call; a file that has become shorter is read from its start."""
        if self.path.exists() and self.path.stat().st_size < self._offset:
            self._offset = 0
        lines, self._offset = read_lines(self.path, self.keys, self._offset)
        return lines
