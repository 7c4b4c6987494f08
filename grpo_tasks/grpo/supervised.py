"""The loop of grpo/trainer.py with other rounds and another loss.

    kind sft         demonstrations of the next prompts ----------------------------> microbatches -> cross entropy
    kind rejection   sample -> score (as GRPO does) -> selection of the best ones --> microbatches -> cross entropy

Prompts, order, packed rows, optimizer, journal, checkpoints, guards and resume are those of the engine. A stage that is killed
and started again ends in the same bytes: nothing here depends on anything but the number of the update.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.data.table import read_prompts
from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.demonstrations import REFUSED, Demonstrations, check_share, read_demonstrations
from grpo_tasks.grpo.groups import Rollout, ScoredRollout
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.microbatches import Microbatch, make_microbatches
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.rounds import Round
from grpo_tasks.grpo.trainer import Batch, Trainer
from grpo_tasks.rewards.suite import Scores
from grpo_tasks.rewards.totals import mean_total, solved
from grpo_tasks.rollout.engine import Completion, EngineReport, Request, RolloutEngine, Sampling
from grpo_tasks.rollout.vllm_server import VllmServer
from grpo_tasks.stage.watch import Watch
from schemas.config.stage import StageConfig
from schemas.metrics import KEPT_COMPLETIONS, KEPT_REWARD, MAX_LENGTH, MEAN_LENGTH, MIN_LENGTH
from schemas.prompts import PromptRow


class SupervisedTrainer(Trainer):
    """What both kinds share: the loss, and microbatches of tokens that the policy learns to write."""

    def _learner(self, policies: Policies, stage: StageConfig) -> Learner:
        # The likelihood of a text is that of the model itself. The temperature belongs to sampling.
        policies.temperature = 1.0
        return SupervisedLearner(policies, stage, self.ranks, self.updates)

    def _kl_due(self) -> bool:
        return False

    def _pass(self, rollout: Rollout, indices: Sequence[int]) -> list[Microbatch]:
        """The microbatches of one update on the completions `indices`, which may be none."""
        if not indices:
            return []
        total = sum(rollout.completions[index].num_written for index in indices)
        microbatches = make_microbatches(
            rollout,
            _unweighted(rollout),
            indices,
            self.stage,
            max_completion_length=self.spec.max_completion_tokens,
            device=self.device,
            ranks=self.ranks,
            same_count=self.learner.policies.sharded,
        )
        # The mean over the update: accumulation and ranks add up to the loss of one large batch.
        return [replace(microbatch, weights=microbatch.trained.float() / max(1, total)) for microbatch in microbatches]


class DemonstrationTrainer(SupervisedTrainer):
    """Trains a stage of kind sft."""

    found: Demonstrations

    def _training_rows(self) -> list[PromptRow]:
        settings = self.stage.demonstrations
        assert settings is not None
        rows, limit = read_prompts(self.spec.train), self.spec.max_completion_tokens
        # The words of a demonstration reach the template here for the first time.
        with limited_templates(self.spec.model.path):
            self.found = read_demonstrations(rows, settings, self.tokenizer, max_tokens=limit)
        listed = self.dir.root / REFUSED
        if self.ranks.writes:
            self.found.write(listed)
        check_share(self.found, settings, stage=self.stage.name, listed=listed)
        return self.found.rows

    def _engine(self, servers: Sequence[VllmServer]) -> RolloutEngine:
        # Only held-out evaluations sample, and a copy of the weights for sampling takes memory.
        return super()._engine(servers) if self.held_out else NoEngine()

    def _begin(self) -> Watch:
        watch = super()._begin()
        if self.found.refused:
            self.events.report(0, "demonstrations_refused", f"{self.found.summary()}; {REFUSED} names them")
        return watch

    def _collect(self) -> Round:
        """The next demonstrations, as completions that somebody else wrote."""
        numbers = self.schedule.prompts_of(self.step)
        rows, made = [self.rows[number] for number in numbers], [self.found.tokens[number] for number in numbers]
        completions = [
            Completion(one.token_ids, [0.0] * len(one.token_ids), one.text, "stop", written=one.trained) for one in made
        ]
        rollout = Rollout(rows, [one.prompt for one in made], completions, group_size=1, seconds=0.0)
        self.counters.tokens += rollout.num_tokens
        scored = ScoredRollout(rollout, _no_scores(len(rows)), 0.0)
        return Round(scored, _unweighted(rollout), 0, rollout.num_tokens, version=self.step)

    def _microbatches(self, current: Round) -> Batch:
        rollout = current.scored.rollout
        self._seed_dropout("score")
        return Batch([self._pass(rollout, range(len(rollout.completions)))], None)

    def _rollout_metrics(self, current: Round) -> dict[str, float]:
        lengths = np.array([len(completion.token_ids) for completion in current.scored.rollout.completions])
        return {MEAN_LENGTH: float(lengths.mean()), MIN_LENGTH: float(lengths.min()), MAX_LENGTH: float(lengths.max())}


class RejectionTrainer(SupervisedTrainer):
    """Trains a stage of kind rejection."""

    def _microbatches(self, current: Round) -> Batch:
        rollout, size = current.scored.rollout, self.stage.completions_per_update
        chosen = chosen_completions(current.scored, self.stage)
        starts = range(0, len(rollout.completions), size)
        parts = [[index for index in chosen if start <= index < start + size] for start in starts]
        self._seed_dropout("score")
        return Batch([self._pass(rollout, part) for part in parts], None)

    def _rollout_metrics(self, current: Round) -> dict[str, float]:
        chosen, totals = chosen_completions(current.scored, self.stage), current.scored.scores.totals
        kept = mean_total(totals[chosen]) if chosen else None
        metrics = super()._rollout_metrics(current) | {KEPT_COMPLETIONS: len(chosen) / len(totals)}
        return metrics if kept is None else metrics | {KEPT_REWARD: kept}


class NoEngine:
    """The engine of a stage that samples nothing."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:  # noqa: ARG002
        """Never called."""
        raise AssertionError("a stage without held-out evaluations samples nothing")

    def sync(self) -> None:
        """Nothing to load."""

    def sleep(self) -> None:
        """Nothing to release."""

    def report(self) -> EngineReport:
        """Nothing to report."""
        return EngineReport()

    def close(self) -> None:
        """Nothing to release."""


def _unweighted(rollout: Rollout) -> Advantages:
    """Advantages of completions that no reward compares: none is left out."""
    prompts, completions = len(rollout.rows), len(rollout.completions)
    return Advantages(torch.zeros(completions, 1), torch.zeros(prompts), torch.zeros(prompts, dtype=torch.bool))


def _no_scores(count: int) -> Scores:
    return Scores([], np.empty((count, 0)), np.empty(0), np.empty(0), np.full(count, np.nan), [])


class SupervisedLearner(Learner):
    """Trains the policy to write given tokens. The weights of a microbatch are 0 at tokens that it does not learn.

    loss = - sum over the trained tokens of log p(token) / number of trained tokens of the update
    """

    __slots__ = ()

    def _accumulate(
        self,
        microbatch: Microbatch,
        old_logps: Float[Tensor, "N T"] | None,
        threshold: Float[Tensor, ""] | None,
        figures: UpdateFigures,
    ) -> None:
        """Forward, loss and backward of one microbatch; there is no earlier policy to compare with."""
        assert old_logps is None
        assert threshold is None
        scores = self.policies.scores(microbatch.tokens, count_hits=True)
        assert scores.hits is not None
        loss = -(scores.logps * microbatch.weights).sum()
        if microbatch.idle:
            # With sharded weights the backward pass gathers and reduces on all ranks, so this rank has to make it too.
            self.ranks.accelerator.backward(0.0 * loss)
            return
        self.ranks.accelerator.backward(loss)
        figures.add_supervised(loss, microbatch.trained, scores.entropies, scores.hits)


def chosen_completions(scored: ScoredRollout, stage: StageConfig) -> list[int]:
    """Indices of the completions that the stage trains on, in the order of the rollout.

    Ties are broken by the order of sampling. Without a limit the best of a group is kept even if it is bad: RAFT
    (arXiv:2304.06767). With keep_reward and no number it is the selection of RFT (arXiv:2308.01825).
    """
    totals, completions = scored.scores.totals, scored.rollout.completions
    # A conversation that a fault ended has a score, so that it counts in the figures, and teaches nothing.
    allowed = ~np.isnan(totals) & np.array([not completion.failed for completion in completions])
    if stage.keep_reward is not None:
        allowed &= solved(scored.scores.raw, scored.scores.weights, scored.scores.full, stage.keep_reward) == 1.0
    if stage.mask_truncated_completions:
        allowed &= np.array([not completion.truncated for completion in completions])
    size, chosen = scored.rollout.group_size, []
    for start in range(0, len(completions), size):
        group = sorted(range(start, start + size), key=lambda index: -totals[index] if allowed[index] else np.inf)
        seen: set[tuple[int, ...]] = set()
        for index in group:
            tokens = tuple(completions[index].token_ids)
            # An empty completion has nothing to learn; an equal one would count the same text twice.
            if not allowed[index] or not tokens or tokens in seen:
                continue
            if stage.keep_completions is not None and len(seen) == stage.keep_completions:
                break
            seen.add(tokens)
            chosen.append(index)
    return sorted(chosen)
