"""Sections `stages[]`, under TRL's names where TRL has them, and `difficulty`: pass rates before training.

A stage has one of three kinds:

    grpo        completions of the policy, weighted by their advantages
    sft         demonstrations from the data: cross entropy of their tokens
    rejection   completions of the policy, only the best ones: cross entropy of their tokens
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from schemas.config.guards import GuardsConfig
from schemas.config.section import Folded, Section, T
from schemas.config.types import (
    MOST_COMPLETIONS,
    MOST_ROWS,
    MOST_TIMES,
    MOST_TOKENS,
    MOST_UPDATES,
    Address,
    Fraction,
    FreeSettings,
    Name,
)
from schemas.metrics import LEARNING_RATE, REWARD, TRAINING, member

WhatItTrainsOn = Annotated[T, Folded("what_it_trains_on")]
Batches = Annotated[T, Folded("batches")]
Optimizer = Annotated[T, Folded("optimizer")]
LossDetails = Annotated[T, Folded("loss_details")]
Mismatch = Annotated[T, Folded("sampler_mismatch")]
EngineChoice = Annotated[T, Folded("engine_choice")]
LogsAndCheckpoints = Annotated[T, Folded("logs_and_checkpoints")]

Band = Annotated[list[Fraction], Field(min_length=2, max_length=2)]
"""A lower and an upper bound, both inclusive."""


Kind = Literal["grpo", "sft", "rejection"]

_DEMONSTRATIONS, _SELECTION = "demonstrations", "keep_completions keep_reward"
_POLICY_LOSS = (
    "engine trl loss_type scale_rewards baseline multi_objective_aggregation beta kl_every_steps reference epsilon "
    "epsilon_high delta sapo_temperature_pos sapo_temperature_neg use_bias_correction_kl importance_sampling_level "
    "skip_dead_groups top_entropy_quantile entropy_coef importance_sampling_correction importance_sampling_clip_max "
    "importance_sampling_clip_min off_policy_mask_threshold max_sampling_logp_difference max_refills"
)
_SAMPLING = (
    "keep_pass_rate measure_difficulty min_pass_at_group num_generations steps_per_generation num_iterations "
    "mask_truncated_completions"
)
FOREIGN: dict[Kind, list[str]] = {
    "grpo": f"{_DEMONSTRATIONS} {_SELECTION}".split(),
    "sft": f"{_POLICY_LOSS} {_SAMPLING} {_SELECTION}".split(),
    "rejection": f"{_POLICY_LOSS} {_DEMONSTRATIONS}".split(),
}
"""Settings that a kind of stage has no use for."""
SUPERVISED_LEARNING_RATE = 2e-5
"""Default of learning_rate for kind sft and rejection, that of TRL's SFTConfig."""


def kind_with(field: str) -> Kind:
    """The first kind of stage that has a use for a setting."""
    return next(kind for kind, foreign in FOREIGN.items() if field not in foreign)


class DemonstrationsConfig(Section):
    """Where the demonstrations of a stage of kind sft come from."""

    column: Address | None = None
    """Column of the data that holds them: the text of the assistant's turn, or chat messages that continue the prompt. Messages
    may begin with the prompt itself. `answer` is the ground truth, after extraction."""
    function: Address | None = None
    """package.module:function, which receives a row (a dict with prompt, answer and every column) and returns the text of the
    assistant's turn, or messages."""
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest demonstration in tokens. Longer ones are refused, never cut. Empty: rollout.max_completion_length; with tools or an
    environment interaction.max_tokens."""
    max_invalid_fraction: Fraction = 0.05
    """Share of the rows that may lack a usable demonstration. They are left out and listed in refused_demonstrations.jsonl. With
    more of them the run stops in the reward lab, before anything is sampled."""
    module_dir: Path | None = None
    """Folder with the module of your function, relative to the working directory. Empty: as for rewards.module_dir."""

    def _faults(self) -> Iterator[str]:
        if (self.column is None) == (self.function is None):
            yield "name either a column or a function, for example column: solution"
        if self.function is not None and ":" not in self.function:
            yield f"{self.function[:80]} does not name a function; fix: function: package.module:function"

    def module_dirs(self) -> list[Path]:
        """Folders that are searched for the module of the function, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]


class EarlyStopConfig(Section):
    """Ends a stage when a metric reaches its target."""

    metric: Annotated[str, StringConstraints(max_length=200)] = REWARD
    """Name of a training metric, such as reward, kl or rewards/NAME/mean. schemas/metrics.py lists them."""
    target: float
    """The stage ends when the mean of the metric is at least this value, or at most this value if lower is better."""
    window: int = Field(10, ge=1, le=MOST_UPDATES)
    """Number of updates in the mean."""
    min_steps: int = Field(1, ge=1, le=MOST_UPDATES)
    """Number of updates before which the stage does not end."""


class StageConfig(Section):
    """One stage: GRPO (arXiv:2402.03300), demonstrations, or the best of the policy's own completions."""

    name: Name
    """Name of the stage and of its child run in MLflow."""
    kind: WhatItTrainsOn[Kind] = "grpo"
    """What the stage trains on. grpo: completions of the policy, weighted by advantages. sft: demonstrations, by cross entropy on
    the assistant's tokens. rejection: the best completions of the policy, by cross entropy; a cheap baseline for GRPO."""
    rewards: list[Name] = Field(default_factory=list)
    """Names of the reward functions of this stage. A stage of kind sft needs them for held-out evaluations only (eval_steps)."""
    demonstrations: WhatItTrainsOn[DemonstrationsConfig | None] = None
    """kind sft: where the demonstrations come from."""
    keep_completions: WhatItTrainsOn[int | None] = Field(1, ge=1, le=MOST_COMPLETIONS)
    """kind rejection: completions of each prompt that are trained on, those with the highest rewards. Of equal completions one
    counts. Empty: all that reach keep_reward."""
    keep_reward: WhatItTrainsOn[Fraction | None] = None
    """kind rejection: share of the full reward that a completion needs to be trained on. Empty: no limit."""
    keep_pass_rate: WhatItTrainsOn[Band | None] = None
    """Lowest and highest pass rate of the prompts that the stage trains on, for example [0.1, 0.9]. Others teach little: nearly
    all of their completions fail, or succeed. They are listed in left_out.parquet. Empty: all prompts are kept."""
    measure_difficulty: WhatItTrainsOn[bool] = False
    """Measure the pass rates again, with the model that this stage starts from. Off: the stage uses those of the first stage's
    start, or of difficulty.pass_rate_column."""
    min_pass_at_group: WhatItTrainsOn[Fraction | None] = None
    """Smallest pass@G that the policy which the stage starts from must reach on the training prompts: the share of prompts that
    at least one of num_generations completions solves. Below it the run stops before the stage. Empty: no such gate."""
    max_steps: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """Number of updates. Empty: given by num_train_epochs."""
    num_train_epochs: Batches[float] = Field(1.0, gt=0.0, le=1_000_000.0)
    """Passes over the training prompts. max_steps, if given, overrides it."""
    num_generations: int = Field(8, ge=2, le=MOST_COMPLETIONS)
    """Completions per prompt: the group size G."""
    per_device_train_batch_size: int = Field(8, ge=1, le=MOST_COMPLETIONS)
    """Completions, or demonstrations, per forward and backward pass."""
    gradient_accumulation_steps: Batches[int] = Field(1, ge=1, le=MOST_COMPLETIONS)
    """Forward and backward passes per update. An update has per_device_train_batch_size times this many completions."""
    max_tokens_per_microbatch: Batches[Annotated[int, Field(ge=1, le=MOST_ROWS)] | Literal["auto"] | None] = None
    """Tokens per forward and backward pass: completions, and each different prompt once. The completions of an update are divided
    into passes of at most this size, which replaces per_device_train_batch_size as the size of a pass. The update is the same.
    For models that compute padding (layers with a state, or the slow way), padding counts as tokens.
    auto: as many as fit into the memory of the GPU (`grpo plan` shows them); on a CPU per_device_train_batch_size decides."""
    max_refills: Batches[int] = Field(0, ge=0, le=MOST_TIMES)
    """How often dead groups are replaced by groups of other prompts before an update (dynamic sampling, arXiv:2503.14476)."""
    steps_per_generation: Batches[int | None] = Field(None, ge=1, le=MOST_COMPLETIONS)
    """Forward and backward passes per rollout; a multiple of gradient_accumulation_steps. Empty: equal to it."""
    num_iterations: Batches[int] = Field(1, ge=1, le=MOST_TIMES)
    """How often each rollout is trained on. Above 1 the probability ratio is clipped."""
    learning_rate: float = Field(1e-6, gt=0.0, le=10.0)
    """Peak learning rate. Default of kind sft and rejection: 2e-5."""
    lr_scheduler_type: Optimizer[Literal["linear", "cosine", "constant", "constant_with_warmup"]] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: Optimizer[Fraction] = 0.0
    """Share of the updates over which the learning rate rises from 0. warmup_steps, if above 0, overrides it."""
    warmup_steps: Optimizer[int] = Field(0, ge=0, le=MOST_UPDATES)
    """Number of updates over which the learning rate rises from 0."""
    optim: Optimizer[Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]] = "adamw_torch"
    """Optimizer. On a GPU adamw_torch is fused too: a few kernels a step instead of ten for each trained matrix. The 8-bit ones
    need bitsandbytes."""
    adam_beta1: Optimizer[float] = Field(0.9, ge=0.0, lt=1.0)
    """Decay rate of the first moment."""
    adam_beta2: Optimizer[float] = Field(0.999, ge=0.0, lt=1.0)
    """Decay rate of the second moment."""
    adam_epsilon: Optimizer[float] = Field(1e-8, gt=0.0)
    """Term that keeps the optimizer from dividing by zero."""
    weight_decay: Optimizer[float] = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: Optimizer[float] = Field(1.0, ge=0.0)
    """Largest gradient norm. A larger gradient is scaled down to it. 0 disables clipping."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """Loss. The first four clip the ratio and differ in how they average. grpo: per sequence, then over sequences. bnpo: over
    the tokens of a microbatch. dapo: over the tokens of the whole update. dr_grpo: over completions times max_completion_length
    (no length bias). cispo caps the ratio as a weight and keeps every token's gradient (average of dapo). sapo damps the ratio
    smoothly (average of grpo)."""
    scale_rewards: LossDetails[Literal["group", "batch", "none"]] = "group"
    """Divisor of the reward minus its baseline: the standard deviation of the group or of the rollout, or none."""
    baseline: LossDetails[Literal["group_mean", "leave_one_out"]] = "group_mean"
    """Baseline of a reward: the mean of its group, or the mean of the other completions of its group (RLOO, arXiv:2402.14740)."""
    multi_objective_aggregation: LossDetails[Literal["sum_then_normalize", "normalize_then_sum"]] = "sum_then_normalize"
    """How several reward functions become one advantage. sum_then_normalize: weighted sum, then scale_rewards.
    normalize_then_sum: each divided by its own deviation within the group, their weighted sum by that of the rollout (GDPO)."""
    beta: float = Field(0.0, ge=0.0)
    """Weight of the KL term in the loss. At 0 the loss needs no reference policy."""
    kl_every_steps: LossDetails[int] = Field(10, ge=0, le=10_000_000)
    """Updates between two measurements of the KL when beta is 0, each a forward pass without gradients. 0: never. With beta above
    0 every update measures it; full fine-tuning with beta 0 never does, having no reference."""
    reference: LossDetails[Literal["base", "stage_start"]] = "base"
    """Reference policy of the KL: the base model, or the policy that this stage starts from."""
    epsilon: LossDetails[float] = Field(0.2, gt=0.0)
    """Clip range of the probability ratio below 1."""
    epsilon_high: LossDetails[float | None] = Field(None, gt=0.0)
    """Clip range of the ratio above 1. Empty: epsilon. cispo requires it, as the cap of the ratio itself, often 5."""
    delta: LossDetails[float | None] = Field(None, gt=0.0)
    """Upper bound of the ratio for negative advantages (two-sided clip). It must be above 1 + epsilon. Empty: none."""
    sapo_temperature_pos: LossDetails[float] = Field(1.0, gt=0.0)
    """sapo: temperature of the damping for positive advantages (arXiv:2511.20347). Higher damps more sharply."""
    sapo_temperature_neg: LossDetails[float] = Field(1.05, gt=0.0)
    """sapo: temperature for negative advantages. Slightly above the positive one keeps training stable."""
    use_bias_correction_kl: LossDetails[bool] = False
    """Multiply the KL estimate by the ratio, so that it stays unbiased after the policy has changed since the rollout."""
    importance_sampling_level: LossDetails[Literal["token", "sequence"]] = "token"
    """One ratio per token, or one per sequence (GSPO, arXiv:2507.18071)."""
    mask_truncated_completions: LossDetails[bool] = False
    """Exclude completions that were cut off at the length limit from the loss."""
    skip_dead_groups: LossDetails[bool] = True
    """Skip groups whose completions all earn the same. Off: compute them, for their KL term."""
    top_entropy_quantile: LossDetails[Fraction] = 1.0
    """Share of an update's tokens whose policy term counts: those of the highest entropy (arXiv:2506.01939; a common choice is
    0.2). Below 1 each update needs one more forward pass for the entropies."""
    entropy_coef: LossDetails[float] = Field(0.0, ge=0.0)
    """Weight of the entropy bonus, the mean entropy per token. Above 0, dead groups are computed too."""
    importance_sampling_correction: Mismatch[
        Literal[
            "auto",
            "none",
            "token_truncate",
            "token_mask",
            "sequence_truncate",
            "sequence_mask",
            "geometric_truncate",
            "geometric_mask",
        ]
    ] = "auto"
    """Correction for a sampler whose probabilities differ from the trainer's, as those of a rollout server do. The policy term is
    multiplied by the ratio of the two: of each token, of the sequence (the product over its tokens), or of its geometric mean,
    which does not depend on the length. Ratios outside the bounds are truncated, or masked to 0. auto: token_truncate with
    rollout.engine vllm, none with the local engine. Like TRL we correct by default; unlike it per token, as verl recommends: the
    product over a long completion is far from 1 even where every token nearly agrees."""
    importance_sampling_clip_max: Mismatch[float | None] = Field(3.0, gt=0.0)
    """Upper bound of that ratio. Empty: none."""
    importance_sampling_clip_min: Mismatch[float | None] = Field(None, gt=0.0)
    """Lower bound of that ratio. Empty: none."""
    off_policy_mask_threshold: Mismatch[float | None] = Field(None, gt=0.0)
    """Leave out the policy term of completions with a negative advantage that have become improbable since they were sampled:
    those whose mean log-probability has fallen by more than this many nats per token (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).
    For rollout.max_staleness above 0 and for several updates a rollout; a common choice is 0.5. Empty: none."""
    max_sampling_logp_difference: Mismatch[float | None] = Field(0.5, gt=0.0)
    """Largest mean difference in nats between the log-probabilities of sampler and trainer. Above it the stage stops, because the
    completions come from another model. Empty: no limit."""
    engine: EngineChoice[Literal["native", "trl"]] = "native"
    """Training engine: our own, or TRL's GRPOTrainer (extra [trl]) on the same data, rewards and adapter."""
    trl: EngineChoice[FreeSettings] = Field(default_factory=dict, title="TRL options")
    """Further options of TRL's GRPOConfig, for engine trl only. They override the settings here."""
    eval_steps: LogsAndCheckpoints[int | None] = Field(None, ge=1, le=MOST_UPDATES)
    """Updates between two held-out evaluations: one completion per held-out prompt, scored by the stage's rewards
    (eval_reward). The last update has one too. Empty: none."""
    num_eval_prompts: LogsAndCheckpoints[int] = Field(64, ge=1, le=MOST_ROWS)
    """Held-out prompts of these evaluations, from the other end of the held-out rows than those of section evaluation."""
    load_best_model_at_end: LogsAndCheckpoints[bool] = True
    """With eval_steps: the result is the policy with the highest eval_reward, except after an early_stop target."""
    early_stopping_patience: LogsAndCheckpoints[int | None] = Field(None, ge=1, le=MOST_UPDATES)
    """End the stage after this many held-out evaluations without a higher eval_reward. Empty: never."""
    logging_steps: LogsAndCheckpoints[int] = Field(10, ge=1, le=MOST_UPDATES)
    """Updates between two lines of the progress log. The journal and MLflow record every update."""
    save_steps: LogsAndCheckpoints[int] = Field(50, ge=1, le=MOST_UPDATES)
    """Updates between two checkpoints. The last update always has one."""
    save_total_limit: LogsAndCheckpoints[int] = Field(2, ge=1, le=MOST_COMPLETIONS)
    """Number of checkpoints to keep."""
    log_completions_steps: LogsAndCheckpoints[int] = Field(20, ge=1, le=MOST_UPDATES)
    """Updates between two recorded tables of completions."""
    early_stop: LogsAndCheckpoints[EarlyStopConfig | None] = None
    """Target at which the stage ends early. Empty: train all updates."""
    guards: LogsAndCheckpoints[GuardsConfig] = Field(default_factory=GuardsConfig)
    """What happens when the metrics go wrong."""

    @model_validator(mode="before")
    @classmethod
    def _supervised_rate(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("kind", "grpo") != "grpo" and LEARNING_RATE not in given:
            # Cross entropy has no advantages that make a step smaller or larger: GRPO's rate would move nothing.
            return {**given, LEARNING_RATE: SUPERVISED_LEARNING_RATE}
        return given

    def _faults(self) -> Iterator[str]:
        yield from self._faults_of_kind()
        yield from self._faults_of_batches()
        yield from self._faults_of_loss()
        if self.early_stopping_patience is not None and self.eval_steps is None:
            yield "early_stopping_patience counts held-out evaluations, and there are none; fix: eval_steps: 20"
        if self.early_stop is not None:
            yield from self._faults_of_metric(self.early_stop.metric)
        if self.trl and self.engine != "trl":
            yield "options under trl need engine trl; fix: engine: trl, or leave them out"
        if self.engine == "trl" and self.eval_steps is not None:
            yield "engine trl does not evaluate held-out prompts; fix: leave eval_steps out, or engine: native"
        if self.engine == "trl" and self.guards.rolls_back:
            yield "engine trl cannot roll back; fix: warn or stop under guards, or engine: native"
        if twice := sorted({name for name in self.rewards if self.rewards.count(name) > 1}):
            yield f"reward {twice[0]} is listed twice; fix: list it once and raise its weight"

    def _faults_of_kind(self) -> Iterator[str]:
        for name in FOREIGN[self.kind]:
            # Not what was set: a stage that was written to a file names all of its fields.
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                yield f"{name} has no meaning in a stage of kind {self.kind}; fix: remove it, or kind: {kind_with(name)}"
        if self.kind == "sft" and self.demonstrations is None:
            yield "kind sft needs demonstrations; fix: demonstrations: {column: solution}"
        if self.kind != "sft" and not self.rewards:
            yield "rewards are missing; fix: rewards: [format, correctness]"
        if self.kind == "sft" and self.eval_steps is not None and not self.rewards:
            yield "eval_steps evaluates held-out prompts by rewards; fix: rewards: [format, correctness]"
        if self.kind == "sft" and self.max_tokens_per_microbatch == "auto":
            yield "kind sft measures no memory; fix: max_tokens_per_microbatch: 8192, or leave it out"
        if self.keep_completions is None and self.keep_reward is None:
            yield "keep_completions and keep_reward are both empty, which keeps all; fix: keep_reward: 0.8"

    def _faults_of_batches(self) -> Iterator[str]:
        completions = self.completions_per_update
        if completions % self.group_size:
            size, groups = self.num_generations, max(1, round(completions / self.num_generations))
            per_pass, rest = divmod(groups * size, self.gradient_accumulation_steps)
            fix = f"{size} with gradient_accumulation_steps: {groups}" if rest else f"{per_pass}"
            yield (
                f"per_device_train_batch_size {self.per_device_train_batch_size} x gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} = {completions} completions per update, which is not a multiple of "
                f"num_generations {size}; fix: per_device_train_batch_size: {fix}"
            )
        if completions > MOST_COMPLETIONS:
            yield f"{completions:,} completions per update; fix: smaller batches, at most {MOST_COMPLETIONS:,}"
        if self.steps_per_generation and self.steps_per_generation % self.gradient_accumulation_steps:
            yield (
                f"steps_per_generation {self.steps_per_generation} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; fix: leave it out or make it a multiple"
            )
        if self.keep_pass_rate is not None and self.keep_pass_rate[0] > self.keep_pass_rate[1]:
            low, high = self.keep_pass_rate
            yield f"keep_pass_rate [{low:g}, {high:g}] is empty; fix: keep_pass_rate: [{high:g}, {low:g}]"

    def _faults_of_loss(self) -> Iterator[str]:
        if self.delta is not None and self.delta <= 1 + self.epsilon:
            yield f"delta {self.delta} must be above 1 + epsilon = {1 + self.epsilon}; fix: delta: 4 is a common choice"
        if self.loss_type == "cispo" and self.epsilon_high is None:
            yield "cispo caps the ratio at epsilon_high, which is missing; fix: epsilon_high: 5"
        if self.loss_type == "cispo" and self.importance_sampling_level == "sequence":
            yield "cispo weights tokens, not sequences; fix: importance_sampling_level: token"

    def _faults_of_metric(self, metric: str) -> Iterator[str]:
        known = [member(family.name, reward) for family in TRAINING for reward in (self.rewards if "*" in family.name else [""])]
        if metric not in known:
            near = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)[0]
            yield f"early_stop.metric: {metric[:80]} is not a metric of this stage; did you mean {near}?"
        if metric.startswith("eval_") and self.eval_steps is None:
            yield f"early_stop.metric: {metric} needs held-out evaluations; fix: eval_steps: 20"

    @property
    def completions_per_update(self) -> int:
        """Completions that one optimizer step learns from, however many processes share the work."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss has a KL term towards the reference policy."""
        return self.beta > 0

    @property
    def skips_dead(self) -> bool:
        """Whether dead groups are left out of an update, and of the KL that it measures."""
        return self.skip_dead_groups and self.entropy_coef == 0

    @property
    def group_size(self) -> int:
        """Completions of a prompt: those of its group, or its one demonstration."""
        return 1 if self.kind == "sft" else self.num_generations

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps taken on one round of sampled completions."""
        rounds = (self.steps_per_generation or self.gradient_accumulation_steps) // self.gradient_accumulation_steps
        return rounds * self.num_iterations

    def num_updates(self, num_prompts: int) -> int:
        """Updates of the stage on so many prompts: max_steps, or as many complete rollouts as cover num_train_epochs."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.num_train_epochs * num_prompts / self.prompts_per_rollout) * self.updates_per_rollout

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of a rollout: those of all the updates that train on it."""
        return self.updates_per_rollout // self.num_iterations * self.completions_per_update // self.group_size


class DifficultyConfig(Section):
    """How hard the training prompts are for the model, known before training."""

    samples: int = Field(0, ge=0, le=MOST_COMPLETIONS)
    """Completions of every training prompt that measure its pass rate before the first stage. 0: none. 8 is a common choice."""
    screen: int = Field(0, ge=0, le=MOST_COMPLETIONS)
    """Completions of every prompt that are sampled first. A prompt that none of them solves gets no more, and its pass rate is 0.
    This saves most of the measurement where many prompts are out of reach. A prompt that is solved once in ten tries fails a
    screening of 2 four times in five. 0: all prompts get all samples."""
    success: Fraction = 0.8
    """Share of the full reward, the weighted sum of the full scores of the functions that apply, from which a completion counts
    as solved. The default needs the right answer in the right format."""
    pass_rate_column: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """Column with pass rates between 0 and 1, used instead of measured ones. A row without a value is kept."""
    min_prompts: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Fewest prompts that keep_pass_rate must leave. With fewer the run stops. Empty: the prompts of one rollout."""

    def faults_of(self, stages: Sequence[StageConfig]) -> Iterator[str]:
        """Where a stage needs pass rates that nothing measures."""
        measured, given = self.samples > 0, self.pass_rate_column is not None
        if self.screen and self.screen >= self.samples:
            yield (
                f"difficulty.screen is {self.screen}, and difficulty.samples is {self.samples}: a "
                "screening has fewer completions than the measurement; fix: difficulty.samples: 8, difficulty.screen: 2"
            )
        for index, stage in enumerate(stages):
            if stage.measure_difficulty and not measured:
                yield f"stages.{index}.measure_difficulty samples no completions; fix: difficulty.samples: 8"
            if stage.min_pass_at_group is not None and not (stage.measure_difficulty or (index == 0 and measured and not given)):
                yield (
                    f"stages.{index}.min_pass_at_group needs pass rates of the policy that the stage starts from; fix: "
                    f"difficulty.samples: {stage.num_generations}, and stages.{index}.measure_difficulty: true"
                )
            if stage.keep_pass_rate is not None and not measured and not given:
                yield (
                    f"stages.{index}.keep_pass_rate needs pass rates; fix: difficulty.samples: 8, or name the column of the data "
                    "that holds them with difficulty.pass_rate_column"
                )
