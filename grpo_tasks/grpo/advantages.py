"""Advantages: how much better a completion is than the others of its group (arXiv:2402.03300, eq. 3 ff.).

    A_i = (r_i - baseline) / scale      baseline: the group's mean, or the mean of the others (leave one out)
                                        scale:    the group's or the batch's standard deviation, or 1

Completions that no reward function applies to have the reward NaN: they count in no mean and get the advantage 0.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.rewards.totals import total_scores
from schemas.config.stage import StageConfig

TIE = 1e-6
"""Rewards of a group that differ by no more than this, relative to their size, are a tie."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of N completions, group by group, from F functions."""

    scores: Float[Tensor, "N F"]
    """Before weights; NaN where a function does not apply."""
    weights: Float[Tensor, " F"]
    tokens: Float[Tensor, "N T F"] | None = None
    """Scores token by token, where some function gave them; a completion's score is the mean over its tokens."""

    @property
    def totals(self) -> Float[Tensor, " N"]:
        """Weighted sums over the functions that apply; NaN where none does."""
        return _weighted(self.scores, self.weights)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of N completions in P groups."""

    values: Float[Tensor, "N _"]
    """One per completion [N, 1], or one per token [N, T]; exactly 0 in dead groups."""
    group_std: Float[Tensor, " P"]
    """Standard deviation of the rewards inside each group (n - 1 in the denominator)."""
    dead: Bool[Tensor, " P"]
    """Groups whose rewards tie: nothing can be learnt from them."""


def advantages(rewards: Rewards, stage: StageConfig) -> Advantages:
    """Advantages of a rollout's completions, as the stage wants them scaled.

    Args:
        rewards: of whole groups of `stage.num_generations`.
        stage: for `multi_objective_aggregation`, `scale_rewards` and `baseline`.
    """
    size, split = stage.num_generations, stage.multi_objective_aggregation == "normalize_then_sum"
    group_std = nanstd(rewards.totals.view(-1, size))
    compared = rewards if split else Rewards(rewards.totals[:, None], torch.ones(1), _summed(rewards))
    dead = _ties(compared, size)
    if split:
        # GDPO (arXiv:2601.05242): each function in units of its own spread in the group, so that none drowns the others.
        rewards = _normalised(rewards, size)
    totals = rewards.totals
    per_token = totals[:, None] if rewards.tokens is None else _weighted(rewards.tokens, rewards.weights)
    if split:
        values = (per_token - totals.nanmean()) / (nanstd(totals) + STD_FLOOR)
    else:
        grouped = totals.view(-1, size)
        values = (per_token - _baseline(grouped, stage).reshape(-1, 1)) / _scale(totals, grouped, stage).reshape(-1, 1)
    # Rounding in the mean would leave a tied group with tiny advantages, which a small std then blows up.
    values = values.nan_to_num(nan=0.0).masked_fill(dead.repeat_interleave(size)[:, None], 0.0)
    return Advantages(values=values, group_std=group_std.masked_fill(dead, 0.0), dead=dead)


def nanstd(values: Float[Tensor, "*B G"]) -> Float[Tensor, "*B"]:
    """Standard deviation over the last axis (n - 1 in the denominator) of the values that are numbers; 0 for fewer than two."""
    count = (~values.isnan()).sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _baseline(grouped: Float[Tensor, "P G"], stage: StageConfig) -> Float[Tensor, "P G"]:
    if stage.baseline == "group_mean":
        return grouped.nanmean(1, keepdim=True).expand_as(grouped)
    # RLOO (arXiv:2402.14740): the mean of the others does not depend on the completion itself.
    others = (~grouped.isnan()).sum(1, keepdim=True) - 1
    return (grouped.nansum(1, keepdim=True) - grouped) / others.clamp(min=1)


def _scale(totals: Float[Tensor, " N"], grouped: Float[Tensor, "P G"], stage: StageConfig) -> Float[Tensor, "P G"]:
    if stage.scale_rewards == "none":
        return torch.ones_like(grouped)
    std = nanstd(totals) if stage.scale_rewards == "batch" else nanstd(grouped)[:, None]
    return (std + STD_FLOOR).expand_as(grouped)


def _ties(rewards: Rewards, size: int) -> Bool[Tensor, " P"]:
    """Groups in which every score is the same, completion by completion or token by token."""
    values = rewards.scores if rewards.tokens is None else rewards.tokens
    grouped = values.reshape(len(rewards.scores) // size, -1, values.shape[-1])
    spread = grouped.nan_to_num(nan=-torch.inf).amax(1) - grouped.nan_to_num(nan=torch.inf).amin(1)
    limit = TIE * grouped.nan_to_num(nan=0.0).abs().amax(1).clamp(min=1.0)
    return ~(spread > limit).any(-1)


def _weighted(scores: Float[Tensor, "*B F"], weights: Float[Tensor, " F"]) -> Float[Tensor, "*B"]:
    return torch.from_numpy(total_scores(scores.numpy(), weights.numpy()))


def _summed(rewards: Rewards) -> Float[Tensor, "N T 1"] | None:
    return None if rewards.tokens is None else _weighted(rewards.tokens, rewards.weights)[..., None]


def _normalised(rewards: Rewards, size: int) -> Rewards:
    grouped = rewards.scores.view(-1, size, rewards.scores.shape[-1])
    mean, std = grouped.nanmean(1, keepdim=True), nanstd(grouped.transpose(1, 2))[:, None]

    def scaled(values: Tensor) -> Tensor:
        shaped = values.reshape(len(grouped), -1, values.shape[-1])
        return ((shaped - mean) / (std + STD_FLOOR)).view(values.shape)

    return Rewards(scaled(rewards.scores), rewards.weights, None if rewards.tokens is None else scaled(rewards.tokens))
