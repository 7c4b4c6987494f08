"""Evaluate samples on disk: scored samples.parquet, report.md and an `EvalReport`.

Sampling happens before, in a process of its own (grpo_tasks/rollout). The comparison of models is in paired.py, and the step
saves the result.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from grpo_tasks.content.markdown import table
from grpo_tasks.evaluation.score import GREEDY, EvaluationMetrics, Prompt, score_samples, summarise
from schemas.config.completion import CompletionConfig
from schemas.config.evaluation import EvaluationConfig
from schemas.metrics import describe
from schemas.results.evaluation import EvalReport, Interval
from schemas.results.model import ModelRef
from schemas.tables import Samples

SAMPLES = "samples.parquet"
REPORT = "report.md"
_EXAMPLES = 3
_SHOWN_CHARS = 600


def evaluate_samples(
    directory: Path,
    *,
    key: str,
    label: str,
    model: ModelRef,
    prompts: Sequence[Prompt],
    completion: CompletionConfig,
    evaluation: EvaluationConfig,
) -> EvalReport:
    """Score `directory`/samples.parquet in place, write report.md next to it and return the metrics.

    Args:
        directory: folder with samples.parquet (schemas/tables.py Samples); scoring it twice gives the same table.
        key: content key of the evaluation.
        label: base, merged, champion, or a stage's name.
        model: the evaluated model.
        prompts: the held-out prompts with their ground truth.
        completion: what an answer is, and when it is right.
        evaluation: number of samples, temperature and confidence.
    """
    began = time.monotonic()
    samples = Samples.validate(pl.read_parquet(directory / SAMPLES))
    scored = score_samples(samples, prompts, completion)
    metrics = summarise(scored, evaluation)
    # Written aside and renamed: a process that is killed here leaves the old table, not half of a new one.
    part = directory / (SAMPLES + ".part")
    scored.write_parquet(part)
    part.replace(directory / SAMPLES)
    report = EvalReport(
        key=key,
        directory=directory,
        seconds=time.monotonic() - began,
        label=label,
        model=model,
        prompts=scored["prompt_id"].n_unique(),
        num_samples=evaluation.num_samples,
        temperature=evaluation.temperature,
        confidence=evaluation.confidence,
        metrics=metrics.metrics,
        pass_at_k=metrics.pass_at_k,
    )
    (directory / REPORT).write_text(write_report(report, scored, prompts), encoding="utf-8")
    return report


def write_report(report: EvalReport, scored: pl.DataFrame, prompts: Sequence[Prompt]) -> str:
    """The evaluation as Markdown: metrics with intervals, then examples of right and wrong completions."""
    truth = {prompt.prompt_id: prompt.answer or "" for prompt in prompts}
    head = (
        f"# Evaluation: {report.label}\n\n{report.prompts} held-out prompts, {report.num_samples} samples each at temperature "
        f"{report.temperature:g}. The intervals are {report.confidence:.0%} confidence intervals, from a bootstrap over prompts. "
        "A completion is strictly right when it has the required format and its answer equals the ground truth.\n"
    )
    metrics = EvaluationMetrics(metrics=report.metrics, pass_at_k=report.pass_at_k)
    return "\n".join([head, metrics_table(metrics), *_examples(scored, truth)]) + "\n"


def metrics_table(metrics: EvaluationMetrics) -> str:
    """A Markdown table with one row per metric."""
    rows: list[list[str]] = []
    for name, interval in metrics.metrics.items():
        metric = describe(name)
        rows.append(_row(name, interval, metric.meaning if metric else "", share=metric is None or metric.unit == "share"))
    for k, interval in metrics.pass_at_k.items():
        rows.append(_row(f"pass@{k}", interval, f"probability that at least one of {k} samples is strictly right", share=True))
    return table(["metric", "value", "interval", "meaning"], rows, right=["value"]) + "\n"


def _row(name: str, interval: Interval, meaning: str, *, share: bool) -> list[str]:
    def show(value: float) -> str:
        return f"{100 * value:.1f} %" if share else f"{value:.1f}"

    return [name, show(interval.value), f"{show(interval.low)} to {show(interval.high)}", meaning]


def _examples(scored: pl.DataFrame, truth: dict[str, str]) -> list[str]:
    """A few right, wrong and truncated completions, one per prompt.

    They are chosen by prompt_id, so that the reports of two models mostly show the same prompts.
    """
    sampled = scored.filter(pl.col("sample") != GREEDY).sort("prompt_id", "sample")
    kinds = {"right": pl.col("correct"), "wrong": ~pl.col("correct"), "truncated": pl.col("truncated")}
    sections: list[str] = []
    for title, mask in kinds.items():
        rows = sampled.filter(mask).unique("prompt_id", keep="first", maintain_order=True).head(_EXAMPLES)
        if rows.is_empty():
            continue
        sections.append(f"## {title.capitalize()} completions\n")
        sections += [_example(row, truth) for row in rows.select("prompt_id", "completion").iter_rows()]
    return sections


def _example(row: tuple[str, str], truth: dict[str, str]) -> str:
    prompt_id, completion = row
    shown = completion if len(completion) <= _SHOWN_CHARS else completion[:_SHOWN_CHARS] + " ..."
    # An indented block shows any text literally; a completion may itself contain fences, HTML or headings.
    block = "\n".join("    " + line for line in shown.splitlines()) or "    (empty)"
    return f"`{prompt_id}`, ground truth `{truth[prompt_id]}`:\n\n{block}\n"
