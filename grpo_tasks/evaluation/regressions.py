"""Checks that a better model did not get worse in format, truncation or length, and that a base model ends what it writes.

The former are fixed limits and not tests of significance. They can only prevent a promotion, so the significance level of the
promotion's test still holds.
"""

from schemas.config.evaluation import EvaluationConfig, PromotionConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ModelError
from schemas.metrics import COMPLETION_LENGTH, FORMAT_RATE, TRUNCATED_RATE
from schemas.results.evaluation import EvalReport, Regression


def find_regressions(ours: EvalReport, theirs: EvalReport, promotion: PromotionConfig) -> list[Regression]:
    """All checks with their values, passed or not; `theirs` is the champion, or the base model if there is no champion."""
    checks = [_check(TRUNCATED_RATE, ours, theirs, limit=_value(theirs, TRUNCATED_RATE) + promotion.max_truncation_growth)]
    # Free text has no format.
    if FORMAT_RATE in ours.metrics and FORMAT_RATE in theirs.metrics:
        checks.insert(0, _check(FORMAT_RATE, ours, theirs, limit=_value(theirs, FORMAT_RATE) - promotion.max_format_drop))
    if theirs.label == "champion":
        longest = _value(theirs, COMPLETION_LENGTH) * (1 + promotion.max_length_growth)
        checks.append(_check(COMPLETION_LENGTH, ours, theirs, limit=longest))
    return checks


def require_endings(base: EvalReport, evaluation: EvaluationConfig, rollout: RolloutConfig) -> None:
    """Stop before any training when nothing ends the completions of the base model.

    Raises:
        ModelError: a limit cut off a larger share of them than `evaluation.max_truncated`.
    """
    share = _value(base, TRUNCATED_RATE)
    if share <= evaluation.max_truncated:
        return
    limit = rollout.max_completion_length
    raise ModelError(
        f"a limit cut off {share:.1%} of the base model's completions, evaluation.max_truncated allows "
        f"{evaluation.max_truncated:.1%}: no end token and no stop string ended them",
        place=str(base.directory / "report.md"),
        fix=f"look at them in the report, then raise rollout.max_completion_length ({limit}), or name what ends a completion in "
        "rollout.stop_token_ids or rollout.stop; evaluation.max_truncated: 1 is for texts without an end of their own",
    )


def _check(metric: str, ours: EvalReport, theirs: EvalReport, *, limit: float) -> Regression:
    value = _value(ours, metric)
    passed = value >= limit if metric == FORMAT_RATE else value <= limit
    return Regression(metric=metric, against=theirs.label, ours=value, theirs=_value(theirs, metric), limit=limit, passed=passed)


def _value(report: EvalReport, metric: str) -> float:
    return report.metrics[metric].value
