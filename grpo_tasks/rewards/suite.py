"""The rewards of a stage together: every function asked, errors handled by their policy, the weighted sum.

    ScoreBatch -> each function in the worker -> raw [N, F] -> times weights -> totals [N]

Weights may move (adaptive.py). Advantages are the trainer's business.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grpo_tasks.rewards.adaptive import AdaptiveWeight
from grpo_tasks.rewards.builtin import FULL_SCORES
from grpo_tasks.rewards.contract import Fault, FunctionScores, ScoreBatch, reward_error
from grpo_tasks.rewards.totals import total_scores
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import RewardError

__all__ = ["FaultNote", "RewardSuite", "ScoreBatch", "Scores"]


@dataclass(frozen=True, slots=True)
class FaultNote:
    """Something that was let pass and has to be told: a fault under on_error zero or skip."""

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
    """[N, F], before weights; NaN where a function does not apply or was skipped."""
    weights: NDArray[np.float64]
    """[F], in force for this batch."""
    full: NDArray[np.float64]
    """[F], the score that counts as success."""
    totals: NDArray[np.float64]
    """[N], weighted sums over the functions that apply (totals.py); NaN where none does."""
    notes: list[FaultNote]
    tokens: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    """Scores token by token, by number of the function and of the completion, where there are such."""

    @classmethod
    def join(cls, parts: Sequence["Scores"]) -> "Scores":
        """Scores of several batches by the same functions as those of one batch."""
        starts = np.cumsum([0, *(len(part.raw) for part in parts)])
        tokens: dict[int, dict[int, list[float]]] = {}
        for start, part in zip(starts, parts, strict=False):
            for function, given in part.tokens.items():
                tokens.setdefault(function, {}).update({int(start) + index: values for index, values in given.items()})
        return replace(
            parts[0],
            raw=np.concatenate([part.raw for part in parts]),
            totals=np.concatenate([part.totals for part in parts]),
            notes=[note for part in parts for note in part.notes],
            tokens=tokens,
        )

    def take(self, indices: Sequence[int]) -> "Scores":
        """The scores of these completions, in this order."""
        tokens = {
            function: {place: given[index] for place, index in enumerate(indices) if index in given}
            for function, given in self.tokens.items()
        }
        return replace(self, raw=self.raw[indices], totals=self.totals[indices], tokens=tokens)

    def success(self) -> NDArray[np.float64]:
        """[F] share of completions with the full score; NaN for a function that failed or applied to none."""
        known = ~np.isnan(self.raw)
        reached = known & (np.nan_to_num(self.raw, nan=-math.inf) >= self.full)
        failed = [name in {note.function for note in self.notes} for name in self.names]
        count = known.sum(axis=0)
        share = np.divide(reached.sum(axis=0), count, out=np.full(len(self.names), np.nan), where=count > 0)
        return np.where(failed, np.nan, share)


class RewardSuite:
    """The reward functions of one stage, in a worker process of their own; a context manager.

    Args:
        rewards: tags, equality and settings of the functions.
        names: the stage's functions; RunConfig has made sure that they exist.
        log: file that takes what the functions print; None: nothing of it is kept.
    """

    def __init__(self, rewards: RewardsConfig, names: Sequence[str], *, log: Path | None = None) -> None:
        self.names = list(names)
        self.configs = [_resolved(rewards, name) for name in names]
        self.worker = RewardWorker(rewards, names, log=log)
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
        """[F] weights in force."""
        scales = [self.adaptive[name].scale if name in self.adaptive else 1.0 for name in self.names]
        return np.array([config.weight for config in self.configs], dtype=np.float64) * np.array(scales)

    def score(self, batch: ScoreBatch) -> Scores:
        """Ask every function about every completion.

        Raises:
            RewardError: a function failed whose on_error is raise; names function, row and completion.
        """
        raw, notes, tokens = np.full((len(batch), len(self.names)), np.nan), [], {}
        for index, (name, config) in enumerate(zip(self.names, self.configs, strict=True)):
            outcome = self.worker.call(name, batch, config.time_limit_s)
            if isinstance(outcome, FunctionScores):
                raw[:, index] = [np.nan if score is None else score for score in outcome.scores]
                if outcome.tokens:
                    tokens[index] = outcome.tokens
                continue
            error = self._error(name, outcome, batch, config)
            if config.on_error == "raise":
                raise error
            raw[:, index] = 0.0 if config.on_error == "zero" else np.nan
            notes.append(FaultNote(name, config.on_error, error))
        weights = self.weights
        full = np.array([full_score(config) for config in self.configs])
        return Scores(self.names, raw, weights, full, total_scores(raw, weights), notes, tokens)

    def adapt(self, scores: Scores) -> None:
        """Tell the adaptive weights how an update's completions did; call once after every update."""
        shares = dict(zip(scores.names, scores.success(), strict=True))
        for name, weight in self.adaptive.items():
            weight.observe(None if math.isnan(shares[name]) else float(shares[name]))

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, as JSON."""
        return {name: weight.state() for name, weight in self.adaptive.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        for name, saved in state.items():
            self.adaptive[name].restore(saved)

    def _error(self, name: str, fault: Fault, batch: ScoreBatch, config: RewardConfig) -> RewardError:
        if fault.index is None and config.on_error == "raise":
            fault = replace(fault, index=self.worker.find_failing_completion(name, batch, config.time_limit_s))
        return reward_error(name, fault, batch)


def full_score(config: RewardConfig) -> float:
    """The score of a function that counts as success."""
    return config.full_score if config.full_score is not None else FULL_SCORES.get(config.function or "", 1.0)


def _resolved(rewards: RewardsConfig, name: str) -> RewardConfig:
    config = rewards.resolve(name)
    assert config is not None, f"unknown reward {name}"
    return config
