"""The figures of a stage; schemas/metrics.py says which metrics each of them draws."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a stage."""

    name: str
    title: str
    overview: bool = False
    """Whether the overview of all stages shows it."""
    imitation: str = ""
    """Its title in the overview where no stage has rewards, as with demonstrations; empty: it is not shown there."""


PLOTS: tuple[Plot, ...] = (
    Plot("reward", "Reward", overview=True),
    Plot("rewards", "Each reward function", overview=True),
    Plot("reward_std", "Reward std within groups", overview=True),
    Plot("kl", "KL from the reference", overview=True),
    Plot("completion_length", "Completion length", overview=True, imitation="Completion length"),
    Plot("dead_groups", "Dead groups", overview=True),
    Plot("tasks", "Reward of each task"),
    Plot("reward_weights", "Reward weights"),
    Plot("truncated", "Truncated completions"),
    Plot("learning_rate", "Learning rate", imitation="Learning rate"),
    Plot("tokens_per_s", "Tokens per second"),
    Plot("loss", "Loss (may rise while the model gets better)", imitation="Cross entropy"),
    Plot("token_accuracy", "Token accuracy", imitation="Token accuracy"),
    Plot("entropy", "Entropy", imitation="Entropy"),
    Plot("grad_norm", "Gradient norm", imitation="Gradient norm"),
)
