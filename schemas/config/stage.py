"""Section `stages[]`: the settings of one GRPO stage, under TRL's names where TRL has them."""

import difflib
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.config.guards import GuardsConfig
from schemas.config.section import Section
from schemas.config.types import MOST_COMPLETIONS, MOST_ROWS, MOST_TIMES, MOST_UPDATES, Fraction, FreeSettings, Name
from schemas.metrics import TRAINING


class EarlyStopConfig(Section):
    """Ends a stage when a metric has reached its target."""

    metric: Annotated[str, StringConstraints(max_length=200)] = "reward"
    """Name of a training metric, such as reward, kl or rewards/NAME/mean (see schemas/metrics.py)."""
    target: float
    """The stage ends once the mean of the metric is at least this (at most this, for metrics where lower is better)."""
    window: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates the mean is taken over."""
    min_steps: int = Field(1, ge=1, le=MOST_UPDATES)
    """Fewest updates before the stage may end."""


_METRICS = [metric.name for metric in TRAINING]


class StageConfig(Section):
    """One GRPO stage (arXiv:2402.03300)."""

    GROUPS: ClassVar = {
        "batches": (
            "num_train_epochs",
            "gradient_accumulation_steps",
            "max_tokens_per_microbatch",
            "max_refills",
            "steps_per_generation",
            "num_iterations",
        ),
        "optimizer": (
            "lr_scheduler_type",
            "warmup_ratio",
            "warmup_steps",
            "optim",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "weight_decay",
            "max_grad_norm",
        ),
        "loss_details": (
            "scale_rewards",
            "baseline",
            "multi_objective_aggregation",
            "kl_every_steps",
            "reference",
            "epsilon",
            "epsilon_high",
            "delta",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "use_bias_correction_kl",
            "importance_sampling_level",
            "mask_truncated_completions",
            "skip_dead_groups",
            "top_entropy_quantile",
            "entropy_coef",
        ),
        "sampler_mismatch": (
            "importance_sampling_correction",
            "importance_sampling_clip_max",
            "importance_sampling_clip_min",
            "max_sampling_logp_difference",
        ),
        "engine_choice": (
            "engine",
            "trl",
        ),
        "logs_and_checkpoints": (
            "eval_steps",
            "num_eval_prompts",
            "load_best_model_at_end",
            "early_stopping_patience",
            "logging_steps",
            "save_steps",
            "save_total_limit",
            "log_completions_steps",
            "early_stop",
            "guards",
        ),
    }

    name: Name
    """Name of the stage; also of its child run in MLflow."""
    rewards: list[Name] = Field(min_length=1)
    """Names of the reward functions of this stage."""
    engine: Literal["native", "trl"] = "native"
    """What trains the stage: our own engine, or TRL's GRPOTrainer (extra [trl]) on the same data, rewards and adapter."""
    trl: FreeSettings = Field(default_factory=dict, title="TRL options")
    """Further options of TRL's GRPOConfig, for engine trl only; they win over the settings here."""
    max_steps: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """Number of updates; empty: by num_train_epochs."""
    num_train_epochs: float = Field(1.0, gt=0.0, le=1_000_000.0)
    """Passes over the training prompts; max_steps, when given, wins."""
    num_generations: int = Field(8, ge=2, le=MOST_COMPLETIONS)
    """Completions per prompt (the group, G)."""
    per_device_train_batch_size: int = Field(8, ge=1, le=MOST_COMPLETIONS)
    """Completions per forward and backward pass."""
    gradient_accumulation_steps: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    """Forward and backward passes per update; batch size times this is the number of completions of an update."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Tokens of prompts and completions, padding included, that go through the model at once. Completions are then sorted by
    length and cut into passes of this size, whatever per_device_train_batch_size says; the update is the same."""
    max_refills: int = Field(0, ge=0, le=MOST_TIMES)
    """Times dead groups are replaced by groups of further prompts before an update (dynamic sampling, arXiv:2503.14476)."""
    steps_per_generation: int | None = Field(None, ge=1, le=MOST_COMPLETIONS)
    """Forward and backward passes fed by one round of sampling; a multiple of gradient_accumulation_steps. Empty: equal to it."""
    num_iterations: int = Field(1, ge=1, le=MOST_TIMES)
    """Times each round of completions is trained on; above 1 the clipped ratio comes into play."""
    learning_rate: float = Field(1e-6, gt=0.0, le=10.0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: Fraction = 0.0
    """Share of the updates over which the learning rate rises from 0; warmup_steps, when above 0, wins."""
    warmup_steps: int = Field(0, ge=0, le=MOST_UPDATES)
    """Number of updates over which the learning rate rises from 0."""
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"] = "adamw_torch"
    """Optimizer; the 8-bit ones need bitsandbytes."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    adam_epsilon: float = Field(1e-8, gt=0.0)
    """Term that keeps the optimizer from dividing by zero."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Largest gradient norm; larger ones are scaled down. 0 switches clipping off."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """Loss. The first four clip the ratio and differ in the average: grpo per sequence, then over sequences; bnpo over the tokens
    of a micro-batch; dapo over the tokens of the whole update; dr_grpo over completions times max_completion_length (no length
    bias). cispo caps the ratio as a weight and keeps every token's gradient (average of dapo); sapo damps it smoothly (average
    of grpo)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the reward minus the group's mean is divided by: the group's or the rollout's standard deviation, or nothing."""
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What a reward is compared with: the mean of its group, or the mean of the others in it (RLOO, arXiv:2402.14740)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several reward functions become one advantage: summed with their weights and then scaled as scale_rewards says, or each
    scaled by its own spread in the group, summed with the weights and scaled by the rollout's spread (GDPO)."""
    beta: float = Field(0.0, ge=0.0)
    """Weight of the KL term towards the reference in the loss; at 0 no reference is computed for the loss."""
    kl_every_steps: int = Field(10, ge=0, le=10_000_000)
    """Updates between two measurements of the KL at beta 0, for the metric kl and its guard; each costs a forward pass without
    gradients. 0: never. Above beta 0 every update measures it; full fine-tuning at beta 0 has no reference and never does."""
    reference: Literal["base", "stage_start"] = "base"
    """Reference policy of the KL: the base model, or the policy this stage starts from."""
    epsilon: float = Field(0.2, gt=0.0)
    """Clip range of the probability ratio below 1."""
    epsilon_high: float | None = Field(None, gt=0.0)
    """Clip range above 1; empty: equal to epsilon. For cispo the cap of the ratio itself, to be given; 5 is customary."""
    delta: float | None = Field(None, gt=0.0)
    """Upper bound of the ratio also for negative advantages (two-sided clip); empty: none. Must be above 1 + epsilon."""
    sapo_temperature_pos: float = Field(1.0, gt=0.0)
    """sapo: how sharply the ratio is damped for positive advantages (arXiv:2511.20347)."""
    sapo_temperature_neg: float = Field(1.05, gt=0.0)
    """sapo: the same for negative advantages; a little sharper keeps training stable."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate by the ratio, so that it stays unbiased when the policy has moved since it sampled."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or one per sequence (GSPO, arXiv:2507.18071)."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off at the length limit out of the loss."""
    skip_dead_groups: bool = True
    """Do not compute groups whose completions all earn the same. Off: they are computed, and keep their KL term."""
    top_entropy_quantile: Fraction = 1.0
    """Share of an update's tokens, those of highest entropy, whose policy term counts; 0.2 is customary (arXiv:2506.01939). Below
    1 each update computes its tokens' entropies first, one more forward pass."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the mean entropy per token that is added as a bonus; above 0 dead groups are computed too."""
    importance_sampling_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Makes up for a sampler whose probabilities differ from the trainer's: the policy term is multiplied by their ratio, per
    token or per sequence, truncated to the bounds or set to 0 outside of them. Of use with a rollout server."""
    importance_sampling_clip_max: float | None = Field(3.0, gt=0.0)
    """Upper bound of that ratio; empty: none."""
    importance_sampling_clip_min: float | None = Field(None, gt=0.0)
    """Lower bound of that ratio; empty: none."""
    max_sampling_logp_difference: float | None = Field(0.5, gt=0.0)
    """Mean difference in nats between the sampler's and the trainer's log-probabilities above which the stage stops: the
    completions then come from another model. Empty: never."""
    logging_steps: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates between two lines of the progress log. The journal and MLflow get every update all the same."""
    save_steps: int = Field(50, ge=1, le=MOST_UPDATES)
    """Updates between two checkpoints; the last update always has one."""
    save_total_limit: int = Field(2, ge=1, le=MOST_COMPLETIONS)
    """Checkpoints kept."""
    log_completions_steps: int = Field(20, ge=1, le=MOST_UPDATES)
    """Updates between two tables of sampled completions."""
    eval_steps: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """Updates between two looks at held-out prompts: one completion each, scored by the stage's rewards (eval_reward). The last
    update has one too. Empty: none."""
    num_eval_prompts: int = Field(64, ge=1, le=MOST_ROWS)
    """Held-out prompts looked at; taken from the other end of them than those of the evaluation."""
    load_best_model_at_end: bool = True
    """With eval_steps: the stage's result is the policy of the highest eval_reward, not the last one (but for a stage that ended
    at its early_stop target)."""
    early_stopping_patience: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """End the stage after so many looks without a higher eval_reward; empty: never."""
    early_stop: EarlyStopConfig | None = None
    """End the stage early when a target is reached; none trains all updates."""
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    """What is done when the figures go wrong."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        completions = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if completions % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} x gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} = {completions} completions an update, which is not a multiple of "
                f"num_generations {self.num_generations}; fix: {_nearest_batch(self)}"
            )
        if completions > MOST_COMPLETIONS:
            raise ValueError(f"{completions:,} completions an update; fix: at most {MOST_COMPLETIONS:,}, by smaller batches")
        if self.early_stop is not None:
            self._check_metric(self.early_stop.metric)
        if self.steps_per_generation and self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation {self.steps_per_generation} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; fix: leave it out or make it a multiple"
            )
        if self.delta is not None and self.delta <= 1 + self.epsilon:
            raise ValueError(f"delta {self.delta} must be above 1 + epsilon = {1 + self.epsilon}; fix: 4 is customary")
        if self.trl and self.engine != "trl":
            raise ValueError("options under trl are for engine trl; fix: engine: trl, or leave them out")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("cispo caps the ratio at epsilon_high, which is not given; fix: epsilon_high: 5")
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ValueError("early_stopping_patience counts evaluations; fix: eval_steps: 20, say")
        if self.engine == "trl" and self.eval_steps is not None:
            raise ValueError("engine trl looks at no held-out prompts; fix: leave eval_steps out, or engine: native")
        if self.engine == "trl" and self.guards.rolls_back:
            raise ValueError("engine trl cannot roll back; fix: warn or stop under guards, or engine: native")
        if self.loss_type == "cispo" and self.importance_sampling_level == "sequence":
            raise ValueError("cispo weighs tokens; fix: importance_sampling_level: token")
        twice = sorted({name for name in self.rewards if self.rewards.count(name) > 1})
        if twice:
            raise ValueError(f"reward {twice[0]} is listed twice; fix: list it once and raise its weight")
        return self

    def _check_metric(self, metric: str) -> None:
        known = [name.replace("*", reward) for name in _METRICS for reward in (self.rewards if "*" in name else [""])]
        if metric not in known:
            near = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"early_stop.metric: {metric[:80]} is no metric of this stage; did you mean {near}?")
        if metric.startswith("eval_") and self.eval_steps is None:
            raise ValueError(f"early_stop.metric: {metric} is measured on held-out prompts only; fix: eval_steps: 20, say")

    @property
    def completions_per_update(self) -> int:
        """Completions that one optimizer step learns from, however many processes share the work."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps taken on one round of sampled completions."""
        rounds = (self.steps_per_generation or self.gradient_accumulation_steps) // self.gradient_accumulation_steps
        return rounds * self.num_iterations


def _nearest_batch(stage: StageConfig) -> str:
    groups = max(1, round(stage.completions_per_update / stage.num_generations))
    wanted = groups * stage.num_generations
    if wanted % stage.gradient_accumulation_steps == 0:
        return f"per_device_train_batch_size: {wanted // stage.gradient_accumulation_steps}"
    return f"per_device_train_batch_size: {stage.num_generations} with gradient_accumulation_steps: {groups}"
