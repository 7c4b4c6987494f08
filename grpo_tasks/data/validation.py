"""Judges all rows of a table, writes the tables and the report, and stops when too many rows are bad.

rows.parquet -> judge (judge.py), check of the ground truths (grpo_tasks/answers) -> report and tables (report.py) -> DataReport

The check is an argument: this room does not depend on what an answer is, so a change there reads no data again.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import polars as pl

from grpo_tasks.content.tokenizer import prepare, with_stop_ids
from grpo_tasks.data.judge import judge
from grpo_tasks.data.report import Origin, enforce, report_data, stop_warnings
from schemas.config.completion import Equality
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import JudgeInputs
from schemas.results.data import DataReport


class GroundTruthCheck(Protocol):
    """What the check of the ground truths found (grpo_tasks/answers/ground_truths.py)."""

    @property
    def warning(self) -> str:
        """A sentence with the numbers and the fix; empty when every ground truth is usable."""
        ...

    def enforce(self) -> None:
        """Raise DataError when no ground truth is usable."""


def validate_rows(
    rows: Path,
    inputs: JudgeInputs,
    origin: Origin,
    *,
    check_truths: Callable[[pl.DataFrame, Equality], GroundTruthCheck],
    model: ModelConfig,
    rollout: RolloutConfig,
    warn: Callable[[str], None] = lambda _: None,
) -> DataReport:
    """Apply all rules to all rows.

    Args:
        rows: rows.parquet (schemas/tables.py Raw).
        inputs: the settings that decide which rows are valid.
        origin: key, existing folder and sources of the report. Its seconds are those before this call.
        check_truths: called with the accepted rows and the equality; `find_unusable_truths`.
        model: for the tokenizer, its added tokens and the chat template.
        rollout: for its stop strings and the variables of the chat template.
        warn: called with each warning of the report.

    Raises:
        DataError: too many rows are bad, too few are left, or no ground truth can be matched. The files are written before.
    """
    # Imports transformers, which a run that skips validation does not need.
    from grpo_tasks.data.chat_tokens import load_counter

    began = time.perf_counter()
    counter = load_counter(model)
    # Before the added tokens: a prompt may well name those, it may not forge the markers of the template.
    markers = counter.special_tokens
    prepare(counter.tokenizer, model, rollout)
    counter.check_stops(with_stop_ids(rollout, counter.tokenizer))
    verdict = judge(pl.read_parquet(rows), config=inputs, count_tokens=counter.count_column, markers=markers)
    truths = check_truths(verdict.accepted, inputs.completion.equality)
    warnings = [*stop_warnings(verdict, rollout), *filter(None, [truths.warning])]
    for warning in warnings:
        warn(warning)
    report = report_data(verdict, replace(origin, seconds=origin.seconds + time.perf_counter() - began), warnings)
    enforce(verdict, inputs.validation)
    truths.enforce()
    return report
