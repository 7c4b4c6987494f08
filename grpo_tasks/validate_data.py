"""Step: check every row against every rule; bad rows are quarantined with file, line and rule."""

import time

import polars as pl
from prefect import get_run_logger

from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.data.judge import judge
from grpo_tasks.data.report import REPORT, Origin, enforce, report_data, stop_warnings
from grpo_tasks.data.sources import ROWS
from grpo_tasks.running.step import Work, step
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import JudgeInputs
from schemas.results.data import DataReport, PreparedData


@step(rooms=("data", "answers"))
def validate_data(
    work: Work,
    rows: PreparedData,
    inputs: JudgeInputs,
    *,
    model: ModelConfig,
    rollout: RolloutConfig,
) -> DataReport:
    """Apply every rule to every row; after writing the report, stop if too many rows are bad or no answer can be right."""
    # Imported here because it imports transformers, which a run that skips this step does not need.
    from grpo_tasks.data.chat_tokens import load_counter

    began = time.perf_counter()
    counter = load_counter(model)
    counter.check_stops(rollout)
    verdict = judge(
        pl.read_parquet(rows.directory / ROWS),
        config=inputs,
        count_tokens=counter.count_column,
        markers=counter.special_tokens,
    )
    origin = Origin(work.key, work.directory, time.perf_counter() - began, rows.sources)
    truths = find_unusable_truths(verdict.accepted, inputs.rewards.equality)
    warnings = [*stop_warnings(verdict, rollout), *filter(None, [truths.warning])]
    for warning in warnings:
        get_run_logger().warning(warning)
    report = report_data(verdict, origin, warnings)
    work.artifact("validation", (work.directory / REPORT).read_text(encoding="utf-8"))
    enforce(verdict, inputs.validation)
    truths.enforce()
    return report
