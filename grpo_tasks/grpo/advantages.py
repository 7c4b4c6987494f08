"""Advantages: how much better a completion is than the others of its group (arXiv:2402.03300, eq. 3 ff.)."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

TIE = 1e-6
"""Rewards of a group that differ by no more than this, relative to their size, are a tie."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of N completions in P groups."""

    values: Float[Tensor, " N"]
    """Exactly 0 in dead groups."""
    group_std: Float[Tensor, " P"]
    """Standard deviation of the rewards inside each group (n - 1 in the denominator)."""
    dead: Bool[Tensor, " P"]
    """Groups whose rewards tie: nothing can be learnt from them."""


def advantages(rewards: Float[Tensor, " N"], *, group_size: int, scale: Literal["group", "batch", "none"]) -> Advantages:
    """Reward minus group mean, divided by the group's or the batch's standard deviation, or by nothing.

    Args:
        rewards: total rewards, group by group.
        group_size: completions per group (G), at least 2.
        scale: `scale_rewards` of the config; Dr. GRPO (arXiv:2503.20783) uses none.
    """
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    group_std = grouped.std(dim=1)
    spread = grouped.amax(dim=1) - grouped.amin(dim=1)
    dead = spread <= TIE * grouped.abs().amax(dim=1).clamp(min=1.0)
    if scale == "group":
        centred = centred / (group_std[:, None] + STD_FLOOR)
    elif scale == "batch":
        centred = centred / (rewards.std() + STD_FLOOR)
    # Rounding in the mean would leave a tied group with tiny advantages, which a small std then blows up.
    values = centred.masked_fill(dead[:, None], 0.0).flatten()
    return Advantages(values=values, group_std=group_std.masked_fill(dead, 0.0), dead=dead)
