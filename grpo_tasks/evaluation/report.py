"""Evaluate samples on disk: scored samples.parquet, report.md and an `EvalReport`.

Sampling happens before, in a process of its own (grpo_tasks/rollout). The comparison of models is in statistics.py.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.answers.equality import equals_any
from grpo_tasks.answers.extract import extract
from grpo_tasks.content.conversations import fault_of, turn_by_turn
from grpo_tasks.content.markdown import block, table
from grpo_tasks.evaluation.statistics import ladder, mean_interval, pass_at_k, rate_interval
from grpo_tasks.kit.files import replacing
from schemas import metrics as metric
from schemas.config.completion import CompletionConfig
from schemas.config.evaluation import EvaluationConfig, PromotionConfig
from schemas.errors import DataError
from schemas.prompts import GREEDY, PromptRow
from schemas.results.data import PromptsUsed
from schemas.results.evaluation import EvalReport, Interval
from schemas.results.model import ModelRef
from schemas.tables import Samples

SAMPLED = (
    metric.ACCURACY,
    metric.FORMAT_RATE,
    metric.LENIENT_ACCURACY,
    metric.TRUNCATED_RATE,
    metric.FAILED_RATE,
    metric.COMPLETION_LENGTH,
)
ONE_GREEDY = (metric.GREEDY_ACCURACY, metric.GREEDY_FORMAT_RATE, metric.GREEDY_LENIENT_ACCURACY, metric.GREEDY_REWARD)
KNOWN_WELL = (metric.ACCURACY, metric.LENIENT_ACCURACY, metric.FORMAT_RATE, metric.TRUNCATED_RATE)
"""The shares whose intervals decide whether sampling may stop: those by which a promotion is decided or refused."""
LEAST_PROMPTS = 32
"""From so many prompts on an interval is narrow by what was sampled, not by chance."""
SAMPLES = "samples.parquet"
REPORT = "report.md"
_EXAMPLES = 3
_SHOWN_CHARS = 600


def score_samples(samples: pl.DataFrame, prompts: Sequence[PromptRow], completion: CompletionConfig) -> pl.DataFrame:
    """Add verdicts to a table of samples (schemas/tables.py), replacing existing ones; `prompts` has the rows of all its ids.

    A sample is strictly correct if it has the required format and its answer equals a ground truth; lenient scoring takes the
    last text that looks like an answer. A conversation that a fault of its environment ended is wrong and never left out: a
    policy that causes faults where a prompt is hard would gain by it. A DataError where not one conversation has begun.

    The columns are the booleans strict_format, correct, lenient_correct and truncated, `failed` where tools or an environment
    answered, and task. Null is a verdict that cannot be given: right or wrong without a ground truth, the format of free text.
    """
    truth = {prompt.prompt_id: prompt.truths for prompt in prompts}
    unknown = set(samples["prompt_id"]) - truth.keys()
    assert not unknown, f"samples of unknown prompts: {sorted(unknown)[:3]}"
    failed = _failed(samples)
    texts = samples["completion"].to_list()
    if failed is not None:
        texts = ["" if gone else text for text, gone in zip(texts, failed, strict=True)]
    verdicts = [_judge(text, truth[prompt_id], completion) for prompt_id, text in zip(samples["prompt_id"], texts, strict=True)]
    strict_format, correct, lenient = zip(*verdicts, strict=True) if verdicts else ((), (), ())
    return samples.with_columns(
        *([] if failed is None else [failed]),
        pl.Series("strict_format", strict_format, dtype=pl.Boolean),
        pl.Series("correct", correct, dtype=pl.Boolean),
        pl.Series("lenient_correct", lenient, dtype=pl.Boolean),
        # From the finish reason, never from the last token: a completion may also end with a stop string.
        (pl.col("finish_reason") == "length").alias("truncated"),
        pl.col("prompt_id").replace_strict({prompt.prompt_id: prompt.task for prompt in prompts}, default="").alias("task"),
    )


def _failed(samples: pl.DataFrame) -> pl.Series | None:
    """Which conversations a fault ended; None when completions are one turn each."""
    if "conversation" not in samples.columns:
        return None
    faults = [fault_of(text) for text in samples["conversation"]]
    if faults and None not in faults and samples["completion_tokens"].sum() == 0:
        # No policy has caused that, and figures of nothing would be compared with those of other models.
        raise DataError(
            f"the environment began none of {len(faults):,} conversations: {faults[0]}",
            place="interaction",
            fix="repair what it needs, such as a service that it asks, and run the evaluation again",
        )
    return pl.Series("failed", [fault is not None for fault in faults], dtype=pl.Boolean)


def _judge(text: str, truths: Sequence[str], completion: CompletionConfig) -> tuple[bool | None, bool | None, bool | None]:
    """Strict format, strictly right, leniently right."""
    if completion.is_free_text:
        return None, None, None
    found = extract(text, completion)
    if not truths or not completion.has_answer:
        return found.strict_format, None, None
    right = found.strict_format and found.answer is not None and equals_any(found.answer, truths, completion.equality)
    lenient = right or (found.lenient_answer is not None and equals_any(found.lenient_answer, truths, completion.equality))
    return found.strict_format, right, lenient


def summarise(scored: pl.DataFrame, evaluation: EvaluationConfig) -> tuple[dict[str, Interval], dict[int, Interval]]:
    """The metrics of a scored table (schemas/metrics.py EVALUATION), and pass@k by k, with their intervals over prompts.

    A metric is the mean over the prompts that have a value; one that no prompt has a value of is left out. With more than one
    task the metrics of TASK_FAMILIES are given for each task too.
    """
    # Otherwise some prompts would count more than others.
    wanted = {*range(evaluation.num_samples), *([GREEDY] if evaluation.greedy else [])}
    per_prompt = scored.group_by("prompt_id").agg(pl.col("sample").sort())
    odd = per_prompt.filter(pl.col("sample") != pl.lit(sorted(wanted)))
    assert per_prompt.height, "there are no samples"
    assert odd.is_empty(), f"prompt {odd['prompt_id'][0]} has samples {odd['sample'][0].to_list()}, expected {sorted(wanted)}"
    sampled, greedy = scored.filter(pl.col("sample") != GREEDY), scored.filter(pl.col("sample") == GREEDY)
    functions = [name for name in scored.columns if name == metric.REWARD or PromotionConfig.decides_by(name)]
    metrics = _intervals(sampled, [*SAMPLED, *functions], evaluation)
    if evaluation.greedy:
        metrics |= _intervals(greedy, ONE_GREEDY, evaluation)
    tasks = sorted(set(scored["task"])) if "task" in scored.columns else []
    for task in tasks if len(tasks) > 1 else []:
        of_task = _intervals(sampled.filter(pl.col("task") == task), list(metric.TASK_FAMILIES), evaluation)
        metrics |= {metric.member(metric.TASK_FAMILIES[name], task): interval for name, interval in of_task.items()}
    right, samples, level = _means(sampled, "correct") * evaluation.num_samples, evaluation.num_samples, evaluation.confidence
    rungs: dict[int, Interval] = {}
    if right.size:
        counts = right.round().astype(np.int64)
        rungs = {k: rate_interval(pass_at_k(samples, counts, k), confidence=level) for k in ladder(samples)}
        metrics[metric.PASS_AT_1], metrics[metric.PASS_AT_K] = rungs[1], rungs[evaluation.num_samples]
    return metrics, rungs


def widest_half(
    samples: pl.DataFrame, *, prompts: Sequence[PromptRow], completion: CompletionConfig, evaluation: EvaluationConfig
) -> float | None:
    """Half the width of the widest interval of KNOWN_WELL; None without ground truths, where rewards decide."""
    sampled = score_samples(samples, prompts, completion).filter(pl.col("sample") != GREEDY)
    found = _intervals(sampled, KNOWN_WELL, evaluation)
    return max((one.high - one.low) / 2 for one in found.values()) if metric.ACCURACY in found else None


def _intervals(table: pl.DataFrame, names: Sequence[str], evaluation: EvaluationConfig) -> dict[str, Interval]:
    """The metrics that any prompt of the table has a value of."""
    found: dict[str, Interval] = {}
    for name in names:
        column, described = metric.column_of(name), metric.describe_figure(name)
        values = _means(table, column) if column in table.columns else np.zeros(0)
        if values.size:
            # A reward function that says yes or no has a share too: of 200 times no, the mean alone would have no interval.
            verdicts = set(table[column].drop_nulls().cast(pl.Float64).unique()) <= {0.0, 1.0}
            is_share = verdicts or (described is not None and described.unit == "share")
            interval = rate_interval if is_share else mean_interval
            found[name] = interval(values, confidence=evaluation.confidence)
    return found


def _means(table: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """The mean of each prompt's samples that have a value, prompts sorted by id; prompts without any are left out."""
    means = table.group_by("prompt_id").agg(pl.col(column).mean().cast(pl.Float64)).sort("prompt_id")
    return means[column].drop_nulls().to_numpy()


def evaluate_samples(
    directory: Path,
    *,
    key: str,
    label: str,
    model: ModelRef,
    prompts: Sequence[PromptRow],
    completion: CompletionConfig,
    evaluation: EvaluationConfig,
    rewards: pl.DataFrame | None = None,
    prompts_used: PromptsUsed | None = None,
) -> EvalReport:
    """Score `directory`/samples.parquet in place, write report.md next to it and return the metrics. Twice gives the same.

    `label`: base, merged, champion, or a stage's name. `rewards` are columns with the scores of reward functions, one row per
    sample in their order; they join the table. `prompts_used` says why there are samples of no more prompts.
    """
    began = time.monotonic()
    samples = Samples.validate(pl.read_parquet(directory / SAMPLES))
    scored = score_samples(samples, prompts, completion)
    if rewards is not None:
        scored = scored.with_columns(rewards)
    metrics, rungs = summarise(scored, evaluation)
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
        metrics=metrics,
        pass_at_k=rungs,
        prompts_used=prompts_used,
    )
    (directory / REPORT).write_text(write_report(report, scored, prompts), encoding="utf-8")
    return report


def write_report(report: EvalReport, scored: pl.DataFrame, prompts: Sequence[PromptRow]) -> str:
    """The evaluation as Markdown: metrics with intervals, then examples of right and wrong completions."""
    truth = {prompt.prompt_id: " or ".join(prompt.truths) for prompt in prompts}
    judged = scored.filter(pl.col("correct").is_not_null())["prompt_id"].n_unique()
    right = "A completion is strictly right when it has the required format and its answer equals the ground truth."
    if not judged:
        right = "No answer is compared with a ground truth, so there is no accuracy."
    elif judged < report.prompts:
        right += f" Accuracy is the mean over the {judged} prompts with a ground truth."
    faults = int(scored["failed"].sum()) if "failed" in scored.columns else 0
    ended = f" A fault of the environment ended {faults:,} of {scored.height:,} conversations, which count as wrong."
    head = (
        f"# Evaluation: {report.label}\n\n{report.prompts} held-out prompts, {report.num_samples} samples each at temperature "
        f"{report.temperature:g}. The intervals are {report.confidence:.0%} confidence intervals, from a bootstrap over prompts. "
        f"{right}{ended if faults else ''}{f' {report.prompts_used.text()}.' if report.prompts_used else ''}\n"
    )
    return "\n".join([head, metrics_table(report), *_examples(scored, truth)]) + "\n"


def metrics_table(report: EvalReport) -> str:
    """The metrics of a report as a Markdown table."""
    named: dict[str, tuple[str, Interval, str]] = {}
    for name, interval in report.metrics.items():
        described = metric.describe_figure(name)
        named[name] = name, interval, described.meaning if described else ""
    for k, interval in report.pass_at_k.items():
        named[f"pass@{k}"] = metric.PASS_AT_K, interval, f"probability that at least one of {k} samples is strictly right"
    rows = []
    for shown, (name, interval, meaning) in named.items():
        value, low, high = (metric.figure_text(name, bound) for bound in (interval.value, interval.low, interval.high))
        rows.append([shown, value, f"{low} to {high}", meaning])
    return table(["metric", "value", "interval", "meaning"], rows, right=["value"]) + "\n"


def _examples(scored: pl.DataFrame, truth: dict[str, str]) -> list[str]:
    """A few right, wrong and truncated ones, chosen by prompt_id: the reports of two models mostly show the same prompts."""
    sampled = scored.filter(pl.col("sample") != GREEDY).sort("prompt_id", "sample")
    kinds = {"right": pl.col("correct"), "wrong": ~pl.col("correct"), "truncated": pl.col("truncated")}
    orders = {kind: sampled.filter(mask) for kind, mask in kinds.items()}
    if sampled["correct"].null_count() == sampled.height and metric.REWARD in sampled.columns:
        rewarded = sampled.filter(pl.col(metric.REWARD).is_not_null())
        orders = {
            "best rewarded": rewarded.sort(metric.REWARD, descending=True, maintain_order=True),
            "worst rewarded": rewarded.sort(metric.REWARD, maintain_order=True),
            "truncated": orders["truncated"],
        }
    sections: list[str] = []
    for title, ordered in orders.items():
        rows = ordered.unique("prompt_id", keep="first", maintain_order=True).head(_EXAMPLES)
        if rows.is_empty():
            continue
        sections.append(f"## {title.capitalize()} completions\n")
        for prompt_id, completion in turn_by_turn(rows).select("prompt_id", "completion").iter_rows():
            shown = completion if len(completion) <= _SHOWN_CHARS else completion[:_SHOWN_CHARS] + " ..."
            known = f", ground truth `{truth[prompt_id]}`" if truth[prompt_id] else ""
            sections.append(f"`{prompt_id}`{known}:\n\n{block(shown)}\n")
    return sections
