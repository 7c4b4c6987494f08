"""What the scores of a completion come to: the one definition of `reward`, in training, on held-out prompts and in the lab.

    total = sum of weight x score over the functions that apply; no total where none applies

This is TRL's definition (1.16: `nansum` of the weighted scores, NaN where every function returned None). The mean reward is the
mean of the totals there are. It is not the weighted sum of the functions' means: a function that applies to half of the
completions counts half.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from schemas.config.rewards import RewardsConfig
from schemas.config.stage import StageConfig

Real = TypeVar("Real", bound=np.floating[Any])


def total_scores(scores: NDArray[Real], weights: NDArray[Real]) -> NDArray[Real]:
    """[..., F] scores (NaN: does not apply) and [F] weights to [...] totals; NaN where no function applies."""
    totals = np.nansum(scores * weights, axis=-1)
    return np.where(np.isnan(scores).all(axis=-1), np.nan, totals).astype(scores.dtype)


def mean_total(totals: NDArray[Real]) -> float | None:
    """The mean of the totals there are; None when there is none."""
    known = totals[~np.isnan(totals)]
    return float(known.mean()) if len(known) else None


def stage_weights(stage: StageConfig, rewards: RewardsConfig) -> NDArray[np.float64]:
    """[F] weights that a stage begins with, in the order of its functions."""
    configs = [rewards.resolve(name) for name in stage.rewards]
    return np.array([config.weight for config in configs if config is not None], dtype=np.float64)
