"""The one table of metric names: what each measures, its unit, which way is better, and when it is an alarm.

The trainer writes these names into the journal; MLflow, the progress bar, the plots, the guards, the reports and the docs read
them. Each name is a constant here and a literal nowhere else. Names are TRL's where TRL has one.

A name that contains `*` stands for a family with one member per reward function or task: `member(REWARD_MEAN, "format")` is
`rewards/format/mean`. A reward has the same name in training and in the evaluation.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

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
    """File name of the plot it is drawn in. Metrics with the same plot share its axes. Empty: not drawn."""
    short: str = ""
    """Label in the progress bar. Empty: not shown there."""
    compared: bool = False
    """Whether `grpo compare` draws its curve."""
    column: str = ""
    """Column of the evaluation samples that it is the mean of."""
    headline: bool = False
    """Whether the summary tables of an evaluation show it."""


# Measured once per update.
REWARD = "reward"
REWARD_STD = "reward_std"
DEAD_GROUPS = "frac_reward_zero_std"
KL = "kl"
TASK_REWARD = "reward/task/*"
EVAL_TASK_REWARD = "eval_reward/task/*"
EVAL_REWARD = "eval_reward"
EVAL_REWARD_MEAN = "eval_rewards/*/mean"
EVAL_REWARD_SUCCESS = "eval_rewards/*/success"
LOSS = "loss"
TOKEN_ACCURACY = "token_accuracy"  # noqa: S105 - no password
TRAINED_TOKENS = "trained_tokens"
KEPT_COMPLETIONS = "kept_completions"
KEPT_REWARD = "kept_reward"
ENTROPY = "entropy"
GRAD_NORM = "grad_norm"
LOSS_SCALE = "loss_scale"
SKIPPED_STEP = "skipped_step"
LEARNING_RATE = "learning_rate"
REWARD_MEAN = "rewards/*/mean"
REWARD_FUNCTION_STD = "rewards/*/std"
REWARD_SUCCESS = "rewards/*/success"
REWARD_WEIGHT = "rewards/*/weight"
MEAN_LENGTH = "completions/mean_length"
TURNS = "conversations/turns"
ENVIRONMENT_TOKENS = "conversations/environment_tokens"
ENVIRONMENT_REWARD = "conversations/environment_reward"
ENVIRONMENT_ERRORS = "conversations/errors"
TOOL_CALLS = "tools/call_frequency"
TOOL_ERRORS = "tools/failure_frequency"
MIN_LENGTH = "completions/min_length"
MAX_LENGTH = "completions/max_length"
CLIPPED_RATIO = "completions/clipped_ratio"
CLIP_LOW = "clip_ratio/low_mean"
CLIP_HIGH = "clip_ratio/high_mean"
CLIP_REGION = "clip_ratio/region_mean"
SAMPLER_DIFFERENCE_MEAN = "sampling/sampling_logp_difference/mean"
SAMPLER_DIFFERENCE_MAX = "sampling/sampling_logp_difference/max"
SAMPLER_DIFFERENCE_WORST = "sampling/sampling_logp_difference/worst_sequence"
SAMPLER_KL = "sampling/kl"
IMPORTANCE_RATIO_MEAN = "sampling/importance_sampling_ratio/mean"
IMPORTANCE_RATIO_MAX = "sampling/importance_sampling_ratio/max"
EFFECTIVE_SAMPLE_SIZE = "sampling/effective_sample_size"
OFF_POLICY_MASKED = "sampling/off_policy_masked"
DROPPED_GROUPS = "dynamic_sampling/dropped_groups"
POLICY_LAG = "sampling/policy_lag"
TRAINER_WAIT = "sampling/trainer_wait_time"
SAMPLER_WAIT = "sampling/sampler_wait_time"
SYNC_TIME = "sampling/sync_time"
SYNC_BYTES = "sampling/sync_bytes"
QUEUE_DEPTH = "sampling/queue_depth"
REPLICAS_SERVING = "sampling/replicas_serving"
REPLICA_TOKENS_PER_S = "replica/*/tokens_per_s"
NUM_TOKENS = "num_tokens"
TOKENS_PER_S = "tokens_per_s"
STEP_TIME = "step_time"
ROLLOUT_TIME = "rollout_time"
REWARD_TIME = "reward_time"
GPU_MEMORY = "gpu_memory"
ENERGY = "energy"
EPOCH = "epoch"

# Measured once per evaluation.
ACCURACY: Final = "accuracy"
FORMAT_RATE: Final = "format_rate"
LENIENT_ACCURACY: Final = "lenient_accuracy"
GREEDY_ACCURACY = "greedy_accuracy"
GREEDY_FORMAT_RATE = "greedy_format_rate"
GREEDY_LENIENT_ACCURACY = "greedy_lenient_accuracy"
PASS_AT_1 = "pass_at_1"  # noqa: S105 - no password
PASS_AT_K: Final = "pass_at_k"  # noqa: S105 - no password
TRUNCATED_RATE = "truncated_rate"
FAILED_RATE = "failed_rate"
COMPLETION_LENGTH = "mean_length"
GREEDY_REWARD = "greedy_reward"
TASK_ACCURACY = "accuracy/task/*"
TASK_FORMAT_RATE = "format_rate/task/*"

# Of the guards of a promotion.
GUARD_CHANGE = "guard/*/change"
GUARD_PASSED = "guard/*/passed"

TRAINING: tuple[Metric, ...] = (
    Metric(
        REWARD,
        "mean weighted reward of all completions of the update",
        better="higher",
        alarm="flat: the policy does not learn",
        plot="reward",
        short="reward",
        compared=True,
    ),
    Metric(
        REWARD_STD,
        "standard deviation of the reward within a group, averaged over groups",
        better="higher",
        alarm="near 0: all completions of a group earn the same, so there is no advantage to learn from",
        plot="reward_std",
        short="std",
        compared=True,
    ),
    Metric(
        DEAD_GROUPS,
        "share of dead groups, whose completions all earn the same",
        "share",
        "lower",
        plot="dead_groups",
        compared=True,
    ),
    Metric(
        KL,
        "mean KL divergence from the reference policy (k3 estimator); with beta 0 it is measured every kl_every_steps updates",
        "nats/token",
        "lower",
        "above 0.5: the policy has moved far from the reference, lower the learning rate",
        plot="kl",
        short="kl",
        compared=True,
    ),
    Metric(TASK_REWARD, "mean weighted reward of the completions of one task", better="higher", plot="tasks"),
    Metric(
        EVAL_TASK_REWARD, "mean weighted reward of completions of held-out prompts of one task", better="higher", plot="tasks"
    ),
    Metric(EVAL_REWARD, "mean weighted reward of completions of held-out prompts", better="higher", plot="reward"),
    Metric(EVAL_REWARD_MEAN, "mean raw score of one reward function on held-out prompts", better="higher"),
    Metric(EVAL_REWARD_SUCCESS, "share of held-out completions that earn the function's full score", "share", "higher"),
    Metric(
        LOSS,
        "policy loss; it starts near 0 and may rise while the model improves, so watch the reward. In a stage of kind sft or "
        "rejection the mean cross entropy of the trained tokens, which falls",
        plot="loss",
    ),
    Metric(
        TOKEN_ACCURACY,
        "share of trained tokens that the policy itself ranks first; kinds sft and rejection only",
        "share",
        "higher",
        plot="token_accuracy",
        short="token_acc",
    ),
    Metric(TRAINED_TOKENS, "tokens with a loss in the update: those of the assistant; kinds sft and rejection only", "tokens"),
    Metric(KEPT_COMPLETIONS, "share of the sampled completions that the update trained on; kind rejection only", "share"),
    Metric(
        KEPT_REWARD,
        "mean weighted reward of the completions that the update trained on; kind rejection only",
        better="higher",
        plot="reward",
    ),
    Metric(ENTROPY, "mean entropy of the distributions that tokens were sampled from", "nats/token", plot="entropy"),
    Metric(GRAD_NORM, "norm of the gradient before clipping", plot="grad_norm"),
    Metric(LOSS_SCALE, "loss scale in float16; it halves when a gradient overflows and doubles after 2,000 updates"),
    Metric(SKIPPED_STEP, "1 for a float16 update whose gradient overflowed: it changed no weight", better="lower"),
    Metric(LEARNING_RATE, "learning rate of the update", plot="learning_rate"),
    Metric(REWARD_MEAN, "mean raw score of one reward function, before its weight", better="higher", plot="rewards"),
    Metric(REWARD_FUNCTION_STD, "standard deviation of the raw score over the update"),
    Metric(REWARD_SUCCESS, "share of completions that earn the function's full score", "share", "higher"),
    Metric(REWARD_WEIGHT, "weight of the function in the sum; it changes when it is adaptive", plot="reward_weights"),
    Metric(MEAN_LENGTH, "mean completion length", "tokens", plot="completion_length", short="length", compared=True),
    Metric(MIN_LENGTH, "shortest completion", "tokens"),
    Metric(MAX_LENGTH, "longest completion", "tokens", plot="completion_length"),
    Metric(
        CLIPPED_RATIO,
        "share of completions that were cut off at max_completion_length (finish reason 'length')",
        "share",
        "lower",
        "high: raise max_completion_length",
        plot="truncated",
    ),
    Metric(CLIP_LOW, "share of tokens whose ratio is clipped from below", "share"),
    Metric(CLIP_HIGH, "share of tokens whose ratio is clipped from above", "share"),
    Metric(CLIP_REGION, "share of tokens whose ratio is clipped either way", "share"),
    Metric(SAMPLER_DIFFERENCE_MEAN, "mean |log p(sampler) - log p(trainer)| of the sampled tokens", "nats", "lower"),
    Metric(SAMPLER_DIFFERENCE_MAX, "largest |log p(sampler) - log p(trainer)| of a sampled token", "nats", "lower"),
    Metric(
        SAMPLER_DIFFERENCE_WORST,
        "largest |mean of log p(sampler) - log p(trainer)| over the tokens of a completion: the log of its geometric-mean ratio",
        "nats/token",
        "lower",
        "far above the mean difference: a few completions come from another policy",
    ),
    Metric(SAMPLER_KL, "KL(sampler || trainer), estimated from the sampled tokens (k3)", "nats/token", "lower"),
    Metric(IMPORTANCE_RATIO_MEAN, "mean importance weight that corrects for the difference between sampler and trainer"),
    Metric(IMPORTANCE_RATIO_MAX, "largest ratio between the trainer's and the sampler's probability of a token", better="lower"),
    Metric(
        EFFECTIVE_SAMPLE_SIZE,
        "share of the trained tokens that count after the correction for the sampler: (sum w)^2 / (n sum w^2) of its weights w",
        "share",
        "higher",
        "below 0.5: the sampler is far from the trainer; lower rollout.max_staleness",
    ),
    Metric(
        OFF_POLICY_MASKED,
        "share of completions whose policy term off_policy_mask_threshold leaves out",
        "share",
        "lower",
    ),
    Metric(DROPPED_GROUPS, "groups that were sampled for the update and not trained on", "groups", "lower"),
    Metric(
        POLICY_LAG,
        "updates between the policy that sampled the rollout and the one that first trained on it; with a vLLM server only",
        "updates",
        "lower",
        "never above rollout.max_staleness",
    ),
    Metric(
        TRAINER_WAIT,
        "time the trainer waited for the rollout",
        "s",
        "lower",
        "near step_time: sampling is the bottleneck; add replicas",
    ),
    Metric(
        SAMPLER_WAIT,
        "time the servers had nothing to sample before this rollout",
        "s",
        "lower",
        "near step_time: training is the bottleneck, or rollout.max_staleness is 0",
    ),
    Metric(SYNC_TIME, "time to hand the policy to all servers and to verify it", "s", "lower"),
    Metric(SYNC_BYTES, "size of the weights that all servers together have loaded since the policy changed", "bytes", "lower"),
    Metric(QUEUE_DEPTH, "requests that waited for a server, averaged over the rollout", "requests", "lower"),
    Metric(
        REPLICAS_SERVING,
        "fewest servers that sampled at any time of the rollout",
        "servers",
        "higher",
        "below the number of servers: one failed; the stage's events say why",
    ),
    Metric(REPLICA_TOKENS_PER_S, "completion tokens per second of one server, counted from 0", "tokens/s", "higher"),
    Metric(NUM_TOKENS, "prompt and completion tokens processed since the stage began", "tokens"),
    Metric(
        TOKENS_PER_S,
        "completion tokens sampled and trained on per second of the update",
        "tokens/s",
        "higher",
        plot="tokens_per_s",
    ),
    Metric(STEP_TIME, "duration of the update", "s", "lower"),
    Metric(ROLLOUT_TIME, "time the update spent sampling", "s", "lower"),
    Metric(TURNS, "turns of the policy in a conversation, on average"),
    Metric(ENVIRONMENT_TOKENS, "share of the tokens after the prompt that tools and environments said", "", "neither"),
    Metric(ENVIRONMENT_REWARD, "mean of what the environment gave for a conversation", better="higher"),
    Metric(
        ENVIRONMENT_ERRORS,
        "share of conversations that a fault of the environment ended; they get the lowest scores of their group, none above 0",
        better="lower",
        alarm="above 0.05: the environment fails; the table of completions has its errors",
    ),
    Metric(TOOL_CALLS, "calls of tools in a conversation, on average"),
    Metric(TOOL_ERRORS, "share of the calls of tools that were answered with an error", better="lower"),
    Metric(REWARD_TIME, "time the update spent in reward functions", "s", "lower"),
    Metric(GPU_MEMORY, "peak GPU memory during the update", "GiB", "lower"),
    Metric(ENERGY, "energy the GPU used during the update (NVML)", "J", "lower"),
    Metric(EPOCH, "passes over the training prompts", "epochs"),
)

EVALUATION: tuple[Metric, ...] = (
    Metric(
        FORMAT_RATE, "share of sampled completions in the strict format", "share", "higher", column="strict_format", headline=True
    ),
    Metric(
        ACCURACY,
        "share of sampled completions that are strictly right: strict format and the right answer",
        "share",
        "higher",
        column="correct",
        headline=True,
    ),
    Metric(GREEDY_ACCURACY, "strict accuracy of greedy completions", "share", "higher", column="correct", headline=True),
    Metric(
        LENIENT_ACCURACY,
        "share of sampled completions with the right answer in any format",
        "share",
        "higher",
        column="lenient_correct",
        headline=True,
    ),
    Metric(GREEDY_FORMAT_RATE, "format rate of greedy completions", "share", "higher", column="strict_format"),
    Metric(GREEDY_LENIENT_ACCURACY, "lenient accuracy of greedy completions", "share", "higher", column="lenient_correct"),
    Metric(PASS_AT_1, "unbiased pass@1 of the sampled completions (strict)", "share", "higher", column="correct"),
    Metric(
        PASS_AT_K,
        "unbiased pass@k of the sampled completions (strict), k = evaluation.num_samples",
        "share",
        "higher",
        column="correct",
        headline=True,
    ),
    Metric(
        TRUNCATED_RATE,
        "share of sampled completions that were cut off at the length limit",
        "share",
        "lower",
        column="truncated",
        headline=True,
    ),
    Metric(
        FAILED_RATE,
        "share of sampled conversations that a fault of the environment ended; they count as wrong, with the lowest scores",
        "share",
        "lower",
        "above 0.05: the environment fails; the samples have its errors",
        column="failed",
    ),
    Metric(COMPLETION_LENGTH, "mean length of sampled completions", "tokens", column="completion_tokens", headline=True),
    Metric(
        REWARD,
        "mean weighted reward of sampled completions, by the functions of evaluation.rewards",
        better="higher",
        column=REWARD,
        headline=True,
    ),
    Metric(GREEDY_REWARD, "mean weighted reward of greedy completions", better="higher", column=REWARD),
    Metric(REWARD_MEAN, "mean raw score of one reward function or evaluator on sampled completions", better="higher"),
    Metric(TASK_ACCURACY, "accuracy on the prompts of one task", "share", "higher", column="correct"),
    Metric(TASK_FORMAT_RATE, "format rate on the prompts of one task", "share", "higher", column="strict_format"),
    Metric(TASK_REWARD, "mean weighted reward on the prompts of one task", better="higher", column=REWARD),
    Metric(GUARD_CHANGE, "change of the metric of one guard of the promotion against the champion or the base"),
    Metric(GUARD_PASSED, "whether one guard of the promotion passed: 1 or 0", better="higher"),
)

HEADLINES: tuple[str, ...] = tuple(metric.name for metric in EVALUATION if metric.headline)
"""Evaluation metrics that summary tables show, in this order."""
CURVES: tuple[str, ...] = tuple(metric.name for metric in TRAINING if metric.compared)
"""Training metrics whose curves `grpo compare` draws."""
PROGRESS: dict[str, str] = {metric.name: metric.short for metric in TRAINING if metric.short}
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
    """The name of a metric that a reward function reports through log_metric. The table does not know these."""
    return f"logged/{function}/{name}"


def describe(name: str) -> Metric | None:
    """The table's entry for a concrete name, family members included; None for a name that the table does not know."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return _BY_NAME.get(_family(name))


def describe_figure(name: str) -> Metric | None:
    """The table's entry for a metric of the evaluation, family members included; None for an unknown name."""
    return _FIGURES.get(name) or _FIGURES.get(_family(name))


def figure_text(name: str, value: float) -> str:
    """A value of an evaluation metric as tables show it: shares in percent, other values with three digits."""
    metric = describe_figure(name)
    if metric is not None and metric.unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if abs(value) < 1_000 else f"{value:,.0f}"


def column_of(name: str) -> str:
    """The column of the evaluation samples that a metric is the mean of. A function's scores have the name of their mean."""
    found = describe_figure(name)
    return found.column if found is not None and found.column else name


def _family(name: str) -> str:
    head, _, rest = name.partition("/")
    if rest.startswith("task/"):
        return f"{head}/task/*"
    return f"{head}/*/{rest.rpartition('/')[2]}"
