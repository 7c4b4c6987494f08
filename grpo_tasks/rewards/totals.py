"""The reward of a completion, defined once for training, held-out evaluation and the lab.

    total = sum of weight x score over the functions that apply to the completion; none where no function applies

This is TRL's definition (1.16: `nansum` of the weighted scores). The mean reward is the mean over the completions that have a
total. A conversation that a fault of its environment ended is scored by no function: a policy may learn to cause such faults, so
`charge_faults` gives them the lowest scores.
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
    """[N] 1 for a solved completion, else 0; NaN where no function applies. Of [N, F] scores, [F] weights, [F] full scores.

    A completion is solved when its total reaches `share` of the full reward: the total of a completion that earns the full score
    of every function that applies. With 0/1 functions and a share near 1 all of them must succeed; a graded function may miss a
    part of its score. A function that only punishes (full score 0, or a negative weight) adds nothing to the full reward, and
    what it takes away counts.
    """
    totals = total_scores(scores, weights)
    best = np.where(np.isnan(scores), 0.0, np.maximum(weights * full, 0.0)).sum(axis=-1)
    return np.where(np.isnan(totals), np.nan, totals >= share * best - _ROUNDING)


def charge_faults(
    scores: NDArray[Real], weights: NDArray[np.float64], failed: NDArray[np.bool_], *partitions: NDArray[Any]
) -> NDArray[Real]:
    """[N, F] scores in which a failed conversation has the worst score of each function, and none that is better than 0.

    Args:
        scores: [N, F]; NaN: does not apply.
        weights: [F]; a negative one turns the largest score into the worst.
        failed: [N] conversations that a fault ended.
        partitions: [N] labels each, the narrowest first. A failed conversation is compared with the others of its label; by the
            next labels where none of these is sound. Where no labels are left it gets 0.
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
