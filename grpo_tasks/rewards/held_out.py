"""Scores of sampled completions by reward functions, as columns for the evaluation, which knows no reward.

A column is null where no function, or the function, applies. A conversation that a fault of its environment ended has the lowest
scores of its task, and is never solved. A failure of a function follows its `on_error`, as in training.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.content.conversations import fault_of, played_of
from grpo_tasks.kit.progress import Count
from grpo_tasks.rewards.contract import batch_of
from grpo_tasks.rewards.suite import RewardSuite, Scores, charge_faults, full_score, solved, stage_weights, total_scores
from schemas.config.completion import CompletionConfig
from schemas.config.run import RunConfig, Scoring
from schemas.metrics import REWARD, REWARD_MEAN, member
from schemas.prompts import PromptRow

_LOGGER = logging.getLogger(__name__)
CHUNK = 64
"""Completions in one call of a function, about as many as in an update. Chunks hold whole prompts where these are smaller."""
Draw = Callable[[Sequence[str] | None, range], pl.DataFrame]
"""Samples completions: prompt ids (None: all prompts) and sample numbers -> columns prompt_id, sample, completion, token_ids."""


def reward_columns(
    samples: pl.DataFrame,
    rows: Sequence[PromptRow],
    scoring: Scoring,
    *,
    completion: CompletionConfig,
    per_prompt: int,
    log: Path | None = None,
) -> pl.DataFrame:
    """One row per sample, in their order: column `reward` if any function has a weight, and one column per function.

    `samples` has the columns prompt_id, completion and token_ids, `per_prompt` of them for each prompt, and `rows` the row of
    every prompt_id. `log` receives what the functions print. `RewardError` where one with on_error raise failed, `ConfigError`
    where one cannot be loaded.
    """
    by_id = {row.prompt_id: row for row in rows}
    chunk = max(1, CHUNK // per_prompt) * per_prompt
    names = [*scoring.weighted, *scoring.reported]
    batches, count = [], Count("scoring", samples.height, "completions")
    with RewardSuite(scoring.rewards, names, completion=completion, tasks=scoring.tasks, log=log) as suite:
        for part in samples.iter_slices(chunk):
            asked = [by_id[prompt_id] for prompt_id in part["prompt_id"]]
            played = [played_of(text) for text in part["conversation"]] if "conversation" in part.columns else []
            batches.append(suite.score(batch_of(asked, part["completion"].to_list(), part["token_ids"].to_list(), played=played)))
            count.add(part.height)
    scores = Scores.join(batches)
    for note in scores.notes:
        _LOGGER.warning("evaluation: %s", note)
    tasks = np.array([by_id[prompt_id].task for prompt_id in samples["prompt_id"]])
    raw = charge_faults(scores.raw, scores.weights, _failed(samples), tasks)
    columns = {member(REWARD_MEAN, name): raw[:, index] for index, name in enumerate(scores.names)}
    if scoring.weighted:
        weighted = len(scoring.weighted)
        columns[REWARD] = total_scores(raw[:, :weighted], scores.weights[:weighted])
    return pl.DataFrame(columns).with_columns(pl.all().fill_nan(None))


def solved_by_stage(
    samples: pl.DataFrame, rows: Sequence[PromptRow], config: RunConfig, *, per_prompt: int, log: Path | None = None
) -> pl.DataFrame:
    """A column for each stage: 1 for a sample that its rewards count as solved, else 0; null where no function applies."""
    names = list(dict.fromkeys(name for stage in config.stages for name in stage.rewards))
    scoring = Scoring(rewards=config.rewards, weighted=[], reported=names, tasks=config.task_rewards())
    table = reward_columns(samples, rows, scoring, completion=config.completion, per_prompt=per_prompt, log=log)
    columns = {}
    for stage in config.stages:
        scores = table.select(member(REWARD_MEAN, name) for name in stage.rewards).fill_null(np.nan).to_numpy()
        full = np.array([full_score(one) for name in stage.rewards if (one := config.rewards.resolve(name))])
        reached = solved(scores, stage_weights(stage, config.rewards), full, config.difficulty.success)
        # Where functions only punish, the lowest scores may be the full reward.
        reached[_failed(samples) & ~np.isnan(reached)] = 0.0
        columns[stage.name] = pl.Series(reached, nan_to_null=True)
    return pl.DataFrame(columns)


def _failed(samples: pl.DataFrame) -> NDArray[np.bool_]:
    """[N] conversations that a fault ended."""
    if "conversation" not in samples.columns:
        return np.zeros(samples.height, dtype=bool)
    return np.array([fault_of(text) is not None for text in samples["conversation"]], dtype=bool)


def solved_samples(draw: Draw, rows: Sequence[PromptRow], config: RunConfig, *, log: Path | None = None) -> pl.DataFrame:
    """The completions, with a column for each stage as `solved_by_stage` returns them; those of a prompt follow each other.

    With a screening, a prompt that no stage's rewards count as solved in its first `screen` completions gets no more. The
    completions of a prompt that passes are those that it would have without a screening: sample numbers, and with them the seeds,
    go on. Errors are those of `reward_columns`.
    """

    def scored(prompts: Sequence[str] | None, numbers: range) -> pl.DataFrame:
        samples = draw(prompts, numbers)
        return samples.hstack(solved_by_stage(samples, rows, config, per_prompt=len(numbers), log=log))

    if not config.difficulty.screen:
        return scored(None, range(config.difficulty.samples))
    first = scored(None, range(config.difficulty.screen))
    once = pl.max_horizontal(stage.name for stage in config.stages) > 0
    passed = first.filter(once)["prompt_id"].unique(maintain_order=True).to_list()
    if not passed:
        return first
    rest = scored(passed, range(config.difficulty.screen, config.difficulty.samples))
    return pl.concat([first, rest]).sort("prompt_id", "sample", maintain_order=True)
