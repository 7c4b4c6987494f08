"""Sections `evaluation` and `promotion`: held-out samples, and when the alias `champion` moves."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.section import Section
from schemas.config.types import MOST_COMPLETIONS, MOST_ROWS, Fraction
from schemas.metrics import ACCURACY, PromotionMetric


class EvaluationConfig(Section):
    """Held-out evaluation, on the same prompts for the base, every stage and the merged model."""

    GROUPS: ClassVar = {
        "details": (
            "temperature",
            "greedy",
            "stages",
            "confidence",
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


class PromotionConfig(Section):
    """When the new model becomes the champion."""

    metric: PromotionMetric = ACCURACY
    """Evaluation metric that decides, in a paired test over the same prompts."""
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
