"""One table of metric names: what each means, its unit, which way is better, and when it is an alarm.

The journal, MLflow, the progress bar, the plots and the docs all read it. Names are TRL's where TRL has one.
A name that ends in `/*` stands for a family, one member per reward function.
"""

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that is measured once per update."""

    name: str
    meaning: str
    unit: str = ""
    better: Better = "neither"
    alarm: str = ""
    plot: str = ""
    """Title of the plot it is drawn in; metrics with the same title share axes; empty: not drawn."""


TRAINING: tuple[Metric, ...] = (
    Metric("reward", "mean weighted reward of all completions of the update", "", "higher", "flat", "reward"),
    Metric(
        "reward_std",
        "standard deviation of the reward inside a group, mean over groups",
        "",
        "higher",
        "towards 0: every completion of a group earns the same, nothing can be learnt",
        "reward_std",
    ),
    Metric(
        "frac_reward_zero_std",
        "share of dead groups: all completions earn the same",
        "share",
        "lower",
        "",
        "dead_groups",
    ),
    Metric(
        "kl",
        "mean KL divergence from the reference policy (k3 estimator); at beta 0 measured every kl_every_steps updates",
        "nats/token",
        "lower",
        "above 0.5: the policy has moved too far, lower the learning rate",
        "kl",
    ),
    Metric("eval_reward", "mean weighted reward of completions of held-out prompts", "", "higher", "", "reward"),
    Metric("eval_rewards/*/mean", "mean raw score of one reward function on held-out prompts", "", "higher"),
    Metric("eval_rewards/*/success", "share of held-out completions with the function's full score", "share", "higher"),
    Metric("loss", "policy loss; starts near 0 and may RISE while the model gets better: watch reward", plot="loss"),
    Metric("entropy", "mean entropy of the sampled tokens' distributions", "nats/token", plot="entropy"),
    Metric("grad_norm", "norm of the gradient before clipping", plot="grad_norm"),
    Metric("loss_scale", "factor of the loss in float16; it halves when a gradient overflows and doubles after 2,000 updates"),
    Metric("skipped_step", "1 for an update in float16 whose gradient overflowed: no weight was moved", "", "lower"),
    Metric("learning_rate", "learning rate of the update", plot="learning_rate"),
    Metric("rewards/*/mean", "mean raw score of one reward function, before its weight", "", "higher", "", "rewards"),
    Metric("rewards/*/std", "standard deviation of the raw score over the update"),
    Metric("rewards/*/success", "share of completions with the function's full score", "share", "higher"),
    Metric("rewards/*/weight", "weight of the function in the sum (moves when adaptive)", plot="reward_weights"),
    Metric("completions/mean_length", "mean completion length", "tokens", plot="completion_length"),
    Metric("completions/min_length", "shortest completion", "tokens"),
    Metric("completions/max_length", "longest completion", "tokens", plot="completion_length"),
    Metric(
        "completions/clipped_ratio",
        "share of completions cut off at max_completion_length (finish reason 'length')",
        "share",
        "lower",
        "high: raise max_completion_length",
        "truncated",
    ),
    Metric("clip_ratio/low_mean", "share of tokens clipped from below", "share"),
    Metric("clip_ratio/high_mean", "share of tokens clipped from above", "share"),
    Metric("clip_ratio/region_mean", "share of tokens clipped either way", "share"),
    Metric(
        "sampling/sampling_logp_difference/mean",
        "mean |log p(sampler) - log p(trainer)| of the sampled tokens",
        "nats",
        "lower",
    ),
    Metric("sampling/sampling_logp_difference/max", "largest such difference", "nats", "lower"),
    Metric("sampling/kl", "KL divergence of the trainer's policy from the sampler's (k3 estimator)", "nats/token", "lower"),
    Metric("sampling/importance_sampling_ratio/mean", "mean factor the policy term is multiplied by to correct for the sampler"),
    Metric("sampling/importance_sampling_ratio/max", "largest ratio between the two probabilities of a token", "", "lower"),
    Metric("dynamic_sampling/dropped_groups", "groups sampled for the update and not trained on", "groups", "lower"),
    Metric("num_tokens", "tokens of prompts and completions seen since the stage began", "tokens"),
    Metric(
        "tokens_per_s",
        "completion tokens sampled and trained on per second of the update",
        "tokens/s",
        "higher",
        "",
        "tokens_per_s",
    ),
    Metric("step_time", "duration of the update", "s", "lower"),
    Metric("rollout_time", "part of the update spent sampling", "s", "lower"),
    Metric("reward_time", "part of the update spent in reward functions", "s", "lower"),
    Metric("gpu_memory", "peak memory of the card during the update", "GiB", "lower"),
    Metric("energy", "energy the card took during the update (NVML)", "J", "lower"),
    Metric("epoch", "passes over the training prompts", "epochs"),
)

EVALUATION: tuple[Metric, ...] = (
    Metric("accuracy", "share of sampled completions that are strictly right: format kept and answer equal", "share", "higher"),
    Metric("format_rate", "share of sampled completions that keep the strict format", "share", "higher"),
    Metric("lenient_accuracy", "share whose last number or answer is right, whatever the format", "share", "higher"),
    Metric("greedy_accuracy", "strict accuracy of greedy completions", "share", "higher"),
    Metric("greedy_format_rate", "format rate of greedy completions", "share", "higher"),
    Metric("greedy_lenient_accuracy", "lenient accuracy of greedy completions", "share", "higher"),
    Metric("pass_at_1", "unbiased pass@1 of the sampled completions (strict)", "share", "higher"),
    Metric("pass_at_k", "unbiased pass@k, k = evaluation.num_samples (strict)", "share", "higher"),
    Metric("truncated_rate", "share of sampled completions cut off at the length limit", "share", "lower"),
    Metric("mean_length", "mean length of sampled completions", "tokens"),
)

_BY_NAME = {metric.name: metric for metric in TRAINING + EVALUATION}


def describe(name: str) -> Metric | None:
    """The table's entry for a concrete name, family members included; None for a name the table does not know."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    head, _, rest = name.partition("/")
    return _BY_NAME.get(f"{head}/*/{rest.rpartition('/')[2]}")
