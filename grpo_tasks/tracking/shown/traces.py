"""Some completions of an evaluation as traces, with their verdicts: for MLflow's side-by-side view, labelling and review.

    question -> trace "merged" {messages -> answer}   expectation: ground truth   feedback: correct, format, reward

The same prompts are taken for every model, so that base and merged model stand side by side. The artifact samples.parquet has all
completions.
"""

from functools import partial
from typing import Any

import mlflow
import polars as pl
from mlflow import MlflowClient
from mlflow.entities import AssessmentSource, NoOpSpan

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.tracking.handle import RunHandle
from schemas.metrics import REWARD
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport

MAX_TRACES = 12
"""Traces of one evaluation."""
LABELS = ("base", "merged")
"""Evaluations that become traces."""
_SOURCE = AssessmentSource(source_type="CODE", source_id="grpo-pipeline")
_SAMPLE_TAG = "grpo.sample"
_CHARS = 4_000
_VERDICTS = {"correct": "correct", "format": "strict_format", "reward": REWARD}
"""By name of the feedback: the column of the samples that it shows."""


def record_traces(run: RunHandle, result: EvalReport, data: DataReport | None, *, timestamp_ms: int) -> None:
    """Log the first completion of the first prompts, once each."""
    if result.label not in LABELS or data is None or not (result.samples.exists() and data.eval.exists()):
        return
    first = pl.col("sample") == pl.col("sample").min().over("prompt_id")
    samples = pl.read_parquet(result.samples).filter(first).unique("prompt_id", keep="first", maintain_order=True)
    prompts = pl.read_parquet(data.eval, columns=["prompt_id", "prompt", "answer"]).unique("prompt_id", keep="first")
    rows = turn_by_turn(samples.head(MAX_TRACES)).join(prompts, on="prompt_id", how="inner", maintain_order="left")
    run.store.ask(partial(_log_missing, run=run, label=result.label, rows=rows, timestamp_ms=timestamp_ms))


def _log_missing(client: MlflowClient, *, run: RunHandle, label: str, rows: pl.DataFrame, timestamp_ms: int) -> None:
    mine = f"metadata.`mlflow.sourceRun` = '{run.run_id}'"
    # Traces know no other store than mlflow's global one.
    with run.store.as_default():
        found = client.search_traces(locations=[run.experiment_id], filter_string=mine, max_results=500)
        known = {trace.info.tags.get(_SAMPLE_TAG): trace for trace in found}
        for row in rows.iter_rows(named=True):
            name = f"{label}/{row['prompt_id']}/{row['sample']}"
            trace = known.get(name)
            trace_id = trace.info.trace_id if trace else _log(run, label, name, row, timestamp_ms)
            if trace_id is None:
                return
            judged = {assessment.name for assessment in trace.info.assessments} if trace else set()
            _judge(trace_id, row, judged)


def _log(run: RunHandle, label: str, name: str, row: dict[str, Any], timestamp_ms: int) -> str | None:
    """Id of the new trace; None where the user has switched tracing off."""
    at_ns = timestamp_ms * 1_000_000
    span = mlflow.start_span_no_context(
        label,
        inputs={"messages": [{**message, "content": message["content"][:_CHARS]} for message in row["prompt"]]},
        experiment_id=run.experiment_id,
        tags={_SAMPLE_TAG: name},
        metadata={"mlflow.sourceRun": run.run_id},
        start_time_ns=at_ns,
    )
    if isinstance(span, NoOpSpan):
        return None
    span.end(outputs={"role": "assistant", "content": row["completion"][:_CHARS]}, end_time_ns=at_ns)
    return str(span.trace_id)


def _judge(trace_id: str, row: dict[str, Any], judged: set[str]) -> None:
    for name, column in _VERDICTS.items():
        if row.get(column) is not None and name not in judged:
            mlflow.log_feedback(trace_id=trace_id, name=name, value=row[column], source=_SOURCE)
    if row["answer"] is not None and "expected_response" not in judged:
        mlflow.log_expectation(trace_id=trace_id, name="expected_response", value=row["answer"], source=_SOURCE)
