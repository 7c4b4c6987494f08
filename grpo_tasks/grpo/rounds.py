"""One round: new prompts, completions sampled from the policy, scored, and turned into advantages.

    max_staleness 0     sample 1 | train 1 | sample 2 | train 2 | ...
    max_staleness 1     train 1 | train 2 | train 3 | ...                  round n + 1 is sampled by the policy that enters
                        sample 2 | sample 3 | sample 4 | ...               the training on round n

Which policy samples a round depends on the round's number and on the barriers only, never on how fast anything is: a stage that
is run again ends in the same bytes. A barrier is an update with a checkpoint or a held-out evaluation: nothing is started beyond
it, so no round is in flight there.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from grpo_tasks.grpo.advantages import Advantages, Rewards, advantages
from grpo_tasks.grpo.demonstrations import Demonstrations
from grpo_tasks.grpo.groups import (
    Rollout,
    ScoredRollout,
    join,
    play_groups,
    sample_groups,
    score_groups,
    take_groups,
    with_charged_faults,
)
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.schedule import PromptSchedule
from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.rewards.suite import RewardSuite, Scores
from grpo_tasks.rollout.conversations.play import Player
from grpo_tasks.rollout.engine import Completion, EngineReport, RolloutEngine, Sampling, completion_seed
from grpo_tasks.rollout.vllm_engine import VllmEngine, Weights
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from schemas.metrics import POLICY_LAG, SAMPLER_WAIT, TRAINER_WAIT
from schemas.prompts import PromptRow


@dataclass(frozen=True, slots=True)
class Round:
    """A scored rollout with its advantages; one update trains on it, or several."""

    scored: ScoredRollout
    advantages: Advantages
    dropped: int
    """Groups that were sampled and not used, because a replacement was better or was itself dead."""
    tokens: int
    """Tokens of all prompts and completions sampled, including those of dropped groups."""
    version: int = 0
    """The policy that sampled: the number of updates that it had had."""
    report: EngineReport = field(default_factory=EngineReport)
    """Figures and events of the engine while it sampled."""

    def with_live_groups_of(self, fresh: "Round") -> ScoredRollout:
        """The rollout with its dead groups replaced by live groups of `fresh`, as far as there are any."""
        dead = self.advantages.dead
        num = len(dead)
        # In the joined rollout the fresh groups follow the old ones: fresh group i has the index num + i.
        alive = (~fresh.advantages.dead).nonzero().flatten() + num
        replaced = dead.nonzero().flatten()[: len(alive)]
        chosen = torch.arange(num)  # [P]: the group at each position of the rollout
        chosen[replaced] = alive[: len(replaced)]
        return take_groups(join([self.scored, fresh.scored]), chosen.tolist())


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects rounds. What a round contains depends only on its number and on the weights of the policy."""

    engine: RolloutEngine
    suite: RewardSuite
    tokenizer: PreTrainedTokenizerBase
    rows: Sequence[PromptRow]
    schedule: PromptSchedule
    spec: StageSpec
    seed: int
    ranks: Ranks
    player: Player | None = None
    """Plays conversations; None: completions are one turn each."""

    def sample(self, number: int, *, step: int, version: int) -> Round:
        """Round `number`, counted from 0, for the updates from `step` on; the engine's weights have had `version` updates."""
        current = self._round(self.schedule.prompts_of(number), completion_seed(self.seed, "rollout", number), step)
        for refill in range(1, self.spec.stage.max_refills + 1):
            wanted = int(current.advantages.dead.sum())
            if not wanted:
                break
            # Dynamic sampling (arXiv:2503.14476, 3.2): dead groups are replaced by groups of further prompts. These have an order
            # of their own: the prompts of later rounds do not depend on how many refills this one needs.
            seed = completion_seed(self.seed, "refill", refill, number)
            fresh = self._round(replace(self.schedule, seed=seed).prompts_of(0)[:wanted], seed, step)
            scored = current.with_live_groups_of(fresh)
            # All advantages again: with `scale_rewards: batch` the deviation is that of the groups that are trained on.
            gained = advantages(rewards_of(scored), self.spec.stage)
            current = Round(scored, gained, current.dropped + wanted, current.tokens + fresh.tokens)
        # A server on the same GPU releases its memory for the update.
        self.engine.sleep()
        # Adaptive weights move once per round, after all of its groups were scored with the same weights.
        self.suite.adapt(current.scored.scores)
        return replace(current, version=version, report=self.engine.report())

    def evaluate_held_out(self, rows: Sequence[PromptRow], *, step: int) -> ScoredRollout:
        """One completion for each of these rows, sampled from the present weights with the same random numbers every time."""
        self.engine.sync()
        # The word in the seed decides the draws: another one would change the figures of every stage.
        scored = self._score(rows, completion_seed(self.seed, "look"), step, group_size=1)
        self.engine.sleep()
        return scored

    def _round(self, numbers: Sequence[int], seed: int, step: int) -> Round:
        """Rollout, score and advantages of the training rows with these numbers."""
        scored = self._score([self.rows[number] for number in numbers], seed, step, self.spec.stage.num_generations)
        return Round(scored, advantages(rewards_of(scored), self.spec.stage), 0, scored.rollout.num_tokens)

    def _score(self, rows: Sequence[PromptRow], seed: int, step: int, group_size: int) -> ScoredRollout:
        """Scored groups of completions of these rows: each rank samples its share, then all ranks know all of them."""
        # Complete groups per rank, so that a rank encodes each of its prompts once.
        numbers = self.ranks.share(range(len(rows)))
        share = None
        if numbers:  # with fewer prompts than ranks some ranks have none; they still join in the gather
            mine, sampling = [rows[number] for number in numbers], Sampling.of(self.spec.rollout)
            if self.player is not None:
                rollout = play_groups(self.engine, self.player, mine, sampling, numbers=numbers, group_size=group_size, seed=seed)
            else:
                prompts = [prompt_ids(self.tokenizer, row.messages) for row in mine]
                rollout = sample_groups(self.engine, mine, prompts, sampling, numbers=numbers, group_size=group_size, seed=seed)
            share = score_groups(self.suite, rollout, step=step)
        # Of all ranks together, so that what a fault costs does not depend on their number.
        return with_charged_faults(join([scored for scored in self.ranks.gather(share) if scored is not None]))


class Rounds:
    """Rounds in their order; `may_start` says whether the round behind so many updates may be started before they were made."""

    def __init__(self, collector: Collector, *, updates: int, max_staleness: int, may_start: Callable[[int], bool]) -> None:
        self._collector, self._updates, self._may_start = collector, updates, may_start
        self.ahead = max_staleness // updates
        """Rounds that are sampled while the policy trains on an earlier one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._started: dict[int, Future[Round]] = {}
        self._loaded: Weights | None = None
        self._ended: float | None = None
        """When (s) the last round was sampled."""

    def take(self, number: int) -> Round:
        """Round `number`, counted from 0; starts later ones. TrainingError where an older policy sampled it than is allowed."""
        if not self.ahead:
            began = time.perf_counter()
            # The engine takes over the weights first: sampled from any others the update would be off-policy.
            self._collector.engine.sync()
            current = self._sample(number, number * self._updates)
        else:
            self._start(number)
            began = time.perf_counter()
            current = self._started.pop(number).result()
        lag = number * self._updates - current.version
        if lag > self.ahead * self._updates:
            # The correction is made for the configured age, so training would continue on something else than was asked for.
            raise TrainingError(
                f"round {number} was sampled by a policy that is {lag} updates old, {self.ahead * self._updates} are allowed",
                place="rollout.max_staleness",
                fix="start the same command again: the stage resumes from its last checkpoint. Please report this fault of ours",
            )
        if not isinstance(self._collector.engine, VllmEngine):
            return current
        waits = {TRAINER_WAIT: time.perf_counter() - began, POLICY_LAG: float(lag)}
        return replace(current, report=EngineReport(current.report.figures | waits, current.report.events))

    def drop(self) -> None:
        """Discard the rounds in flight: their weights were rolled back."""
        # Waited for and not cancelled: which of them move the adaptive reward weights must not depend on how far they are.
        for future in self._started.values():
            future.result()
        self._started.clear()

    def close(self) -> None:
        """Wait for a round that is still being sampled, as long as its engine and its reward functions are there."""
        self._thread.shutdown(cancel_futures=True)

    def _start(self, number: int) -> None:
        """Start round `number`, if it was not started ahead, and those ahead of it, all from the present weights."""
        wanted = [number]
        for later in range(number + 1, number + self.ahead + 1):
            if not self._may_start(later * self._updates):
                break
            wanted.append(later)
        missing = [each for each in wanted if each not in self._started]
        if not missing:
            return
        engine = self._collector.engine
        assert isinstance(engine, VllmEngine)
        # In this thread: the weights must not change while they are saved.
        weights = engine.prepare()
        for each in missing:
            here, version = copy_context(), number * self._updates
            self._started[each] = self._thread.submit(here.run, self._sample, each, version, weights)

    def _sample(self, number: int, version: int, weights: Weights | None = None) -> Round:
        """A round, from weights that the engine loads first or from those that it has."""
        engine = self._collector.engine
        if weights is not None and weights is not self._loaded and isinstance(engine, VllmEngine):
            engine.load(weights)
            self._loaded = weights
        began = time.perf_counter()
        waited = 0.0 if self._ended is None else began - self._ended
        current = self._collector.sample(number, step=number * self._updates + 1, version=version)
        self._ended = time.perf_counter()
        report = current.report
        if isinstance(engine, VllmEngine):
            report = EngineReport(report.figures | {SAMPLER_WAIT: waited}, report.events)
        return replace(current, report=report)


class DemonstrationRounds:
    """Rounds of kind sft: the demonstrations of the next prompts, as completions that somebody else wrote."""

    ahead = 0

    def __init__(self, found: Demonstrations, schedule: PromptSchedule) -> None:
        self._found, self._schedule = found, schedule

    def take(self, number: int) -> Round:
        """Round `number`, counted from 0; no reward compares its texts, and none is left out."""
        numbers = self._schedule.prompts_of(number)
        rows, made = [self._found.rows[index] for index in numbers], [self._found.tokens[index] for index in numbers]
        texts = [Completion(one.token_ids, [0.0] * len(one.token_ids), one.text, "stop", written=one.trained) for one in made]
        rollout, count = Rollout(rows, [one.prompt for one in made], texts, group_size=1, seconds=0.0), len(rows)
        scores = Scores([], np.empty((count, 0)), np.empty(0), np.empty(0), np.full(count, np.nan), [])
        gained = Advantages(torch.zeros(count, 1), torch.zeros(count), torch.zeros(count, dtype=torch.bool))
        return Round(ScoredRollout(rollout, scores, 0.0), gained, 0, rollout.num_tokens, version=number)

    def drop(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing is sampled."""


def rewards_of(scored: ScoredRollout) -> Rewards:
    """Scores as tensors [N, F]; with per-token scores also [N, T, F]."""
    scores = scored.scores
    raw, weights = torch.from_numpy(scores.raw).float(), torch.from_numpy(scores.weights).float()
    if not scores.tokens:
        return Rewards(raw, weights)
    completions = scored.rollout.completions
    # A function that scored the completion counts with that score at each of its tokens: [F] -> [T, F].
    rows = [np.tile(row, (len(completion.token_ids), 1)) for row, completion in zip(scores.raw, completions, strict=True)]
    # A function that scored tokens replaces its column, completion by completion.
    for function, given in scores.tokens.items():
        for index, values in given.items():
            rows[index][:, function] = values
    for row, completion in zip(rows, completions, strict=True):
        if completion.written is not None:
            # What others said has no advantage, and no tie depends on it.
            row[~np.array(completion.written, dtype=bool)] = np.nan
    # NaN on padding: it counts in no mean and gets the advantage 0.
    padded = pad_sequence([torch.from_numpy(row).float() for row in rows], batch_first=True, padding_value=torch.nan)
    return Rewards(raw, weights, padded)
