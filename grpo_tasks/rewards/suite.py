"""All reward functions of a stage: call each one, apply its on_error to a fault, and form the weighted sum.

    ScoreBatch -> each function in the worker -> raw [N, F] -> times weights [F] -> totals [N]

Weights may adapt to the success rate. Advantages are computed by the trainer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from grpo_tasks.rewards.builtin import FULL_SCORES
from grpo_tasks.rewards.contract import Extra, FunctionScores, RewardFault, ScoreBatch, TaskRewards, reward_error
from grpo_tasks.rewards.totals import total_scores
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import AdaptiveWeightConfig, RewardConfig, RewardsConfig
from schemas.errors import JudgeUnavailableError, RewardError
from schemas.metrics import logged

__all__ = ["FaultNote", "RewardSuite", "ScoreBatch", "Scores"]

SHRINK = 0.9
"""Factor applied when the success rate is high."""
MIN_SCALE, MAX_SCALE = 0.25, 4.0
"""Smallest and largest weight, as a multiple of the configured one."""


@dataclass(frozen=True, slots=True)
class FaultNote:
    """A fault that did not stop the run, because on_error is zero or skip. The trainer logs it."""

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
    """Scores of single tokens by index of the function, then of the completion, where a function returned them."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """What functions passed to log_metric, averaged over the batch, by name of the function."""
    extra: dict[str, dict[str, list[Extra]]] = field(default_factory=dict)
    """What functions passed to log_extra: N values by name of the function, then of the column."""

    @classmethod
    def join(cls, batches: Sequence["Scores"]) -> "Scores":
        """The scores of several batches by the same functions, as those of one batch."""
        starts = np.cumsum([0, *(len(batch.raw) for batch in batches)])
        tokens: dict[int, dict[int, list[float]]] = {}
        for start, batch in zip(starts, batches, strict=False):
            for function, given in batch.tokens.items():
                tokens.setdefault(function, {}).update({int(start) + index: values for index, values in given.items()})
        return replace(
            batches[0],
            metrics=_mean_metrics([batch.metrics for batch in batches]),
            extra=_joined_extra(batches),
            raw=np.concatenate([batch.raw for batch in batches]),
            totals=np.concatenate([batch.totals for batch in batches]),
            notes=[note for batch in batches for note in batch.notes],
            tokens=tokens,
        )

    def take(self, indices: Sequence[int]) -> "Scores":
        """The scores of these completions, in this order."""
        tokens = {
            function: {position: given[index] for position, index in enumerate(indices) if index in given}
            for function, given in self.tokens.items()
        }
        extra = {
            function: {column: [values[index] for index in indices] for column, values in given.items()}
            for function, given in self.extra.items()
        }
        return replace(self, raw=self.raw[indices], totals=self.totals[indices], tokens=tokens, extra=extra)

    def logged_metrics(self) -> dict[str, float]:
        """What functions passed to log_metric, by the name of the metric in the journal."""
        return {logged(function, name): value for function, given in self.metrics.items() for name, value in given.items()}

    def logged_columns(self) -> dict[str, list[float | None] | list[str | None]]:
        """What functions passed to log_extra, by the name of the column in the table of completions: all numbers, or all text."""
        return {
            f"logged_{function}_{column}": _of_one_type(values)
            for function, given in self.extra.items()
            for column, values in given.items()
        }

    def success(self) -> NDArray[np.float64]:
        """[F] shares of completions with the full score; NaN for a function that failed or applied to no completion."""
        known = ~np.isnan(self.raw)
        reached = known & (np.nan_to_num(self.raw, nan=-math.inf) >= self.full)
        failed = [name in {note.function for note in self.notes} for name in self.names]
        count = known.sum(axis=0)
        share = np.divide(reached.sum(axis=0), count, out=np.full(len(self.names), np.nan), where=count > 0)
        return np.where(failed, np.nan, share)


class RewardSuite:
    """The reward functions of one stage, in a worker process of their own; a context manager.

    Args:
        rewards: settings of the functions.
        names: the functions of the stage. RunConfig guarantees that they exist.
        completion: what an answer is, for the built-in functions. None: the defaults of the section.
        tasks: the functions that apply to each task. None: every function applies to every row.
        log: file that receives what the functions print. None: their output is discarded.
    """

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
        self.configs = [_resolved(rewards, name) for name in names]
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
        """Score every completion with every function.

        Raises:
            RewardError: a function with on_error raise failed. The error names function, row and completion.
        """
        raw, notes = np.full((len(batch), len(self.names)), np.nan), []
        tokens, metrics, extra = {}, {}, {}
        for index, (name, config) in enumerate(zip(self.names, self.configs, strict=True)):
            outcome = self.worker.call(name, batch, config.call_limit_s)
            if isinstance(outcome, FunctionScores):
                raw[:, index] = [np.nan if score is None else score for score in outcome.scores]
                if outcome.tokens:
                    tokens[index] = outcome.tokens
                if outcome.metrics:
                    metrics[name] = outcome.metrics
                if outcome.extra:
                    extra[name] = outcome.extra
                continue
            if outcome.kind == "unavailable":
                # Whatever on_error says: an outage is no property of a completion.
                raise JudgeUnavailableError(f"reward {name}: {outcome.detail}", place=outcome.source, fix=outcome.fix)
            error = self._error(name, outcome, batch, config)
            if config.on_error == "raise":
                raise error
            raw[:, index] = 0.0 if config.on_error == "zero" else np.nan
            notes.append(FaultNote(name, config.on_error, error))
        weights = self.weights
        full = np.array([full_score(config) for config in self.configs])
        return Scores(self.names, raw, weights, full, total_scores(raw, weights), notes, tokens, metrics, extra)

    def adapt(self, scores: Scores) -> None:
        """Update the adaptive weights with the scores of one update. Call it once after every update."""
        shares = dict(zip(scores.names, scores.success(), strict=True))
        for name, weight in self.adaptive.items():
            weight.observe(None if math.isnan(shares[name]) else float(shares[name]))

    def state(self) -> dict[str, Any]:
        """The state of the adaptive weights for a checkpoint, as JSON."""
        return {name: weight.state() for name, weight in self.adaptive.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        for name, saved in state.items():
            self.adaptive[name].restore(saved)

    def _error(self, name: str, fault: RewardFault, batch: ScoreBatch, config: RewardConfig) -> RewardError:
        # The search repeats calls, and a hang may take the time limit again: worth it only when the run stops.
        if fault.index is None and config.on_error == "raise" and config.judge is None:
            fault = replace(fault, index=self.worker.find_failing_completion(name, batch, config.time_limit_s))
        return reward_error(name, fault, batch)


def full_score(config: RewardConfig) -> float:
    """The score from which a completion counts as a success of this function."""
    return config.full_score if config.full_score is not None else FULL_SCORES.get(config.function or "", 1.0)


def _mean_metrics(batches: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean of each metric over the batches in which its function reported it."""
    values: dict[str, dict[str, list[float]]] = {}
    for batch in batches:
        for function, given in batch.items():
            for name, value in given.items():
                values.setdefault(function, {}).setdefault(name, []).append(value)
    return {function: {name: fmean(found) for name, found in given.items()} for function, given in values.items()}


def _joined_extra(batches: Sequence[Scores]) -> dict[str, dict[str, list[Extra]]]:
    """The columns of all batches; None where a batch lacks one."""
    names = {(function, column) for batch in batches for function, given in batch.extra.items() for column in given}
    joined: dict[str, dict[str, list[Extra]]] = {}
    for function, column in sorted(names):
        parts = [batch.extra.get(function, {}).get(column, [None] * len(batch.raw)) for batch in batches]
        joined.setdefault(function, {})[column] = [value for part in parts for value in part]
    return joined


def _of_one_type(values: Sequence[Extra]) -> list[float | None] | list[str | None]:
    if any(isinstance(value, str) for value in values):
        return [f"{value:g}" if isinstance(value, float) else value for value in values]
    return [value if isinstance(value, float) else None for value in values]


def _resolved(rewards: RewardsConfig, name: str) -> RewardConfig:
    config = rewards.resolve(name)
    assert config is not None, f"unknown reward {name}"
    return config


class AdaptiveState(TypedDict):
    """An adaptive weight as a checkpoint stores it."""

    scale: float
    steps: int
    shares: list[float]


class AdaptiveWeight:
    """The factor on the configured weight of one function.

    The success rate is the share of completions with the full score, averaged over `every_steps` updates. Updates in which the
    function failed or applied to no completion are left out. The scale stays within [MIN_SCALE, MAX_SCALE].
    """

    def __init__(self, config: AdaptiveWeightConfig) -> None:
        self.config = config
        self.scale, self.steps = 1.0, 0
        self.shares: list[float] = []

    def observe(self, share: float | None) -> None:
        """Take in one update.

        Args:
            share: share of its completions with the full score; None when it is unknown.
        """
        self.steps += 1
        if share is not None:
            self.shares.append(share)
        if self.steps < self.config.every_steps:
            return
        if self.shares:
            self.scale = self._adjusted(sum(self.shares) / len(self.shares))
        self.steps, self.shares = 0, []

    def state(self) -> AdaptiveState:
        """The state for a checkpoint."""
        return {"scale": self.scale, "steps": self.steps, "shares": list(self.shares)}

    def restore(self, state: AdaptiveState) -> None:
        """Continue from a state that `state` returned."""
        self.scale, self.steps, self.shares = state["scale"], state["steps"], list(state["shares"])

    def _adjusted(self, rate: float) -> float:
        factor = self.config.grow if rate < self.config.low else SHRINK if rate > self.config.high else 1.0
        return min(MAX_SCALE, max(MIN_SCALE, self.scale * factor))
