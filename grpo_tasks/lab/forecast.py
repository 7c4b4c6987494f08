"""Will a stage learn anything? The share of groups, sampled from the base model, whose completions earn different totals.

A group whose totals tie has zero advantages (grpo/advantages.py). When nearly all groups tie, training wastes time. A later stage
starts from a better model than the base, so its forecast is usually a lower bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grpo_tasks.rewards.totals import mean_total
from schemas.results.data import SignalForecast
from schemas.results.evaluation import histogram

TIE = 1e-6
"""Totals that differ by no more than this, relative to their size, tie. The same tolerance as in grpo/advantages.py."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A group of completions that the base model sampled for one training prompt."""

    prompt_id: str
    completions: list[str]
    completion_ids: list[list[int]]
    finish_reasons: list[str]
    conversations: list[str] = field(default_factory=list)
    """The column `conversation` of the samples, where tools or an environment answered."""


def forecast(
    stage: str, samples: Sequence[GroupSample], totals: NDArray[np.float64], solved: NDArray[np.float64] | None = None
) -> SignalForecast:
    """Count the groups with signal.

    Args:
        stage: name of the stage.
        samples: at least one group.
        totals: [N] totals of the stage for the completions of all groups, group by group; NaN where no function applies.
        solved: [N] 1 for a completion that is solved, else 0; NaN where no function applies. None: pass rates are not known.
    """
    ends = np.cumsum([len(sample.completions) for sample in samples])
    # As in training, completions without a total are left out.
    groups = [group[~np.isnan(group)] for group in np.split(totals, ends[:-1])]
    alive = [len(group) > 0 and float(np.ptp(group)) > TIE * max(1.0, float(np.abs(group).max())) for group in groups]
    deviations = [float(group.std(ddof=1)) if len(group) > 1 else 0.0 for group in groups]
    judged = [] if solved is None else [group[~np.isnan(group)] for group in np.split(solved, ends[:-1])]
    return SignalForecast(
        stage=stage,
        groups=len(groups),
        share_with_signal=sum(alive) / len(groups),
        mean_reward=mean_total(totals) or 0.0,
        mean_reward_std=sum(deviations) / len(deviations),
        pass_rates=[] if solved is None else histogram(float(group.mean()) for group in judged if len(group)),
    )
