"""One round: completions of new prompts, sampled, scored, and turned into advantages.

sample -> score -> (all processes) -> advantages -> refill dead groups, if asked -> Round
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from grpo_tasks.data.table import PromptRow
from grpo_tasks.grpo.advantages import Advantages, Rewards, advantages
from grpo_tasks.grpo.groups import ScoredRollout, join, sample_groups, score_groups, take_groups
from grpo_tasks.grpo.ranks import Processes
from grpo_tasks.grpo.schedule import PromptSchedule
from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import RolloutEngine, Sampling, completion_seed
from grpo_tasks.stage.stage_dir import StageSpec


@dataclass(frozen=True, slots=True)
class Round:
    """A scored rollout with its advantages."""

    scored: ScoredRollout
    advantages: Advantages
    dropped: int
    """Groups that were sampled and left out, because a refill found better ones or was itself dead."""
    tokens: int
    """Tokens of all prompts and completions sampled, those of dropped groups included."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects rounds; what a round holds depends on its number and the policy's weights alone."""

    engine: RolloutEngine
    suite: RewardSuite
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[PromptRow]
    schedule: PromptSchedule
    spec: StageSpec
    seed: int
    processes: Processes

    def collect(self, number: int, *, step: int) -> Round:
        """The round of that number, counted from 0, for the updates that begin with `step`."""
        self.engine.sync()
        return self.sample(number, step=step)

    def sample(self, number: int, *, step: int) -> Round:
        """The same from the weights that the engine has already."""
        stage = self.spec.stage
        rows = [self.rows[place] for place in self.schedule.prompts_of(number)]
        scored = self._sample(rows, completion_seed(self.seed, "rollout", number), step)
        gained = advantages(rewards_of(scored), stage)
        groups, tokens = len(gained.dead), scored.rollout.num_tokens
        for refill in range(1, stage.max_refills + 1):
            wanted = int(gained.dead.sum())
            if wanted == 0:
                break
            seed = completion_seed(self.seed, "refill", refill, number)
            places = PromptSchedule(len(self.rows), self.schedule.per_rollout, seed).prompts_of(0)[:wanted]
            fresh = self._sample([self.rows[place] for place in places], seed, step)
            alive = (~advantages(rewards_of(fresh), stage).dead).nonzero().flatten() + len(gained.dead)
            replaced = gained.dead.nonzero().flatten()[: len(alive)]
            chosen = torch.arange(len(gained.dead))
            chosen[replaced] = alive[: len(replaced)]
            groups, tokens = groups + wanted, tokens + fresh.rollout.num_tokens
            scored = take_groups(join([scored, fresh]), chosen.tolist())
            gained = advantages(rewards_of(scored), stage)
        self.engine.sleep()
        self.suite.adapt(scored.scores)
        return Round(scored, gained, dropped=groups - len(gained.dead), tokens=tokens)

    def look(self, rows: Sequence[PromptRow], *, step: int) -> ScoredRollout:
        """One completion for each of these rows by the policy as it is now; the draws are the same every time."""
        self.engine.sync()
        scored = self._sample(rows, completion_seed(self.seed, "look"), step, size=1)
        self.engine.sleep()
        return scored

    def _sample(self, rows: Sequence[PromptRow], seed: int, step: int, size: int | None = None) -> ScoredRollout:
        """Groups of completions of these rows, every process its share of them."""
        mine = self.processes.share(range(len(rows)))
        size = size or self.spec.stage.num_generations
        share = self._sample_share([rows[at] for at in mine], mine, seed, step, size) if mine else None
        return join([part for part in self.processes.everyone(share) if part is not None])

    def _sample_share(self, rows: Sequence[PromptRow], numbers: Sequence[int], seed: int, step: int, size: int) -> ScoredRollout:
        prompts = [prompt_ids(self.tokenizer, row.messages) for row in rows]
        sampling = Sampling.of(self.spec.rollout)
        rollout = sample_groups(self.engine, rows, prompts, sampling, numbers=numbers, group_size=size, seed=seed)
        return score_groups(self.suite, rollout, step=step)


class OneAhead:
    """Rounds in their order, each sampled while the policy trains on the one before, so from weights that are one round older."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._next: Future[Round] | None = None

    def take(self, number: int, *, step: int, next_step: int | None) -> Round:
        """The round of that number; then the next one, whose updates begin with `next_step`, is begun, unless that is None."""
        current = self._collector.collect(number, step=step) if self._next is None else self._next.result()
        self._next = None
        if next_step is not None:
            # Here and not in the thread: the weights must not change while they are written down.
            self._collector.engine.sync()
            self._next = self._pool.submit(self._collector.sample, number + 1, step=next_step)
        return current

    def drop(self) -> None:
        """Leave out a round that was sampled from weights that are gone."""
        if self._next is not None:
            self._next.result()
        self._next = None

    def close(self) -> None:
        """Wait for a round that nobody trains on, while what it is sampled with still lives."""
        self._pool.shutdown(cancel_futures=True)


def rewards_of(scored: ScoredRollout) -> Rewards:
    """Scores as tensors; where one function scored token by token, the others count alike at every token of a completion."""
    scores = scored.scores
    raw, weights = torch.from_numpy(scores.raw).float(), torch.from_numpy(scores.weights).float()
    if not scores.tokens:
        return Rewards(raw, weights)
    completions = scored.rollout.completions
    rows = [np.tile(row, (len(completion.token_ids), 1)) for row, completion in zip(scores.raw, completions, strict=True)]
    for function, given in scores.tokens.items():
        for index, values in given.items():
            rows[index][:, function] = values
    padded = pad_sequence([torch.from_numpy(row).float() for row in rows], batch_first=True, padding_value=torch.nan)
    return Rewards(raw, weights, padded)
