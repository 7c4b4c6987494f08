"""One round: new prompts, completions sampled from the policy, scored, and turned into advantages.

    max_staleness 0     sample 1 | train 1 | sample 2 | train 2 | ...
    max_staleness 1     train 1 | train 2 | train 3 | ...                  round n + 1 is sampled by the policy that enters
                        sample 2 | sample 3 | sample 4 | ...               the training on round n

Which prompts a round has, and which policy samples it, depends on its number, the seed and the barriers only, never on how fast
anything is: a stage that is run again samples from the same policies, and a resumed one needs no sampler state. A barrier is an
update with a checkpoint or a held-out evaluation: nothing is started beyond it, so no round is in flight there.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.conversations import Played
from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.demonstrations import Demonstrations
from grpo_tasks.grpo.advantages import Advantages, Rewards, advantages
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.rewards.contract import batch_of
from grpo_tasks.rewards.suite import RewardSuite, Scores, charge_faults, total_scores
from grpo_tasks.rollout.conversations import Player, Start
from grpo_tasks.rollout.engine import Completion, EngineReport, Request, RolloutEngine, Sampling, completion_seed
from grpo_tasks.rollout.vllm_engine import VllmEngine, Weights
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.data import TaskConfig
from schemas.errors import TrainingError
from schemas.metrics import POLICY_LAG, SAMPLER_WAIT, TRAINER_WAIT
from schemas.prompts import PromptRow


@dataclass(frozen=True, slots=True)
class TaskShare:
    """The rows of one task, and its share of the prompts."""

    name: str
    weight: float
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Tasks by turns, so that any run of prompts holds each task as often as its weight says, to within a prompt or two.

    The j-th prompt of a task (from 0) is due at (j + 1/2) / weight, and prompts follow each other as they are due.
    """

    tasks: tuple[TaskShare, ...]

    @classmethod
    def of(cls, row_tasks: Sequence[str], settings: Mapping[str, TaskConfig]) -> "Mixture | None":
        """The mixture of rows by their tasks; None where all rows have the same chance: one task, or none configured."""
        names = sorted(set(row_tasks))
        if not settings or len(names) == 1:
            return None
        rows = {name: tuple(index for index, task in enumerate(row_tasks) if task == name) for name in names}
        default = TaskConfig().weight
        weights = {name: settings[name].weight if name in settings else default for name in names}
        return cls(tuple(TaskShare(name, weights[name], rows[name]) for name in names))

    def turns(self, start: int, end: int) -> list[tuple[TaskShare, int]]:
        """Task of each of the prompts `start` .. `end` - 1, and how many prompts of that task come before it."""
        # All prompts due before this time come before `start`; so the walk is short, wherever it begins.
        safe = max(0.0, (start - len(self.tasks)) / sum(task.weight for task in self.tasks))
        counts = [max(0, math.ceil(safe * task.weight - 0.5)) for task in self.tasks]
        turns = []
        for position in range(sum(counts), end):
            due = [(count + 0.5) / task.weight for count, task in zip(counts, self.tasks, strict=True)]
            turn = due.index(min(due))
            if position >= start:
                turns.append((self.tasks[turn], counts[turn]))
            counts[turn] += 1
        return turns


@dataclass(frozen=True, slots=True)
class PromptSchedule:
    """Prompts in a new order each epoch, of each task with a mixture."""

    num_prompts: int
    per_rollout: int
    seed: int
    mixture: Mixture | None = None

    def prompts_of(self, rollout: int) -> list[int]:
        """Row numbers of the prompts of one rollout, counted from 0."""
        # Positions in the endless sequence of all epochs.
        positions = range(rollout * self.per_rollout, (rollout + 1) * self.per_rollout)
        orders: dict[tuple[int | str, ...], np.ndarray] = {}

        def drawn(position: int, size: int, *parts: int | str) -> int:
            epoch, place = divmod(position, size)
            if (*parts, epoch) not in orders:
                draw = np.random.default_rng(completion_seed(self.seed, *parts, epoch))
                orders[*parts, epoch] = draw.permutation(size)
            return int(orders[*parts, epoch][place])

        if self.mixture is None:
            return [drawn(position, self.num_prompts, "epoch") for position in positions]
        turns = self.mixture.turns(positions.start, positions.stop)
        return [task.rows[drawn(number, len(task.rows), "task", task.name)] for task, number in turns]


@dataclass(frozen=True, slots=True)
class Rollout:
    """P prompts with G completions each; completions are ordered group by group, N = P G."""

    rows: Sequence[PromptRow]
    prompts: Sequence[Sequence[int]]
    """Token ids."""
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
    """Time spent scoring."""


@dataclass(frozen=True, slots=True)
class Round:
    """A scored rollout with its advantages, for one update or several."""

    scored: ScoredRollout
    advantages: Advantages
    dropped: int
    """Groups that were sampled and not used, because a replacement was better or was itself dead."""
    tokens: int
    """Tokens of all prompts and completions sampled, including those of dropped groups."""
    version: int = 0
    """The policy that sampled: the number of updates that it had had."""
    report: EngineReport = field(default_factory=EngineReport)

    def with_live_groups_of(self, fresh: "Round") -> ScoredRollout:
        """Its dead groups replaced by live groups of `fresh`, as far as there are any."""
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
        """One completion for each row, from the present weights, with the same random numbers every time."""
        self.engine.sync()
        # The word in the seed decides the draws: another one would change the figures of every stage.
        scored = self._score(rows, completion_seed(self.seed, "look"), step, group_size=1)
        self.engine.sleep()
        return scored

    def _round(self, numbers: Sequence[int], seed: int, step: int) -> Round:
        scored = self._score([self.rows[number] for number in numbers], seed, step, self.spec.stage.num_generations)
        return Round(scored, advantages(rewards_of(scored), self.spec.stage), 0, scored.rollout.num_tokens)

    def _score(self, rows: Sequence[PromptRow], seed: int, step: int, group_size: int) -> ScoredRollout:
        """Each rank samples and scores its share, then all ranks know all of them."""
        # Complete groups per rank, so that a rank encodes each of its prompts once.
        numbers = self.ranks.share(range(len(rows)))
        share = None
        if numbers:  # with fewer prompts than ranks some ranks have none; they still join in the gather
            mine, sampling = [rows[number] for number in numbers], Sampling.of(self.spec.rollout)
            given = (self.engine, self.tokenizer, mine, sampling)
            rollout = sample_groups(*given, numbers=numbers, group_size=group_size, seed=seed, player=self.player)
            share = score_groups(self.suite, rollout, step=step)
        # Of all ranks together, so that what a fault costs does not depend on their number.
        return with_charged_faults(join([scored for scored in self.ranks.gather(share) if scored is not None]))


class Rounds:
    """Rounds in their order; `may_start` says whether the round behind so many updates may be started before they are made."""

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
        """Start round `number` and those ahead of it that have not begun, all from the present weights."""
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
    """Rounds of kind sft, in the place of Rounds: demonstrations of the next prompts, as if they had been sampled."""

    ahead = 0

    def __init__(self, found: Demonstrations, schedule: PromptSchedule) -> None:
        self._found, self._schedule = found, schedule

    def take(self, number: int) -> Round:
        """Round `number`, counted from 0; no reward compares its texts, and none is left out."""
        numbers = self._schedule.prompts_of(number)
        rows, made, count = [self._found.rows[at] for at in numbers], [self._found.tokens[at] for at in numbers], len(numbers)
        texts = [Completion(one.token_ids, [0.0] * len(one.token_ids), one.text, "stop", written=one.trained) for one in made]
        rollout = Rollout(rows, [one.prompt for one in made], texts, group_size=1, seconds=0.0)
        scores = Scores([], np.empty((count, 0)), np.empty(0), np.empty(0), np.full(count, np.nan), [])
        gained = Advantages(torch.zeros(count, 1), torch.zeros(count), torch.zeros(count, dtype=torch.bool))
        return Round(ScoredRollout(rollout, scores, 0.0), gained, 0, rollout.num_tokens, version=number)

    def drop(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing is sampled."""


def sample_groups(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    *,
    numbers: Sequence[int],
    group_size: int,
    seed: int,
    player: Player | None = None,
) -> Rollout:
    """Sample `group_size` completions of each row, or with a player conversations; seeds depend on the row's number alone."""
    began = time.perf_counter()
    seeds = [completion_seed(seed, number, row.prompt_id) for number, row in zip(numbers, rows, strict=True)]
    prompts: list[Sequence[int]] = []
    if player is None:
        prompts += [prompt_ids(tokenizer, row.messages) for row in rows]
        requests = [Request(ids, first + index) for ids, first in zip(prompts, seeds, strict=True) for index in range(group_size)]
        completions = engine.generate(requests, sampling)
        return Rollout(rows, prompts, completions, group_size, time.perf_counter() - began)
    starts = []
    for number, row, first in zip(numbers, rows, seeds, strict=True):
        environment = completion_seed(seed, "environment", number, row.prompt_id)
        starts += [Start(row, first + index, environment) for index in range(group_size)]
    completions = player.play(engine, starts, sampling)
    for start in range(0, len(completions), group_size):
        # The environment may change the prompt: that of the first conversation of the group that has begun.
        group = [one.conversation for one in completions[start : start + group_size] if one.conversation is not None]
        prompts.append(next((one for one in group if one.turns), group[0]).prompt_ids)
    return Rollout(rows, prompts, completions, group_size, time.perf_counter() - began)


def score_groups(suite: RewardSuite, rollout: Rollout, *, step: int) -> ScoredRollout:
    """Score every completion by every reward function."""
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
    report(Progress("scoring", total=len(batch), unit="completions"))
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
    """Several rollouts, sampled at the same time, as one; the longest time counts."""
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
