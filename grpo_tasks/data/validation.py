"""Judges all rows of a table, writes the tables and the report, and stops when too many rows are bad.

rows.parquet -> judge (judge.py), check of the ground truths (grpo_tasks/answers) -> report and tables (report.py) -> DataReport
"""

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.tokenizer import prepare
from grpo_tasks.data.chunks import missing_column
from grpo_tasks.data.judge import RowVerdict, judge
from grpo_tasks.data.normalise import prompt_format
from grpo_tasks.data.report import Origin, enforce, report_data, stop_warnings
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.results.data import DataReport, SourceFile


def validate_rows(rows: Path, config: RunConfig, origin: Origin, *, warn: Callable[[str], None] = lambda _: None) -> DataReport:
    """Apply all rules to all rows, and check that answers can equal the ground truths.

    Args:
        rows: rows.parquet (schemas/tables.py Raw).
        config: its sections data, validation, completion, model and rollout, and the seed of the split.
        origin: where the report comes from; its seconds are those before this call.
        warn: called with each warning of the report.

    Raises:
        ConfigError: the chat template refuses the system prompt of the config.
        DataError: a source has no answers and needs them, or the prompts are not as configured. And after the files are written:
            too many rows are bad, too few are left, no row has a configured task, or no ground truth can be matched.
    """
    # Imports transformers, which a run that skips validation does not need.
    from grpo_tasks.data.chat_tokens import load_counter
    from grpo_tasks.data.tokenizer_notes import check_system_prompt, tokenizer_notes

    began, model, rollout = time.perf_counter(), config.model, config.rollout
    check_answer_columns(origin.sources, config)
    table = pl.read_parquet(rows)
    with limited_templates(model.path):
        counter = load_counter(model, chats=prompt_format(table, config.data) == "conversational")
        # Before the added tokens: a prompt may well name those, it may not forge the markers of the template.
        markers = counter.special_tokens
        prepare(counter.tokenizer, model, rollout)
        counter.check_stops(rollout)
        check_system_prompt(counter.tokenizer, config.data.system_prompt)
        verdict = judge(table, config=config, counter=counter, markers=markers)
        # Completions without an answer are compared with no ground truth, so any text will do.
        how = config.completion.equality if config.completion.has_answer else "exact"
        truths = find_unusable_truths(verdict.accepted, how)
        notes = tokenizer_notes(counter.tokenizer, verdict, model, rollout)
    warnings = [*notes, *stop_warnings(verdict, rollout), *filter(None, [truths.warning, verdict.near.warning])]
    for warning in warnings:
        warn(warning)
    report = report_data(verdict, replace(origin, seconds=origin.seconds + time.perf_counter() - began), warnings)
    enforce(verdict, config.validation)
    _check_tasks(verdict, config)
    truths.enforce()
    return report


def check_answer_columns(sources: Sequence[SourceFile], config: RunConfig) -> None:
    """Raise `DataError` when no row of a source has an answer although its rows need one."""
    column, tasks = config.data.answer_column, config.data.tasks
    configured = [*config.data.train, *config.data.eval]
    optional = {source.path for source in configured if source.task in tasks and tasks[source.task].answers == "optional"}
    by_row = config.data.task_column is not None and any(task.answers == "optional" for task in tasks.values())
    if column is None or by_row or config.completion.is_free_text:
        return
    for source in sources:
        if not source.with_answer and source.path not in optional:
            way_out = "; for a task without ground truth set data.answer_column: null, or completion.format: none"
            raise missing_column(source.path, source.columns, "answer_column", column, otherwise=way_out)


def _check_tasks(verdict: RowVerdict, config: RunConfig) -> None:
    """Raise `DataError` when the config sets a task that no training row has."""
    found = [task.task for task in verdict.tasks if task.train_rows]
    for name in config.data.tasks:
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1)
            fix = f"did you mean {near[0]}?" if near else f"the tasks of the data are: {', '.join(found) or 'none'}"
            raise DataError(f"no accepted training row has the task {name}", place=f"data.tasks.{name}", fix=fix)
