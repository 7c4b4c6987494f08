"""From completions to figures: every sample judged, every figure with its interval. Uses no reward function.

    samples + prompts -> strict_format, correct, lenient_correct, truncated -> one value a prompt -> mean with interval

Strict means: format kept and answer equal. Lenient takes the last thing that looks like an answer. What counts as format, as
answer and as equal is written down in grpo_tasks/answers/extract.py, and only there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.answers.extract import Equality, Tags, answers_equal, extract_answer
from grpo_tasks.evaluation.intervals import mean_interval, rate_interval
from grpo_tasks.evaluation.passk import ladder, pass_at_k
from schemas.config.evaluation import EvaluationConfig
from schemas.config.rewards import RewardsConfig
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
from schemas.results import Interval

GREEDY = -1
SCORES = ("strict_format", "correct", "lenient_correct", "truncated")

_RATES = (ACCURACY, FORMAT_RATE, LENIENT_ACCURACY)
_GREEDY_RATES = (GREEDY_ACCURACY, GREEDY_FORMAT_RATE, GREEDY_LENIENT_ACCURACY)


class Prompt(Protocol):
    """What the evaluation needs to know of a prompt (grpo_tasks/data gives more)."""

    @property
    def prompt_id(self) -> str:
        """First 16 hex digits of the row's hash."""
        ...

    @property
    def answer(self) -> str:
        """Ground truth."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """What one evaluation says, by the names of schemas/metrics.py EVALUATION."""

    metrics: dict[str, Interval]
    pass_at_k: dict[int, Interval]


def score_samples(samples: pl.DataFrame, prompts: Iterable[Prompt], rewards: RewardsConfig) -> pl.DataFrame:
    """Add the columns of `SCORES` (booleans) to a samples table; scored columns already there are made anew.

    Args:
        samples: columns of schemas/tables.py Samples.
        prompts: where the ground truth comes from; every prompt_id of `samples` must be among them.
        rewards: names of the tags and the meaning of "equal"; its functions are not looked at.
    """
    truth = {prompt.prompt_id: prompt.answer for prompt in prompts}
    unknown = set(samples["prompt_id"]) - truth.keys()
    assert not unknown, f"samples of prompts that were not asked: {sorted(unknown)[:3]}"
    tags = Tags.of(rewards.tags)
    verdicts = [
        _judge(completion, truth[prompt_id], tags, rewards.equality)
        for prompt_id, completion in samples.select("prompt_id", "completion").iter_rows()
    ]
    strict_format, correct, lenient = zip(*verdicts, strict=True) if verdicts else ((), (), ())
    return samples.with_columns(
        pl.Series("strict_format", strict_format, dtype=pl.Boolean),
        pl.Series("correct", correct, dtype=pl.Boolean),
        pl.Series("lenient_correct", lenient, dtype=pl.Boolean),
        # By the finish reason, never by the last token: a stop string ends a completion just as well.
        (pl.col("finish_reason") == "length").alias("truncated"),
    )


def _judge(completion: str, truth: str, tags: Tags, equality: Equality) -> tuple[bool, bool, bool]:
    found = extract_answer(completion, tags)
    right = found.strict_format and found.answer is not None and answers_equal(found.answer, truth, equality)
    lenient = right or (found.lenient_answer is not None and answers_equal(found.lenient_answer, truth, equality))
    return found.strict_format, right, lenient


def summarise(scored: pl.DataFrame, evaluation: EvaluationConfig) -> Figures:
    """Every figure of the evaluation with its interval over prompts, from a scored table.

    Asserts that each prompt has exactly `evaluation.num_samples` samples, and one greedy completion where they were asked for.
    """
    sampled, greedy = scored.filter(pl.col("sample") != GREEDY), scored.filter(pl.col("sample") == GREEDY)
    assert_whole(scored, evaluation)
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
    return Figures(metrics=metrics, pass_at_k=rungs)


def assert_whole(samples: pl.DataFrame, evaluation: EvaluationConfig) -> None:
    """Every prompt has each of its samples once: a missing or doubled one would tilt every figure."""
    wanted = {*range(evaluation.num_samples), *([GREEDY] if evaluation.greedy else [])}
    per_prompt = samples.group_by("prompt_id").agg(pl.col("sample").sort())
    odd = per_prompt.filter(pl.col("sample") != pl.lit(sorted(wanted)))
    assert per_prompt.height, "no samples at all"
    assert odd.is_empty(), f"prompt {odd['prompt_id'][0]} has samples {odd['sample'][0].to_list()}, wanted {sorted(wanted)}"


def _means(table: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """One mean a prompt, in a fixed order of prompts."""
    means = table.group_by("prompt_id").agg(pl.col(column).mean().cast(pl.Float64)).sort("prompt_id")
    return means[column].to_numpy()
