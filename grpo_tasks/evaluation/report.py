"""Evaluate samples on disk: scored samples.parquet, report.md and an `EvalReport`.

Sampling happens before, in a process of its own (grpo_tasks/rollout). The comparison of models is in paired.py, and the step
saves the result.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.content.markdown import table
from grpo_tasks.evaluation.score import EvaluationMetrics, Prompt, score_samples, summarise
from grpo_tasks.kit.files import replacing
from schemas.config.completion import CompletionConfig
from schemas.config.evaluation import EvaluationConfig
from schemas.metrics import PASS_AT_K, REWARD, describe_figure, figure_text
from schemas.prompts import GREEDY
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
    rewards: pl.DataFrame | None = None,
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
        rewards: columns with the scores of reward functions, one row per sample in their order; they join the table.
    """
    began = time.monotonic()
    samples = Samples.validate(pl.read_parquet(directory / SAMPLES))
    scored = score_samples(samples, prompts, completion)
    if rewards is not None:
        scored = scored.with_columns(rewards)
    metrics = summarise(scored, evaluation)
    with replacing(directory / SAMPLES) as unfinished:
        scored.write_parquet(unfinished)
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
    truth = {prompt.prompt_id: " or ".join(prompt.truths) for prompt in prompts}
    judged = scored.filter(pl.col("correct").is_not_null())["prompt_id"].n_unique()
    head = (
        f"# Evaluation: {report.label}\n\n{report.prompts} held-out prompts, {report.num_samples} samples each at temperature "
        f"{report.temperature:g}. The intervals are {report.confidence:.0%} confidence intervals, from a bootstrap over prompts. "
        f"{_about_accuracy(judged, report.prompts)}{_about_faults(scored)}\n"
    )
    metrics = EvaluationMetrics(metrics=report.metrics, pass_at_k=report.pass_at_k)
    return "\n".join([head, metrics_table(metrics), *_examples(scored, truth)]) + "\n"


def _about_accuracy(judged: int, prompts: int) -> str:
    if not judged:
        return "No answer is compared with a ground truth, so there is no accuracy."
    right = "A completion is strictly right when it has the required format and its answer equals the ground truth."
    return right if judged == prompts else f"{right} Accuracy is the mean over the {judged} prompts with a ground truth."


def _about_faults(scored: pl.DataFrame) -> str:
    count = int(scored["failed"].sum()) if "failed" in scored.columns else 0
    if not count:
        return ""
    return f" A fault of the environment ended {count:,} of {scored.height:,} conversations, which count as wrong."


def metrics_table(metrics: EvaluationMetrics) -> str:
    """A Markdown table with one row per metric."""
    rows: list[list[str]] = []
    for name, interval in metrics.metrics.items():
        metric = describe_figure(name)
        rows.append([name, *_shown(name, interval), metric.meaning if metric else ""])
    for k, interval in metrics.pass_at_k.items():
        meaning = f"probability that at least one of {k} samples is strictly right"
        rows.append([f"pass@{k}", *_shown(PASS_AT_K, interval), meaning])
    return table(["metric", "value", "interval", "meaning"], rows, right=["value"]) + "\n"


def _shown(name: str, interval: Interval) -> list[str]:
    return [figure_text(name, interval.value), f"{figure_text(name, interval.low)} to {figure_text(name, interval.high)}"]


def _examples(scored: pl.DataFrame, truth: dict[str, str]) -> list[str]:
    """A few right, wrong and truncated completions, one per prompt.

    They are chosen by prompt_id, so that the reports of two models mostly show the same prompts.
    """
    sampled = scored.filter(pl.col("sample") != GREEDY).sort("prompt_id", "sample")
    kinds = {"right": pl.col("correct"), "wrong": ~pl.col("correct"), "truncated": pl.col("truncated")}
    orders = {kind: sampled.filter(mask) for kind, mask in kinds.items()}
    if sampled["correct"].null_count() == sampled.height and REWARD in sampled.columns:
        rewarded = sampled.filter(pl.col(REWARD).is_not_null())
        orders = {
            "best rewarded": rewarded.sort(REWARD, descending=True, maintain_order=True),
            "worst rewarded": rewarded.sort(REWARD, maintain_order=True),
            "truncated": orders["truncated"],
        }
    sections: list[str] = []
    for title, ordered in orders.items():
        rows = ordered.unique("prompt_id", keep="first", maintain_order=True).head(_EXAMPLES)
        if rows.is_empty():
            continue
        sections.append(f"## {title.capitalize()} completions\n")
        sections += [_example(row, truth) for row in turn_by_turn(rows).select("prompt_id", "completion").iter_rows()]
    return sections


def _example(row: tuple[str, str], truth: dict[str, str]) -> str:
    prompt_id, completion = row
    shown = completion if len(completion) <= _SHOWN_CHARS else completion[:_SHOWN_CHARS] + " ..."
    # An indented block shows any text literally; a completion may itself contain fences, HTML or headings.
    block = "\n".join("    " + line for line in shown.splitlines()) or "    (empty)"
    known = f", ground truth `{truth[prompt_id]}`" if truth[prompt_id] else ""
    return f"`{prompt_id}`{known}:\n\n{block}\n"
