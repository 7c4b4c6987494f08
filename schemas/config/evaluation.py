"""Sections `evaluation` and `promotion`: held-out samples, and when the alias `champion` moves."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from schemas.config.section import Section
from schemas.config.types import MOST_COMPLETIONS, MOST_ROWS, Fraction, Name
from schemas.metrics import ACCURACY, LENIENT_ACCURACY, PASS_AT_K, PROMOTING, REWARD_MEAN


class EvaluationConfig(Section):
    """Held-out evaluation, on the same prompts for the base, every stage and the merged model."""

    GROUPS: ClassVar = {
        "details": (
            "temperature",
            "greedy",
            "stages",
            "confidence",
            "rewards",
            "evaluators",
        ),
    }

    engine: Literal["local", "vllm"] | None = None
    """Sampling engine. Empty: the one of training (rollout.engine)."""
    max_prompts: int | None = Field(256, ge=1, le=MOST_ROWS)
    """Held-out prompts to use, chosen by the hash of the row. Empty: all."""
    num_samples: int = Field(4, ge=1, le=MOST_COMPLETIONS)
    """Sampled completions per prompt (k of pass@k)."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature of the evaluation."""
    greedy: bool = True
    """Also sample one greedy completion per prompt."""
    stages: bool = True
    """Also evaluate after each stage, not only the base and the merged model."""
    confidence: float = Field(0.95, gt=0.0, lt=1.0)
    """Confidence level of the intervals (bootstrap over prompts)."""
    rewards: list[Name] | None = None
    """Reward functions whose weighted sum and single means are measured on the held-out completions. Empty: those of the last
    stage. []: none. Adaptive weights count as configured."""
    evaluators: dict[Name, str] = Field(default_factory=dict)
    """Further functions with the signature of a reward, by name: package.module:function or a built-in one. Their means are
    reported and can decide about promotion. They do not count in the reward."""


class PromotionConfig(Section):
    """When the new model becomes the champion."""

    metric: str | None = None
    """Evaluation metric that decides, in a paired test over the same prompts: accuracy, format_rate, lenient_accuracy, pass_at_k,
    reward, or rewards/NAME/mean of one reward function or evaluator. Empty: accuracy, or reward when no held-out row has a ground
    truth."""
    alpha: float = Field(0.05, gt=0.0, lt=1.0)
    """Significance level of the one-sided paired tests against the base and the current champion. The model has to beat both,
    so the probability of promoting a model that is not better is at most alpha."""
    max_format_drop: Fraction = 0.02
    """Largest drop in format rate against the champion, or against the base when there is no champion."""
    max_truncation_growth: Fraction = 0.02
    """Largest rise in the share of truncated completions against the champion, or against the base when there is no champion."""
    max_length_growth: float = Field(0.5, ge=0.0)
    """Largest growth of the mean completion length against the champion, as a share of the champion's. The base is not compared,
    because learning to reason makes completions longer."""
    approval: Literal["none", "manual"] = "none"
    """manual: a version that passes the tests becomes the champion only when a person agrees. A run of a deployment suspends and
    asks in the Prefect UI; any other run ends, and `grpo promote` decides."""
    approval_hours: float = Field(72.0, gt=0.0, le=10_000.0)
    """Hours that a suspended run waits for the decision. After that it fails; `grpo promote` can still decide."""

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str | None) -> str | None:
        if metric is not None and metric not in PROMOTING and not cls.decides_by(metric):
            raise ValueError(f"{metric} cannot decide; fix: one of {', '.join(PROMOTING)} (* stands for the function)")
        return metric

    @property
    def needs_truth(self) -> bool:
        """Whether the metric compares answers with ground truths."""
        return self.metric in (ACCURACY, LENIENT_ACCURACY, PASS_AT_K)

    @staticmethod
    def decides_by(metric: str) -> str:
        """The function whose mean a metric is; empty for any other metric."""
        before, _, after = REWARD_MEAN.partition("*")
        fits = metric.startswith(before) and metric.endswith(after) and len(metric) > len(before + after)
        return metric[len(before) : -len(after)] if fits else ""
