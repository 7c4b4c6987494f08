"""Weights that move: a function that hardly ever succeeds gets more weight, one that nearly always does gets less.

The success rate is the mean over `every_steps` updates of the share of completions with the full score; an update in which the
function failed or applied to nothing is left out. The scale stays within [min_scale, max_scale].
"""

from typing import TypedDict

from schemas.config.rewards import AdaptiveWeightConfig


class AdaptiveState(TypedDict):
    """JSON of one moving weight."""

    scale: float
    steps: int
    shares: list[float]


class AdaptiveWeight:
    """The factor on one function's configured weight."""

    def __init__(self, config: AdaptiveWeightConfig) -> None:
        self.config = config
        self.scale, self.steps = 1.0, 0
        self.shares: list[float] = []

    def observe(self, share: float | None) -> None:
        """One update is over, in which this share of completions succeeded (None: nothing known)."""
        self.steps += 1
        if share is not None:
            self.shares.append(share)
        if self.steps < self.config.every_steps:
            return
        if self.shares:
            self.scale = self._moved(sum(self.shares) / len(self.shares))
        self.steps, self.shares = 0, []

    def state(self) -> AdaptiveState:
        """What a checkpoint has to hold."""
        return {"scale": self.scale, "steps": self.steps, "shares": list(self.shares)}

    def restore(self, state: AdaptiveState) -> None:
        """Take up what `state` gave."""
        self.scale, self.steps, self.shares = state["scale"], state["steps"], list(state["shares"])

    def _moved(self, rate: float) -> float:
        factor = self.config.grow if rate < self.config.low else self.config.shrink if rate > self.config.high else 1.0
        return min(self.config.max_scale, max(self.config.min_scale, self.scale * factor))
