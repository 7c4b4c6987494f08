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

Real = TypeVar("Real", bound=np.floating[Any])


def total_scores(scores: NDArray[Real], weights: NDArray[Real]) -> NDArray[Real]:
    """[...] totals from [..., F] scores (NaN: does not apply) and [F] weights; NaN where no function applies."""
    totals = np.nansum(scores * weights, axis=-1)
    return np.where(np.isnan(scores).all(axis=-1), np.nan, totals).astype(scores.dtype)


def mean_total(totals: NDArray[Real]) -> float | None:
    """The mean over the completions that have a total; None when none has."""
    known = totals[~np.isnan(totals)]
    return float(known.mean()) if len(known) else None


def stage_weights(stage: StageConfig, rewards: RewardsConfig) -> NDArray[np.float64]:
    """[F] configured weights of a stage, in the order of its functions. Adaptive weights start from them."""
    configs = [rewards.resolve(name) for name in stage.rewards]
    return np.array([config.weight for config in configs if config is not None], dtype=np.float64)
