"""Sections `evaluation` and `promotion`: held-out samples, and when the alias `champion` moves."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.section import Section
from schemas.config.types import MOST_COMPLETIONS, MOST_ROWS, Fraction


class EvaluationConfig(Section):
    """Held-out samples, the same prompts for base, stages and merged model."""

    GROUPS: ClassVar = {
        "details": (
            "temperature",
            "greedy",
            "stages",
            "confidence",
        ),
    }

    engine: Literal["local", "vllm"] | None = None
    """What samples; empty: as in training (rollout.engine)."""
    max_prompts: int | None = Field(256, ge=1, le=MOST_ROWS)
    """Held-out prompts used, the first by hash of the row; empty: all."""
    num_samples: int = Field(4, ge=1, le=MOST_COMPLETIONS)
    """Sampled completions per prompt (k of pass@k)."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature of the evaluation."""
    greedy: bool = True
    """Also decode each prompt greedily, once."""
    stages: bool = True
    """Also evaluate after each stage, not only base and merged model."""
    confidence: float = Field(0.95, gt=0.0, lt=1.0)
    """Level of the confidence intervals (bootstrap over prompts)."""


class PromotionConfig(Section):
    """When the new model becomes the champion."""

    metric: Literal["accuracy", "format_rate", "lenient_accuracy", "pass_at_k"] = "accuracy"
    """Evaluation figure that decides, paired over the same prompts."""
    alpha: float = Field(0.05, gt=0.0, lt=1.0)
    """Significance level of the one-sided paired test against base and present champion. Both have to be beaten, so the
    chance of promoting a model that is no better stays within alpha."""
    max_format_drop: Fraction = 0.02
    """Largest drop of the format rate against the champion (the base, where there is none)."""
    max_truncation_growth: Fraction = 0.02
    """Largest growth of the share of truncated completions against the champion (the base, where there is none)."""
    max_length_growth: float = Field(0.5, ge=0.0)
    """Largest growth of the mean completion length against the champion, as a share of its length. Not held against the base:
    learning to reason makes completions longer."""
