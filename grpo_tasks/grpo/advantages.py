"""Advantages: how much better a completion is than the others of its group (arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - baseline) / scale      baseline: mean of the group, or mean of the others in it (leave one out)
                                        scale:    standard deviation of the group or of the rollout, or 1

A completion to which no reward function applies has the reward NaN: no mean counts it, and its advantage is 0.

Shapes: P prompts with G completions each, N = P G, group by group; F reward functions; T tokens.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.rewards.suite import total_scores
from schemas.config.stage import StageConfig

TIE = 1e-6
"""Rewards of a group that differ by no more than this, relative to their size, are a tie."""
STD_FLOOR = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """Scores of N completions, group by group, from F functions."""

    scores: Float[Tensor, "N F"]
    """NaN where a function does not apply."""
    weights: Float[Tensor, " F"]
    tokens: Float[Tensor, "N T F"] | None = None
    """If some function scored tokens; the score of a completion is the mean over its tokens. NaN on padding."""

    @property
    def totals(self) -> Float[Tensor, " N"]:
        """Weighted sum over the functions that apply; NaN where none does."""
        return _weighted(self.scores, self.weights)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of N completions in P groups."""

    values: Float[Tensor, "N _"]
    """One per completion [N, 1], or one per token [N, T]; exactly 0 in dead groups."""
    group_std: Float[Tensor, " P"]
    """Standard deviation of the rewards in each group (n - 1 in the denominator)."""
    dead: Bool[Tensor, " P"]
    """Groups whose rewards tie."""


def advantages(rewards: Rewards, stage: StageConfig) -> Advantages:
    """Advantages of complete groups of `stage.num_generations`."""
    size, split = stage.num_generations, stage.multi_objective_aggregation == "normalize_then_sum"
    group_std = nanstd(rewards.totals.view(-1, size))  # [N] -> [P, G] -> [P]
    # A tie is a tie of what the advantage is made of: each function by itself when each is normalised, else the total as one
    # function [N, 1]. Scores that cancel in the sum are a tie only in the second case.
    summed = None if rewards.tokens is None else _weighted(rewards.tokens, rewards.weights)[..., None]
    compared = rewards if split else Rewards(rewards.totals[:, None], torch.ones(1), summed)
    dead = _ties(compared, size)
    if split:
        # GDPO (arXiv:2601.05242): each function in units of its own spread in the group, so that none drowns out the others.
        rewards = _normalised(rewards, size)
    totals = rewards.totals
    per_token = totals[:, None] if rewards.tokens is None else _weighted(rewards.tokens, rewards.weights)  # [N, 1] or [N, T]
    if split:
        # The functions are centred per group already; what remains is one scale for the rollout.
        values = (per_token - totals.nanmean()) / (nanstd(totals) + STD_FLOOR)
    else:
        grouped = totals.view(-1, size)  # [P, G]
        # Baseline and scale per completion, [P, G] -> [N, 1]: every token of a completion is compared with the same value.
        values = (per_token - _baseline(grouped, stage).reshape(-1, 1)) / _scale(totals, grouped, stage).reshape(-1, 1)
    # The mean of equal rewards is not exactly that reward. Its rounding error would become an advantage, divided by a standard
    # deviation that is as small: noise of size 1. Hence exactly 0 for a tie. [P] -> [N, 1]
    values = values.nan_to_num(nan=0.0).masked_fill(dead.repeat_interleave(size)[:, None], 0.0)
    return Advantages(values=values, group_std=group_std.masked_fill(dead, 0.0), dead=dead)


def nanstd(values: Float[Tensor, "*B G"]) -> Float[Tensor, "*B"]:
    """Standard deviation over the last axis of the values that are not NaN (n - 1 in the denominator); 0 for fewer than two."""
    count = (~values.isnan()).sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
    # clamp: one value has the sum of squares 0, and no value has no sum; 0 / 0 would be NaN and 0 / -1 would be -0.
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _baseline(grouped: Float[Tensor, "P G"], stage: StageConfig) -> Float[Tensor, "P G"]:
    if stage.baseline == "group_mean":
        return grouped.nanmean(1, keepdim=True).expand_as(grouped)
    # RLOO (arXiv:2402.14740): the mean of the others does not depend on the completion itself, so the gradient has no bias.
    others = (~grouped.isnan()).sum(1, keepdim=True) - 1  # [P, 1]
    return (grouped.nansum(1, keepdim=True) - grouped) / others.clamp(min=1)


def _scale(totals: Float[Tensor, " N"], grouped: Float[Tensor, "P G"], stage: StageConfig) -> Float[Tensor, "P G"]:
    if stage.scale_rewards == "none":
        # Dr. GRPO (arXiv:2503.20783): dividing by the group's deviation gives very easy and very hard prompts more weight.
        return torch.ones_like(grouped)
    std = nanstd(totals) if stage.scale_rewards == "batch" else nanstd(grouped)[:, None]  # [] or [P, 1]
    return (std + STD_FLOOR).expand_as(grouped)


def _ties(rewards: Rewards, size: int) -> Bool[Tensor, " P"]:
    """Groups in which every function gives every completion, or every token, the same score."""
    values = rewards.scores if rewards.tokens is None else rewards.tokens
    # [N, F] -> [P, G, F], or [N, T, F] -> [P, G T, F]: all values of a group along one axis.
    grouped = values.reshape(len(rewards.scores) // size, -1, values.shape[-1])
    # NaN drops out of both ends; a function that applies nowhere in a group gets the spread -inf, which is a tie.
    spread = grouped.nan_to_num(nan=-torch.inf).amax(1) - grouped.nan_to_num(nan=torch.inf).amin(1)  # [P, F]
    limit = TIE * grouped.nan_to_num(nan=0.0).abs().amax(1).clamp(min=1.0)
    return ~(spread > limit).any(-1)


def _weighted(scores: Float[Tensor, "*B F"], weights: Float[Tensor, " F"]) -> Float[Tensor, "*B"]:
    # numpy, because the reward lab computes totals with the same function and runs without torch.
    return torch.from_numpy(total_scores(scores.numpy(), weights.numpy()))


def _normalised(rewards: Rewards, size: int) -> Rewards:
    """Each function minus its mean in the group, divided by its standard deviation in the group."""
    grouped = rewards.scores.view(-1, size, rewards.scores.shape[-1])  # [P, G, F]
    # nanstd works on the last axis: [P, F, G] -> [P, F] -> [P, 1, F].
    mean, std = grouped.nanmean(1, keepdim=True), nanstd(grouped.transpose(1, 2))[:, None]

    def scaled(values: Tensor) -> Tensor:
        # [N, F] -> [P, G, F], or [N, T, F] -> [P, G T, F]: the statistics of the group broadcast over the middle axis.
        shaped = values.reshape(len(grouped), -1, values.shape[-1])
        return ((shaped - mean) / (std + STD_FLOOR)).view(values.shape)

    return Rewards(scaled(rewards.scores), rewards.weights, None if rewards.tokens is None else scaled(rewards.tokens))
