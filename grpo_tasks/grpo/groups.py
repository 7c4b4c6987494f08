"""Groups: G completions of each prompt, sampled and scored."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_tasks.data.table import PromptRow
from grpo_tasks.rewards.compose import RewardSuite, Scores
from grpo_tasks.rewards.contract import ScoreBatch
from grpo_tasks.rollout.engine import Completion, Request, RolloutEngine, Sampling, completion_seed


@dataclass(frozen=True, slots=True)
class Rollout:
    """P prompts with G completions each; completions stand group by group, N = P G."""

    rows: Sequence[PromptRow]
    prompts: Sequence[Sequence[int]]
    """Token ids of the P prompts."""
    completions: Sequence[Completion]
    group_size: int
    seconds: float
    """Time spent sampling."""

    @property
    def prompt_of(self) -> list[int]:
        """For each completion the number of its prompt."""
        return [index for index in range(len(self.rows)) for _ in range(self.group_size)]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its rewards."""

    rollout: Rollout
    scores: Scores
    seconds: float
    """Time spent in reward functions."""


def sample_groups(
    engine: RolloutEngine,
    rows: Sequence[PromptRow],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    group_size: int,
    seed: int,
) -> Rollout:
    """Sample `group_size` completions for each prompt; `seed` is that of this rollout."""
    began = time.perf_counter()
    requests = [
        Request(ids, completion_seed(seed, place, row.prompt_id, index))
        for place, (row, ids) in enumerate(zip(rows, prompts, strict=True))
        for index in range(group_size)
    ]
    completions = engine.generate(requests, sampling)
    return Rollout(rows, prompts, completions, group_size, time.perf_counter() - began)


def score_groups(suite: RewardSuite, rollout: Rollout, *, step: int) -> ScoredRollout:
    """Ask every reward function of the stage about every completion."""
    began = time.perf_counter()
    repeated = [rollout.rows[index] for index in rollout.prompt_of]
    columns: dict[str, list[object]] = {"answer": [row.answer for row in repeated]}
    names = sorted({name for row in rollout.rows for name in row.extra} - {"answer", "prompts", "completions", "completion_ids"})
    for name in names:
        columns[name] = [row.extra.get(name) for row in repeated]
    scores = suite.score(
        ScoreBatch(
            prompts=[list(row.messages) for row in repeated],
            completions=[completion.text for completion in rollout.completions],
            completion_ids=[completion.token_ids for completion in rollout.completions],
            columns=columns,
            step=step,
            places=[f"{row.source}:{row.line} ({row.prompt_id})" for row in repeated],
        )
    )
    assert np.isfinite(scores.totals).all()
    return ScoredRollout(rollout, scores, time.perf_counter() - began)
