"""Score completions, and summarise the scores as metrics with intervals. Uses no reward function.

    samples + prompts -> strict_format, correct, lenient_correct, truncated -> one mean per prompt -> mean with interval

A sample is strictly correct if it has the required format and its answer equals the ground truth. Lenient scoring takes the last
text that looks like an answer, whatever the format. Format and answer are defined
in grpo_tasks/answers/extract.py, equality in grpo_tasks/answers/equality.py, and nowhere else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.extract import Tags, extract_answer
from grpo_tasks.evaluation.intervals import mean_interval, rate_interval
from grpo_tasks.evaluation.passk import ladder, pass_at_k
from schemas.config.completion import CompletionConfig, Equality
from schemas.config.evaluation import EvaluationConfig
from schemas.metrics import (
    ACCURACY,
    COLUMNS,
    COMPLETION_LENGTH,
    FORMAT_RATE,
    GREEDY_ACCURACY,
    GREEDY_FORMAT_RATE,
    GREEDY_LENIENT_ACCURACY,
    LENIENT_ACCURACY,
    PASS_AT_1,
    PASS_AT_K,
    TRUNCATED_RATE,
)
from schemas.results.evaluation import Interval

GREEDY = -1
SCORES = ("strict_format", "correct", "lenient_correct", "truncated")

_RATES = (ACCURACY, FORMAT_RATE, LENIENT_ACCURACY)
_GREEDY_RATES = (GREEDY_ACCURACY, GREEDY_FORMAT_RATE, GREEDY_LENIENT_ACCURACY)


class Prompt(Protocol):
    """What the evaluation reads of a prompt; rows of grpo_tasks/data have more fields."""

    @property
    def prompt_id(self) -> str:
        """The row's identifier: the first 16 hex digits of its hash."""
        ...

    @property
    def answer(self) -> str | None:
        """Ground truth; None for a row without one."""
        ...


@dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """The metrics of one evaluation, by their names in schemas/metrics.py EVALUATION, and pass@k by k."""

    metrics: dict[str, Interval]
    pass_at_k: dict[int, Interval]


def score_samples(samples: pl.DataFrame, prompts: Iterable[Prompt], completion: CompletionConfig) -> pl.DataFrame:
    """Add the boolean columns of `SCORES` to a samples table, replacing existing ones.

    Args:
        samples: columns of schemas/tables.py Samples.
        prompts: rows with the ground truth, for every prompt_id of `samples`.
        completion: what an answer is, and when it is right.
    """
    truth = {prompt.prompt_id: prompt.answer or "" for prompt in prompts}
    unknown = set(samples["prompt_id"]) - truth.keys()
    assert not unknown, f"samples of unknown prompts: {sorted(unknown)[:3]}"
    tags = Tags.of(completion.tags)
    verdicts = [
        _judge(text, truth[prompt_id], tags, completion.equality)
        for prompt_id, text in samples.select("prompt_id", "completion").iter_rows()
    ]
    strict_format, correct, lenient = zip(*verdicts, strict=True) if verdicts else ((), (), ())
    return samples.with_columns(
        pl.Series("strict_format", strict_format, dtype=pl.Boolean),
        pl.Series("correct", correct, dtype=pl.Boolean),
        pl.Series("lenient_correct", lenient, dtype=pl.Boolean),
        # From the finish reason, never from the last token: a completion may also end with a stop string.
        (pl.col("finish_reason") == "length").alias("truncated"),
    )


def _judge(completion: str, truth: str, tags: Tags, equality: Equality) -> tuple[bool, bool, bool]:
    found = extract_answer(completion, tags)
    right = found.strict_format and found.answer is not None and answers_equal(found.answer, truth, equality)
    lenient = right or (found.lenient_answer is not None and answers_equal(found.lenient_answer, truth, equality))
    return found.strict_format, right, lenient


def summarise(scored: pl.DataFrame, evaluation: EvaluationConfig) -> EvaluationMetrics:
    """All metrics of the evaluation with their intervals over prompts, from a scored table.

    Each prompt must have exactly `evaluation.num_samples` samples, and one greedy completion if `evaluation.greedy` is on.
    """
    sampled, greedy = scored.filter(pl.col("sample") != GREEDY), scored.filter(pl.col("sample") == GREEDY)
    assert_complete(scored, evaluation)
    confidence = evaluation.confidence
    metrics = {name: rate_interval(_means(sampled, COLUMNS[name]), confidence=confidence) for name in _RATES}
    if evaluation.greedy:
        metrics |= {name: rate_interval(_means(greedy, COLUMNS[name]), confidence=confidence) for name in _GREEDY_RATES}
    right = _means(sampled, "correct") * evaluation.num_samples
    rungs = {
        k: rate_interval(pass_at_k(evaluation.num_samples, right.round().astype(np.int64), k), confidence=confidence)
        for k in ladder(evaluation.num_samples)
    }
    metrics[PASS_AT_1], metrics[PASS_AT_K] = rungs[1], rungs[evaluation.num_samples]
    metrics[TRUNCATED_RATE] = rate_interval(_means(sampled, COLUMNS[TRUNCATED_RATE]), confidence=confidence)
    metrics[COMPLETION_LENGTH] = mean_interval(_means(sampled, COLUMNS[COMPLETION_LENGTH]), confidence=confidence)
    return EvaluationMetrics(metrics=metrics, pass_at_k=rungs)


def assert_complete(samples: pl.DataFrame, evaluation: EvaluationConfig) -> None:
    """Assert that every prompt has each of its samples exactly once; otherwise some prompts would count more than others."""
    wanted = {*range(evaluation.num_samples), *([GREEDY] if evaluation.greedy else [])}
    per_prompt = samples.group_by("prompt_id").agg(pl.col("sample").sort())
    odd = per_prompt.filter(pl.col("sample") != pl.lit(sorted(wanted)))
    assert per_prompt.height, "there are no samples"
    assert odd.is_empty(), f"prompt {odd['prompt_id'][0]} has samples {odd['sample'][0].to_list()}, expected {sorted(wanted)}"


def _means(table: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """The mean of each prompt's samples, prompts sorted by id."""
    means = table.group_by("prompt_id").agg(pl.col(column).mean().cast(pl.Float64)).sort("prompt_id")
    return means[column].to_numpy()
