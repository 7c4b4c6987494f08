"""Sections `evaluation` and `promotion`: held-out samples, and when the alias `champion` moves."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from schemas.config.data import DataSource
from schemas.config.section import Details, Section
from schemas.config.types import LONGEST_S, MOST_COMPLETIONS, MOST_ROWS, Fraction, Name
from schemas.metrics import (
    ACCURACY,
    COMPLETION_LENGTH,
    FORMAT_RATE,
    LENIENT_ACCURACY,
    PASS_AT_K,
    PROMOTING,
    REWARD_MEAN,
    TRUNCATED_RATE,
)

GUARD = "guard-"
"""Beginning of the label of an evaluation on the prompts of a guard."""
CONTAINS, LACKS, SCRIPT_SHARE, EVALUATOR = "contains", "lacks", "script_share", "evaluator"
GUARDING = (ACCURACY, LENIENT_ACCURACY, FORMAT_RATE, TRUNCATED_RATE, COMPLETION_LENGTH, CONTAINS, LACKS, SCRIPT_SHARE, EVALUATOR)
"""What a guard of a promotion can measure: metrics of every evaluation, then those of guards alone."""


class EvaluationConfig(Section):
    """Held-out evaluation, on the same prompts for the base, every stage and the merged model."""

    engine: Literal["local", "vllm"] | None = None
    """Sampling engine. Empty: the one of training (rollout.engine)."""
    max_prompts: int | None = Field(256, ge=1, le=MOST_ROWS)
    """Held-out prompts to use, chosen by the hash of the row. Empty: all."""
    num_samples: int = Field(4, ge=1, le=MOST_COMPLETIONS)
    """Sampled completions per prompt (k of pass@k)."""
    temperature: Details[float] = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature of the evaluation."""
    greedy: Details[bool] = True
    """Also sample one greedy completion per prompt."""
    stages: Details[bool] = True
    """Also evaluate after each stage. A version whose merged model is worse than its last stage is not promoted."""
    confidence: Details[float] = Field(0.95, gt=0.0, lt=1.0)
    """Confidence level of the intervals (bootstrap over prompts)."""
    max_half_width: Details[float | None] = Field(None, gt=0.0, lt=0.5)
    """Stop sampling when accuracy, lenient accuracy, format rate and truncated rate are known this well: half the width of the
    widest of their intervals (0.05: 5 points). It is looked at after an eighth, a quarter and a half of the prompts, and of no
    fewer than 32. The tests of a promotion divide alpha by the number of places where sampling can stop. Empty: all prompts are
    used, as they always are without ground truths and for the guards of a promotion."""
    max_minutes: Details[float | None] = Field(None, gt=0.0, le=LONGEST_S / 60)
    """Longest time in minutes to sample for one evaluation. What fits is estimated from the first prompts, an eighth of them and
    at least 32, which are always used. How many are used then depends on the machine; the result says it. Empty: no limit, as
    always for the guards of a promotion."""
    max_truncated: Details[Fraction] = 0.95
    """Largest share of the base model's completions that a limit may cut off. Above it the run stops before any training, because
    nothing seems to end a completion. 1: it never stops, for texts without an end of their own. Neither does it where the first
    stage trains on demonstrations, which can teach the end, nor for conversations with tools or an environment."""
    rewards: Details[list[Name] | None] = None
    """Reward functions whose weighted sum and single means are measured on the held-out completions. Empty: those of the last
    stage. []: none. Adaptive weights count as configured."""
    evaluators: Details[dict[Name, str]] = Field(default_factory=dict)
    """Further functions with the signature of a reward, by name: package.module:function or a built-in one. Their means are
    reported and can decide about promotion. They do not count in the reward."""


class PromotionGuard(Section):
    """Held-out prompts on which a new model must not get worse than the champion, or than the base when there is no champion."""

    name: Name
    """Name of the guard in reports and metrics."""
    data: list[DataSource] = Field(min_length=1)
    """Where its prompts come from. They are read and checked as data.eval is."""
    metric: str
    """What it measures: accuracy, lenient_accuracy, format_rate, truncated_rate, mean_length, contains and lacks (share of
    completions with, or without, one of `phrases` or a match of `pattern`), script_share (share of the letters that belong to
    `script`), or evaluator (mean score of `evaluator`)."""
    max_drop: float | None = Field(None, ge=0.0)
    """Largest drop of the mean. For mean_length it is a share of the mean of the champion or the base. Empty: no limit."""
    max_rise: float | None = Field(None, ge=0.0)
    """Largest rise of the mean, in the same unit. Empty: no limit."""
    certain: bool = True
    """Refuse only a change beyond the limit that the paired test also finds, at the level promotion.alpha. false: the mean alone
    decides, which is the stricter choice for a small set."""
    phrases: list[str] = Field(default_factory=list, max_length=1_000)
    """Phrases of contains and lacks. Upper and lower case do not matter."""
    pattern: str | None = None
    """Regular expression of contains and lacks, in the syntax of Rust: no look-around, no back-references."""
    script: Literal[
        "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Devanagari", "Han", "Hiragana", "Katakana", "Hangul", "Thai"
    ] = "Latin"
    """Script of script_share."""
    evaluator: str | None = Field(None, max_length=400, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$")
    """Function of evaluator, as package.module:function. It has the signature of a reward and runs in the reward process."""

    def _faults(self) -> Iterator[str]:
        if self.metric not in GUARDING:
            yield f"a guard cannot measure {self.metric}; fix: metric: one of {', '.join(GUARDING)}"
        if self.max_drop is None and self.max_rise is None:
            yield f"the guard {self.name} has no limit; fix: max_drop: 0.02, or max_rise"
        searches = self.metric in (CONTAINS, LACKS)
        if searches != bool(self.phrases or self.pattern) or not all(phrase.strip() for phrase in self.phrases):
            what = "needs phrases or a pattern" if searches else "takes neither phrases nor a pattern"
            yield f"the guard {self.name} measures {self.metric}, which {what}; fix: metric: {LACKS}, phrases: [...]"
        if (self.metric == EVALUATOR) != (self.evaluator is not None):
            yield (
                f"the guard {self.name}: {EVALUATOR} and its function belong together; fix: metric: {EVALUATOR}, "
                f"{EVALUATOR}: package.module:function"
            )
        if "script" in self.model_fields_set and self.metric != SCRIPT_SHARE:
            yield f"the guard {self.name} measures {self.metric}, not a script; fix: metric: {SCRIPT_SHARE}"

    @property
    def needs_truth(self) -> bool:
        """Whether its rows need a ground truth."""
        return self.metric in (ACCURACY, LENIENT_ACCURACY)


class PromotionConfig(Section):
    """When the new model becomes the champion."""

    metric: str | None = None
    """Evaluation metric that decides, in a paired test over the same prompts: accuracy, format_rate, lenient_accuracy, pass_at_k,
    reward, or rewards/NAME/mean. Empty: accuracy, or reward when no held-out row has a ground truth."""
    alpha: float = Field(0.05, gt=0.0, lt=1.0)
    """Significance level of the one-sided paired tests against the base and the current champion. The model has to beat both,
    so the probability of promoting a model that is not better is at most alpha."""
    against_champion: bool = True
    """false: the new model has to beat the base alone. For a champion that cannot be compared with any more, such as one whose
    files are lost; `grpo run --no-champion` sets it for one run."""
    max_format_drop: Fraction = 0.02
    """Largest drop in format rate against the champion, or against the base when there is no champion."""
    max_truncation_growth: Fraction = 0.02
    """Largest rise in the share of truncated completions against the champion, or against the base when there is no champion."""
    max_length_growth: float = Field(0.5, ge=0.0)
    """Largest growth of the mean completion length against the champion, as a share of the champion's. The base is not compared,
    because learning to reason makes completions longer."""
    guards: list[PromotionGuard] = Field(default_factory=list, max_length=50)
    """Further held-out sets or evaluators that must not get worse, each with its limit."""
    approval: Literal["none", "manual"] = "none"
    """manual: a version that passes the tests becomes the champion only when a person agrees. A run of a deployment suspends and
    asks in the Prefect UI; any other run ends, and `grpo promote` decides."""
    approval_hours: float = Field(72.0, gt=0.0, le=10_000.0)
    """Hours that a suspended run waits for the decision. After that it fails; `grpo promote` can still decide."""

    @field_validator("guards")
    @classmethod
    def _check_guards(cls, guards: list[PromotionGuard]) -> list[PromotionGuard]:
        names = [guard.name for guard in guards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two guards have the name {name}; fix: give each guard a unique name")
        return guards

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
