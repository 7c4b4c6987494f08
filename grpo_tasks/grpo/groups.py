"""Groups: G completions of each prompt, sampled and scored."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_tasks.content.conversations import Played
from grpo_tasks.rewards.contract import batch_of
from grpo_tasks.rewards.suite import RewardSuite, Scores, charge_faults, total_scores
from grpo_tasks.rollout.conversations.play import Player, Start
from grpo_tasks.rollout.engine import Completion, Request, RolloutEngine, Sampling, completion_seed
from schemas.prompts import PromptRow


@dataclass(frozen=True, slots=True)
class Rollout:
    """P prompts with G completions each; completions are ordered group by group, N = P G."""

    rows: Sequence[PromptRow]
    prompts: Sequence[Sequence[int]]
    """Token ids of the P prompts."""
    completions: Sequence[Completion]
    group_size: int
    seconds: float
    """Time spent sampling."""

    @property
    def prompt_of(self) -> list[int]:
        """For each completion the index of its prompt."""
        return [index for index in range(len(self.rows)) for _ in range(self.group_size)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions, each with its prompt."""
        sampled = sum(len(completion.token_ids) for completion in self.completions)
        return sampled + sum(len(self.prompts[prompt]) for prompt in self.prompt_of)


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
    numbers: Sequence[int],
    group_size: int,
    seed: int,
) -> Rollout:
    """Sample `group_size` completions for each prompt. Their seeds depend on its number in the rollout, not on rank or batch."""
    began = time.perf_counter()
    requests = [
        Request(ids, completion_seed(seed, number, row.prompt_id) + index)
        for number, row, ids in zip(numbers, rows, prompts, strict=True)
        for index in range(group_size)
    ]
    completions = engine.generate(requests, sampling)
    return Rollout(rows, prompts, completions, group_size, time.perf_counter() - began)


def play_groups(
    engine: RolloutEngine,
    player: Player,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    *,
    numbers: Sequence[int],
    group_size: int,
    seed: int,
) -> Rollout:
    """Play `group_size` conversations for each row, with the seeds of `sample_groups`. The environment may change the prompt."""
    began = time.perf_counter()
    starts = []
    for number, row in zip(numbers, rows, strict=True):
        first, environment = (
            completion_seed(seed, number, row.prompt_id),
            completion_seed(seed, "environment", number, row.prompt_id),
        )
        starts += [Start(row, first + index, environment) for index in range(group_size)]
    completions = player.play(engine, starts, sampling)
    return Rollout(rows, group_prompts(completions, group_size), completions, group_size, time.perf_counter() - began)


def group_prompts(completions: Sequence[Completion], group_size: int) -> list[Sequence[int]]:
    """The prompt of each group of conversations: that of the first one that has begun."""
    prompts: list[Sequence[int]] = []
    for start in range(0, len(completions), group_size):
        group = [one.conversation for one in completions[start : start + group_size] if one.conversation is not None]
        prompts.append(next((one for one in group if one.turns), group[0]).prompt_ids)
    return prompts


def score_groups(suite: RewardSuite, rollout: Rollout, *, step: int) -> ScoredRollout:
    """Score every completion with every reward function of the stage."""
    began = time.perf_counter()
    found = [completion.conversation for completion in rollout.completions]
    batch = batch_of(
        [rollout.rows[index] for index in rollout.prompt_of],
        [completion.text for completion in rollout.completions],
        [completion.token_ids for completion in rollout.completions],
        prompt_ids=[rollout.prompts[index] for index in rollout.prompt_of],
        step=step,
        # Empty when completions are one turn each.
        played=[
            Played(one.prompt, one.said, [turn.for_rewards() for turn in one.turns], one.reward, one.error is not None)
            for one in found
            if one is not None
        ],
    )
    return ScoredRollout(rollout, suite.score(batch), time.perf_counter() - began)


def with_charged_faults(scored: ScoredRollout) -> ScoredRollout:
    """The rollout in which conversations that a fault ended have the lowest scores of their group, or of their task.

    A fault that does not depend on what the policy wrote then only adds noise, and one that the policy causes is worth no more
    than the worst honest conversation. A conversation that has not begun has no tokens, and keeps out of the baseline of its
    group.
    """
    rollout, scores = scored.rollout, scored.scores
    failed = np.array([one.failed and len(one.token_ids) > 0 for one in rollout.completions], dtype=bool)
    if not failed.any():
        return scored
    prompts = np.array(rollout.prompt_of)
    raw = charge_faults(scores.raw, scores.weights, failed, prompts, np.array([row.task for row in rollout.rows])[prompts])
    return replace(scored, scores=replace(scores, raw=raw, totals=total_scores(raw, scores.weights)))


def join(several: Sequence[ScoredRollout]) -> ScoredRollout:
    """Several rollouts as one, their groups in this order. They were sampled at the same time, so the longest time counts."""
    rollouts = [scored.rollout for scored in several]
    joined = Rollout(
        [row for rollout in rollouts for row in rollout.rows],
        [prompt for rollout in rollouts for prompt in rollout.prompts],
        [completion for rollout in rollouts for completion in rollout.completions],
        rollouts[0].group_size,
        max(rollout.seconds for rollout in rollouts),
    )
    return ScoredRollout(joined, Scores.join([scored.scores for scored in several]), max(scored.seconds for scored in several))


def take_groups(scored: ScoredRollout, groups: Sequence[int]) -> ScoredRollout:
    """The rollout of these groups, in this order."""
    rollout, size = scored.rollout, scored.rollout.group_size
    indices = [group * size + sample for group in groups for sample in range(size)]
    rows, prompts = [rollout.rows[group] for group in groups], [rollout.prompts[group] for group in groups]
    taken = replace(rollout, rows=rows, prompts=prompts, completions=[rollout.completions[index] for index in indices])
    return ScoredRollout(taken, scored.scores.take(indices), scored.seconds)
