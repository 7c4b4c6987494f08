"""All reward functions of a stage: call each one, apply its on_error to a fault, and form the weighted sum.

`total_scores` defines the reward of a completion for training, held-out evaluation and the lab; it is TRL's definition (1.16:
`nansum` of the weighted scores). The mean reward is the mean over the completions that have a total. A conversation that a fault
of its environment ended is scored by no function: a policy may learn to cause such faults, so `charge_faults` gives them the
lowest scores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from grpo_tasks.rewards.builtin import FULL_SCORES
from grpo_tasks.rewards.contract import Extra, FunctionScores, ScoreBatch, TaskRewards, reward_error
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import AdaptiveWeightConfig, RewardConfig, RewardsConfig
from schemas.config.stage import StageConfig
from schemas.errors import JudgeUnavailableError, RewardError
from schemas.metrics import logged

SHRINK = 0.9
MIN_SCALE, MAX_SCALE = 0.25, 4.0
"""Smallest and largest weight, as a multiple of the configured one."""


@dataclass(frozen=True, slots=True)
class FaultNote:
    """A fault that did not stop the run, because on_error is zero or skip."""

    function: str
    policy: str
    error: RewardError

    def __str__(self) -> str:
        return f"{self.error} (on_error: {self.policy})"


@dataclass(frozen=True, slots=True)
class Scores:
    """N completions scored by F functions."""

    names: list[str]
    raw: NDArray[np.float64]
    """[N, F] scores before weighting; NaN where a function does not apply or was skipped."""
    weights: NDArray[np.float64]
    """[F] weights that this batch was summed with."""
    full: NDArray[np.float64]
    """[F] scores from which a completion counts as a success."""
    totals: NDArray[np.float64]
    """[N] weighted sums over the functions that apply (totals.py); NaN where none applies."""
    notes: list[FaultNote]
    tokens: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    """Scores of single tokens by index of the function, then of the completion."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What functions passed to log_metric, averaged over the batch, by the name of the metric in the journal."""
    extra: dict[str, list[Extra]] = field(default_factory=dict)
    """What functions passed to log_extra: N values by the name of the column in the table of completions."""

    @classmethod
    def join(cls, batches: Sequence["Scores"]) -> "Scores":
        """The scores of several batches as those of one: a metric is the mean over the batches that have it."""
        starts = np.cumsum([0, *(len(batch.raw) for batch in batches)])
        tokens: dict[int, dict[int, list[float]]] = {}
        for start, batch in zip(starts, batches, strict=False):
            for function, given in batch.tokens.items():
                tokens.setdefault(function, {}).update({int(start) + index: values for index, values in given.items()})
        metrics: dict[str, list[float]] = {}
        for name, value in (item for batch in batches for item in batch.metrics.items()):
            metrics.setdefault(name, []).append(value)
        columns = sorted({column for batch in batches for column in batch.extra})
        return replace(
            batches[0],
            raw=np.concatenate([batch.raw for batch in batches]),
            totals=np.concatenate([batch.totals for batch in batches]),
            notes=[note for batch in batches for note in batch.notes],
            tokens=tokens,
            metrics={name: sum(values) / len(values) for name, values in metrics.items()},
            extra={
                column: [value for batch in batches for value in batch.extra.get(column, [None] * len(batch.raw))]
                for column in columns
            },
        )

    def take(self, indices: Sequence[int]) -> "Scores":
        """The scores of these completions, in this order."""
        tokens = {
            function: {position: given[index] for position, index in enumerate(indices) if index in given}
            for function, given in self.tokens.items()
        }
        extra = {column: [values[index] for index in indices] for column, values in self.extra.items()}
        return replace(self, raw=self.raw[indices], totals=self.totals[indices], tokens=tokens, extra=extra)

    def logged_columns(self) -> dict[str, list[float | None] | list[str | None]]:
        """The columns of `extra`, each all numbers or all text."""
        made: dict[str, list[float | None] | list[str | None]] = {}
        for column, values in self.extra.items():
            if any(isinstance(value, str) for value in values):
                made[column] = [f"{value:g}" if isinstance(value, float) else value for value in values]
            else:
                made[column] = [value if isinstance(value, float) else None for value in values]
        return made

    def success(self) -> NDArray[np.float64]:
        """[F] shares of completions with the full score; NaN for a function that failed or applied to no completion."""
        known = ~np.isnan(self.raw)
        reached = known & (np.nan_to_num(self.raw, nan=-math.inf) >= self.full)
        failed = [name in {note.function for note in self.notes} for name in self.names]
        count = known.sum(axis=0)
        share = np.divide(reached.sum(axis=0), count, out=np.full(len(self.names), np.nan), where=count > 0)
        return np.where(failed, np.nan, share)


class RewardSuite:
    """The reward functions of one stage, in a worker process of their own; a context manager. Its arguments are the worker's."""

    def __init__(
        self,
        rewards: RewardsConfig,
        names: Sequence[str],
        *,
        completion: CompletionConfig | None = None,
        tasks: TaskRewards | None = None,
        log: Path | None = None,
    ) -> None:
        self.names = list(names)
        self.configs = [config for name in names if (config := rewards.resolve(name)) is not None]
        assert len(self.configs) == len(names), f"one of the rewards is unknown: {', '.join(names)}"
        self.worker = RewardWorker(rewards, names, completion=completion, tasks=tasks, log=log)
        self.adaptive = {
            name: AdaptiveWeight(config.adaptive)
            for name, config in zip(self.names, self.configs, strict=True)
            if config.adaptive is not None
        }

    def __enter__(self) -> Self:
        self.worker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @property
    def weights(self) -> NDArray[np.float64]:
        """[F] current weights."""
        scales = [self.adaptive[name].scale if name in self.adaptive else 1.0 for name in self.names]
        return np.array([config.weight for config in self.configs], dtype=np.float64) * np.array(scales)

    def score(self, batch: ScoreBatch) -> Scores:
        """Score every completion with every function; raises RewardError where one with on_error raise fails."""
        raw, notes, weights = np.full((len(batch), len(self.names)), np.nan), [], self.weights
        tokens: dict[int, dict[int, list[float]]] = {}
        metrics: dict[str, float] = {}
        extra: dict[str, list[Extra]] = {}
        for index, (name, config) in enumerate(zip(self.names, self.configs, strict=True)):
            outcome = self.worker.call(name, batch, config.call_limit_s)
            if isinstance(outcome, FunctionScores):
                raw[:, index] = [np.nan if score is None else score for score in outcome.scores]
                if outcome.tokens:
                    tokens[index] = outcome.tokens
                metrics |= {logged(name, key): value for key, value in outcome.metrics.items()}
                extra |= {f"logged_{name}_{column}": values for column, values in outcome.extra.items()}
                continue
            if outcome.kind == "unavailable":
                # Whatever on_error says: an outage is no property of a completion.
                raise JudgeUnavailableError(f"reward {name}: {outcome.detail}", place=outcome.source, fix=outcome.fix)
            # The search repeats calls, and a hang may take the time limit again: worth it only when the run stops.
            if outcome.index is None and config.on_error == "raise" and config.judge is None:
                outcome = replace(outcome, index=self.worker.find_failing_completion(name, batch, config.time_limit_s))
            error = reward_error(name, outcome, batch)
            if config.on_error == "raise":
                raise error
            raw[:, index] = 0.0 if config.on_error == "zero" else np.nan
            notes.append(FaultNote(name, config.on_error, error))
        full = np.array([full_score(config) for config in self.configs])
        return Scores(self.names, raw, weights, full, total_scores(raw, weights), notes, tokens, metrics, extra)

    def adapt(self, scores: Scores) -> None:
        """Let the adaptive weights follow the scores; called once after every update."""
        shares = dict(zip(scores.names, scores.success(), strict=True))
        for name, weight in self.adaptive.items():
            weight.observe(None if math.isnan(shares[name]) else float(shares[name]))

    def state(self) -> dict[str, Any]:
        """The state of the adaptive weights for a checkpoint, as JSON."""
        return {
            name: {"scale": weight.scale, "steps": weight.steps, "shares": list(weight.shares)}
            for name, weight in self.adaptive.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        self.adaptive |= {name: AdaptiveWeight(self.adaptive[name].config, **saved) for name, saved in state.items()}


def full_score(config: RewardConfig) -> float:
    """The score from which a completion counts as a success of this function."""
    return config.full_score if config.full_score is not None else FULL_SCORES.get(config.function or "", 1.0)


@dataclass(slots=True)
class AdaptiveWeight:
    """The factor on the configured weight of one function. It follows the share of completions with the full score, averaged over
    `every_steps` updates without those in which the function failed or applied to no completion."""

    config: AdaptiveWeightConfig
    scale: float = 1.0
    steps: int = 0
    shares: list[float] = field(default_factory=list)

    def observe(self, share: float | None) -> None:
        """Take in one update by the share of its completions with the full score; None when it is unknown."""
        self.steps += 1
        if share is not None:
            self.shares.append(share)
        if self.steps < self.config.every_steps:
            return
        if self.shares:
            rate = sum(self.shares) / len(self.shares)
            factor = self.config.grow if rate < self.config.low else SHRINK if rate > self.config.high else 1.0
            self.scale = min(MAX_SCALE, max(MIN_SCALE, self.scale * factor))
        self.steps, self.shares = 0, []


_ROUNDING = 1e-9
"""A sum of weights may miss the full reward by this much."""
Real = TypeVar("Real", bound=np.floating[Any])


def total_scores(scores: NDArray[Real], weights: NDArray[Real]) -> NDArray[Real]:
    """[...] totals from [..., F] scores (NaN: does not apply) and [F] weights; NaN where no function applies."""
    totals = np.nansum(scores * weights, axis=-1)
    return np.where(np.isnan(scores).all(axis=-1), np.nan, totals).astype(scores.dtype)


def solved(
    scores: NDArray[np.float64], weights: NDArray[np.float64], full: NDArray[np.float64], share: float
) -> NDArray[np.float64]:
    """[N] 1 for a solved completion, else 0; NaN where no function applies. Of [N, F] scores, [F] weights, [F] full scores.

    A completion is solved when its total reaches `share` of the full reward: the total of a completion that earns the full score
    of every function that applies. A function that only punishes (full score 0, or a negative weight) adds nothing to the full
    reward, and what it takes away counts. A full score below 0, of scores that are all negative, counts as it stands.
    """
    totals = total_scores(scores, weights)
    best = np.maximum(weights * full, 0.0) * share + np.where(weights > 0, np.minimum(weights * full, 0.0), 0.0)
    needed = np.where(np.isnan(scores), 0.0, best).sum(axis=-1)
    return np.where(np.isnan(totals), np.nan, totals >= needed - _ROUNDING)


def charge_faults(
    scores: NDArray[Real], weights: NDArray[np.float64], failed: NDArray[np.bool_], *partitions: NDArray[Any]
) -> NDArray[Real]:
    """[N, F] scores in which a failed conversation has the worst score of each function, and none that is better than 0.

    `scores` [N, F] are NaN where a function does not apply; a negative one of `weights` [F] turns the largest score into the
    worst. `partitions` have [N] labels each, the narrowest first: a failed conversation is compared with the others of its label,
    or by the next labels where none of these is sound. Where no labels are left it gets 0.
    """
    made, open_ = scores.copy(), failed.copy()
    signs = np.where(weights < 0, -1.0, 1.0)
    for labels in partitions:
        for label in np.unique(labels[open_]):
            members = labels == label
            sound = signs * scores[members & ~failed]
            if not len(sound):
                continue
            lowest = np.where(np.isnan(sound), np.inf, sound).min(axis=0)
            # Where a function applies to none of them, it does not apply to the failed one either.
            made[members & open_] = signs * np.where(np.isinf(lowest), np.nan, np.minimum(lowest, 0.0))
            open_ &= ~members
    made[open_] = 0.0
    return made


def mean_total(totals: NDArray[Real]) -> float | None:
    """The mean over the completions that have a total; None when none has."""
    known = totals[~np.isnan(totals)]
    return float(known.mean()) if len(known) else None


def stage_weights(stage: StageConfig, rewards: RewardsConfig) -> NDArray[np.float64]:
    """[F] configured weights of a stage, in the order of its functions. Adaptive weights start from them."""
    return np.array([config.weight for name in stage.rewards if (config := rewards.resolve(name))], dtype=np.float64)
