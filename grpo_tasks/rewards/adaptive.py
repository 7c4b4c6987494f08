"""Adaptive weights: a function that rarely succeeds gets more weight, one that nearly always succeeds gets less.

The success rate is the share of completions with the full score, averaged over `every_steps` updates. Updates in which the
function failed or applied to no completion are left out. The scale stays within
[MIN_SCALE, MAX_SCALE].
"""

from typing import TypedDict

from schemas.config.rewards import AdaptiveWeightConfig

SHRINK = 0.9
"""Factor applied when the success rate is high."""
MIN_SCALE, MAX_SCALE = 0.25, 4.0
"""Smallest and largest weight, as a multiple of the configured one."""


class AdaptiveState(TypedDict):
    """An adaptive weight as a checkpoint stores it."""

    scale: float
    steps: int
    shares: list[float]


class AdaptiveWeight:
    """The factor on the configured weight of one function."""

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
