"""The reward of a completion, defined once for training, held-out evaluation and the lab.

    total = sum of weight x score over the functions that apply to the completion; none where no function applies

This is TRL's definition (1.16: `nansum` of the weighted scores, NaN where every function returned None). The mean reward is the
mean over the completions that have a total. It is not the weighted sum of the functions' means: a function that applies to half
of the completions counts half.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from schemas.config.rewards import RewardsConfig
from schemas.config.stage import StageConfig

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
    """[N] 1 for a completion that is solved, else 0; NaN where no function applies.

    A completion is solved when its total reaches `share` of the full reward: the total of a completion that earns the full score
    of every function that applies. With 0/1 functions and a share near 1 all of them must succeed; a graded function may miss a
    part of its score. A function that only punishes (full score 0, or a negative weight) adds nothing to the full reward, and
    what it takes away counts.

    Args:
        scores: [N, F] scores of the functions; NaN: does not apply.
        weights: [F] weights.
        full: [F] full scores (suite.py `full_score`).
        share: between 0 and 1.
    """
    totals = total_scores(scores, weights)
    best = np.where(np.isnan(scores), 0.0, np.maximum(weights * full, 0.0)).sum(axis=-1)
    return np.where(np.isnan(totals), np.nan, totals >= share * best - _ROUNDING)


def mean_total(totals: NDArray[Real]) -> float | None:
    """The mean over the completions that have a total; None when none has."""
    known = totals[~np.isnan(totals)]
    return float(known.mean()) if len(known) else None


def stage_weights(stage: StageConfig, rewards: RewardsConfig) -> NDArray[np.float64]:
    """[F] configured weights of a stage, in the order of its functions. Adaptive weights start from them."""
    configs = [rewards.resolve(name) for name in stage.rewards]
    return np.array([config.weight for config in configs if config is not None], dtype=np.float64)
