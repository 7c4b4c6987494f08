"""The one table of metric names, each a constant here and a literal nowhere else: TRL's where TRL has one. And of the figures.

A name that contains `*` stands for a family with one member per reward function or task: `member(REWARD_MEAN, "format")` is
`rewards/format/mean`. A reward has the same name in training and in the evaluation.
"""

import re
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity."""

    name: str
    meaning: str
    unit: str = ""
    better: Better = "neither"
    alarm: str = ""
    """Which values are a warning sign, and what to do."""
    plot: str = ""
    """Name of the plot whose axes it shares. Empty: not drawn."""
    column: str = ""
    """Column of the evaluation samples that it is the mean of."""


TRAINING: list[Metric] = []
EVALUATION: list[Metric] = []


def _update(name: str, meaning: str, unit: str = "", better: Better = "neither", alarm: str = "", plot: str = "") -> str:
    TRAINING.append(Metric(name, meaning, unit, better, alarm, plot))
    return name


def _evaluation(name: str, meaning: str, unit: str = "", better: Better = "neither", alarm: str = "", column: str = "") -> str:
    EVALUATION.append(Metric(name, meaning, unit, better, alarm, column=column))
    return name


# Measured once per update.
REWARD = _update(
    "reward", "mean weighted reward of all completions", better="higher", alarm="flat: the policy does not learn", plot="reward"
)
REWARD_STD = _update(
    "reward_std",
    "standard deviation of the reward within a group, averaged over groups",
    better="higher",
    alarm="near 0: all completions of a group earn the same, so there is no advantage to learn from",
    plot="reward_std",
)
DEAD_GROUPS = _update(
    "frac_reward_zero_std", "share of groups whose completions all earn the same", "share", "lower", plot="dead_groups"
)
KL = _update(
    "kl",
    "mean KL divergence from the reference policy (k3 estimator) of the groups that are computed; with beta 0 it is measured "
    "every kl_every_steps updates",
    "nats/token",
    "lower",
    "above 0.5: the policy has moved far from the reference, lower the learning rate",
    plot="kl",
)
TASK_REWARD = _update("reward/task/*", "mean weighted reward of the completions of one task", better="higher", plot="tasks")
EVAL_TASK_REWARD = _update(
    "eval_reward/task/*", "mean weighted reward on held-out prompts of one task", better="higher", plot="tasks"
)
EVAL_REWARD = _update("eval_reward", "mean weighted reward of completions of held-out prompts", better="higher", plot="reward")
EVAL_REWARD_MEAN = _update("eval_rewards/*/mean", "mean raw score of one reward function on held-out prompts", better="higher")
EVAL_REWARD_SUCCESS = _update(
    "eval_rewards/*/success", "share of held-out completions with the function's full score", "share", "higher"
)
LOSS = _update(
    "loss",
    "policy loss; it starts near 0 and may rise while the model improves, so watch the reward. In a stage of kind sft or "
    "rejection the mean cross entropy of the trained tokens, which falls",
    plot="loss",
)
TOKEN_ACCURACY = _update(
    "token_accuracy",
    "share of trained tokens that the policy ranks first; sft and rejection only",
    "share",
    "higher",
    plot="token_accuracy",
)
TRAINED_TOKENS = _update(
    "trained_tokens", "tokens of the assistant, with a loss, in the update; sft and rejection only", "tokens"
)
KEPT_COMPLETIONS = _update("kept_completions", "share of the sampled completions that were trained on; rejection only", "share")
KEPT_REWARD = _update(
    "kept_reward", "mean weighted reward of the completions that were trained on; rejection only", better="higher", plot="reward"
)
ENTROPY = _update("entropy", "mean entropy of the distributions that tokens were sampled from", "nats/token", plot="entropy")
GRAD_NORM = _update("grad_norm", "norm of the gradient before clipping", plot="grad_norm")
LOSS_SCALE = _update("loss_scale", "loss scale in float16; it halves when a gradient overflows and doubles after 2,000 updates")
SKIPPED_STEP = _update("skipped_step", "1 for a float16 update whose gradient overflowed: it changed no weight", better="lower")
LEARNING_RATE = _update("learning_rate", "learning rate of the update", plot="learning_rate")
REWARD_MEAN = _update("rewards/*/mean", "mean raw score of one reward function, without weight", better="higher", plot="rewards")
REWARD_FUNCTION_STD = _update("rewards/*/std", "standard deviation of the raw score over the update")
REWARD_SUCCESS = _update("rewards/*/success", "share of completions that earn the function's full score", "share", "higher")
REWARD_WEIGHT = _update("rewards/*/weight", "weight of the function in the sum, fixed or adaptive", plot="reward_weights")
MEAN_LENGTH = _update("completions/mean_length", "mean completion length", "tokens", plot="completion_length")
MIN_LENGTH = _update("completions/min_length", "shortest completion", "tokens")
MAX_LENGTH = _update("completions/max_length", "longest completion", "tokens", plot="completion_length")
CLIPPED_RATIO = _update(
    "completions/clipped_ratio",
    "share of completions that were cut off at max_completion_length (finish reason 'length')",
    "share",
    "lower",
    "high: raise max_completion_length",
    plot="truncated",
)
CLIP_LOW = _update("clip_ratio/low_mean", "share of tokens whose ratio is clipped from below", "share")
CLIP_HIGH = _update("clip_ratio/high_mean", "share of tokens whose ratio is clipped from above", "share")
CLIP_REGION = _update("clip_ratio/region_mean", "share of tokens whose ratio is clipped either way", "share")
SAMPLER_DIFFERENCE_MEAN = _update(
    "sampling/sampling_logp_difference/mean", "mean |log p(sampler) - log p(trainer)| of the sampled tokens", "nats", "lower"
)
SAMPLER_DIFFERENCE_MAX = _update(
    "sampling/sampling_logp_difference/max", "largest |log p(sampler) - log p(trainer)| of a sampled token", "nats", "lower"
)
SAMPLER_DIFFERENCE_WORST = _update(
    "sampling/sampling_logp_difference/worst_sequence",
    "largest |mean of log p(sampler) - log p(trainer)| over the tokens of a completion: the log of its geometric-mean ratio",
    "nats/token",
    "lower",
    "far above the mean difference: a few completions come from another policy",
)
SAMPLER_KL = _update("sampling/kl", "KL(sampler || trainer), estimated from the sampled tokens (k3)", "nats/token", "lower")
IMPORTANCE_RATIO_MEAN = _update(
    "sampling/importance_sampling_ratio/mean", "mean weight that corrects for the difference between sampler and trainer"
)
IMPORTANCE_RATIO_MAX = _update(
    "sampling/importance_sampling_ratio/max",
    "largest ratio of the trainer's to the sampler's probability of a token",
    better="lower",
)
EFFECTIVE_SAMPLE_SIZE = _update(
    "sampling/effective_sample_size",
    "share of the trained tokens that count after the correction for the sampler: (sum w)^2 / (n sum w^2) of its weights w",
    "share",
    "higher",
    "below 0.5: the sampler is far from the trainer; lower rollout.max_staleness",
)
OFF_POLICY_MASKED = _update(
    "sampling/off_policy_masked", "completions whose policy term off_policy_mask_threshold leaves out", "share", "lower"
)
DROPPED_GROUPS = _update("dynamic_sampling/dropped_groups", "groups sampled for the update and not trained on", "groups", "lower")
POLICY_LAG = _update(
    "sampling/policy_lag",
    "updates between the policy that sampled the rollout and the one that first trained on it; with a vLLM server only",
    "updates",
    "lower",
    "never above rollout.max_staleness",
)
TRAINER_WAIT = _update(
    "sampling/trainer_wait_time",
    "time the trainer waited for the rollout",
    "s",
    "lower",
    "near step_time: sampling is the bottleneck; add replicas",
)
SAMPLER_WAIT = _update(
    "sampling/sampler_wait_time",
    "time the servers had nothing to sample before this rollout",
    "s",
    "lower",
    "near step_time: training is the bottleneck, or rollout.max_staleness is 0",
)
SYNC_TIME = _update("sampling/sync_time", "time to hand the policy to all servers and to verify it", "s", "lower")
SYNC_BYTES = _update("sampling/sync_bytes", "weights that all servers together loaded since the policy changed", "bytes", "lower")
QUEUE_DEPTH = _update("sampling/queue_depth", "requests that waited for a server, averaged over the rollout", "requests", "lower")
REPLICAS_SERVING = _update(
    "sampling/replicas_serving",
    "fewest servers that sampled at any time of the rollout",
    "servers",
    "higher",
    "below the number of servers: one failed; the stage's events say why",
)
REPLICA_TOKENS_PER_S = _update(
    "replica/*/tokens_per_s", "completion tokens per second of one server, from 0", "tokens/s", "higher"
)
NUM_TOKENS = _update("num_tokens", "prompt and completion tokens processed since the stage began", "tokens")
TOKENS_PER_S = _update(
    "tokens_per_s", "completion tokens sampled and trained on per second of the update", "tokens/s", "higher", plot="tokens_per_s"
)
STEP_TIME = _update("step_time", "duration of the update", "s", "lower")
ROLLOUT_TIME = _update("rollout_time", "time the update spent sampling", "s", "lower")
HOST_WAIT = _update(
    "update/host_wait_time",
    "time the host waited for the GPU before it could read the figures of the update and the norm of its gradient",
    "s",
)
GPU_IDLE = _update(
    "update/gpu_idle_time",
    "time the GPU was idle while the host built microbatches; gaps within a pass are not measured",
    "s",
    "lower",
    "near step_time: the host is the bottleneck; larger microbatches, or fewer processes on its cores",
)
TURNS = _update("conversations/turns", "turns of the policy in a conversation, on average")
ENVIRONMENT_TOKENS = _update(
    "conversations/environment_tokens", "share of the tokens after the prompt that tools and environments said", "", "neither"
)
ENVIRONMENT_REWARD = _update(
    "conversations/environment_reward", "mean of what the environment gave for a conversation", better="higher"
)
ENVIRONMENT_ERRORS = _update(
    "conversations/errors",
    "share of conversations that a fault of the environment ended; they get the lowest scores of their group, none above 0",
    better="lower",
    alarm="above 0.05: the environment fails; the table of completions has its errors",
)
TOOL_CALLS = _update("tools/call_frequency", "calls of tools in a conversation, on average")
TOOL_ERRORS = _update("tools/failure_frequency", "share of the calls of tools that were answered with an error", better="lower")
REWARD_TIME = _update("reward_time", "time the update spent in reward functions", "s", "lower")
GPU_MEMORY = _update("gpu_memory", "peak GPU memory during the update", "GiB", "lower")
ENERGY = _update("energy", "energy the GPU used during the update (NVML)", "J", "lower")
EPOCH = _update("epoch", "passes over the training prompts", "epochs")

# Measured once per evaluation; the last two of the guards of a promotion.
FORMAT_RATE = _evaluation("format_rate", "share of completions in the strict format", "share", "higher", column="strict_format")
ACCURACY = _evaluation(
    "accuracy", "share of sampled completions with the right answer in the strict format", "share", "higher", column="correct"
)
GREEDY_ACCURACY = _evaluation("greedy_accuracy", "strict accuracy of greedy completions", "share", "higher", column="correct")
LENIENT_ACCURACY = _evaluation(
    "lenient_accuracy", "share of completions with the right answer in any format", "share", "higher", column="lenient_correct"
)
GREEDY_FORMAT_RATE = _evaluation(
    "greedy_format_rate", "format rate of greedy completions", "share", "higher", column="strict_format"
)
GREEDY_LENIENT_ACCURACY = _evaluation(
    "greedy_lenient_accuracy", "lenient accuracy of greedy completions", "share", "higher", column="lenient_correct"
)
PASS_AT_1 = _evaluation("pass_at_1", "unbiased pass@1 of the sampled completions (strict)", "share", "higher", column="correct")
PASS_AT_K = _evaluation(
    "pass_at_k", "unbiased pass@k of the samples (strict), k = evaluation.num_samples", "share", "higher", column="correct"
)
TRUNCATED_RATE = _evaluation(
    "truncated_rate", "share of sampled completions that were cut off at the length limit", "share", "lower", column="truncated"
)
FAILED_RATE = _evaluation(
    "failed_rate",
    "share of sampled conversations that a fault of the environment ended; they count as wrong, with the lowest scores",
    "share",
    "lower",
    "above 0.05: the environment fails; the samples have its errors",
    column="failed",
)
COMPLETION_LENGTH = _evaluation("mean_length", "mean length of sampled completions", "tokens", column="completion_tokens")
_evaluation(REWARD, "mean weighted reward of the samples, by the functions of evaluation.rewards", better="higher", column=REWARD)
GREEDY_REWARD = _evaluation("greedy_reward", "mean weighted reward of greedy completions", better="higher", column=REWARD)
_evaluation(REWARD_MEAN, "mean raw score of one reward function or evaluator on sampled completions", better="higher")
TASK_ACCURACY = _evaluation("accuracy/task/*", "accuracy on the prompts of one task", "share", "higher", column="correct")
TASK_FORMAT_RATE = _evaluation(
    "format_rate/task/*", "format rate on prompts of one task", "share", "higher", column="strict_format"
)
_evaluation(TASK_REWARD, "mean weighted reward on the prompts of one task", better="higher", column=REWARD)
GUARD_CHANGE = _evaluation("guard/*/change", "change of the metric of one guard against the champion or the base")
GUARD_PASSED = _evaluation("guard/*/passed", "whether one guard of the promotion passed: 1 or 0", better="higher")

HEADLINES = (FORMAT_RATE, ACCURACY, LENIENT_ACCURACY, REWARD, GREEDY_ACCURACY, PASS_AT_K, TRUNCATED_RATE, COMPLETION_LENGTH)
"""Evaluation metrics that summary tables show, in this order. A narrow terminal leaves out the last ones."""
CURVES = (REWARD, REWARD_STD, DEAD_GROUPS, KL, MEAN_LENGTH)
"""Training metrics whose curves `grpo compare` draws."""
PROGRESS = {REWARD: "reward", REWARD_STD: "std", KL: "kl", TOKEN_ACCURACY: "token_acc", MEAN_LENGTH: "length"}
"""Training metrics of the progress bar with their labels."""

PROMOTING: tuple[str, ...] = (ACCURACY, FORMAT_RATE, LENIENT_ACCURACY, PASS_AT_K, REWARD, REWARD_MEAN)
"""Evaluation metrics that can decide about the alias `champion`; the last one for any function of the evaluation."""
TASK_FAMILIES: dict[str, str] = {ACCURACY: TASK_ACCURACY, FORMAT_RATE: TASK_FORMAT_RATE, REWARD: TASK_REWARD}
"""Evaluation metrics that are also measured for each task, with their families."""

_BY_NAME = {metric.name: metric for metric in EVALUATION + TRAINING}
_FIGURES = {metric.name: metric for metric in EVALUATION}


def member(family: str, function: str) -> str:
    """The name of a family's metric for one reward function or task. MLflow refuses other characters than these in a name."""
    return family.replace("*", re.sub(r"[^\w.\- ]", "_", function))


def logged(function: str, name: str) -> str:
    """The name of a metric that a reward function reports through log_metric; not in the table."""
    return f"logged/{function}/{name}"


def describe(name: str) -> Metric | None:
    """The table's entry for a concrete name, family members included; None for an unknown name."""
    return _BY_NAME.get(name) or _BY_NAME.get(_family(name))


def describe_figure(name: str) -> Metric | None:
    """`describe` for a metric of the evaluation."""
    return _FIGURES.get(name) or _FIGURES.get(_family(name))


def figure_text(name: str, value: float) -> str:
    """A value of an evaluation metric as tables show it: shares in percent, other values with three digits."""
    metric = describe_figure(name)
    if metric is not None and metric.unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if abs(value) < 1_000 else f"{value:,.0f}"


def duration_text(seconds: float) -> str:
    """A duration as people say it: 45 s, 12 min, 3 h 20 min, 5 days."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2_880 else f"{minutes / 1_440:.0f} days"


def column_of(name: str) -> str:
    """The column of the evaluation samples that a metric is the mean of. A function's scores have the name of their mean."""
    found = describe_figure(name)
    return (found and found.column) or name


def _family(name: str) -> str:
    head, _, rest = name.partition("/")
    if rest.startswith("task/"):
        return f"{head}/task/*"
    return f"{head}/*/{rest.rpartition('/')[2]}"


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a stage."""

    name: str
    title: str
    overview: bool = False
    """Whether the overview of all stages shows it."""
    imitation: str = ""
    """Title in an overview of stages without rewards; empty: not shown there."""


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
