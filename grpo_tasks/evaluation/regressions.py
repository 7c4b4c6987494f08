"""Checks that a better model did not get worse in format, truncation or length, that the merge lost nothing, and that a base
model ends what it writes.

The first are fixed limits and not tests of significance. All but the last can only prevent a promotion, so the significance level
of the promotion's test still holds.
"""

from grpo_tasks.evaluation.paired import compare
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


def find_merge_loss(merged: EvalReport, policy: EvalReport, metric: str) -> Regression:
    """Whether the merged model is worse than base + adapter on the same prompts with the same seeds, beyond the interval.

    The merge proof compares distributions at a few positions; this compares what is reported, on all prompts. A paired test asks
    whether base + adapter is better, at the level of one side of the evaluation's interval (0.025 at a confidence of 0.95). This
    is the largest share of correct merges that it stops. In fact it stops fewer: most completions of the two are the same.

    Args:
        merged: evaluation of the merged model.
        policy: evaluation of the last stage, by base + adapter.
        metric: the metric that decides about the promotion.
    """
    test = compare(policy, merged, metric=metric, alpha=(1.0 - merged.confidence) / 2)
    theirs = _value(policy, metric)
    return Regression(
        metric=metric,
        against=policy.label,
        ours=_value(merged, metric),
        theirs=theirs,
        limit=theirs,
        passed=not test.better,
        p_value=test.p_value,
    )


def _check(metric: str, ours: EvalReport, theirs: EvalReport, *, limit: float) -> Regression:
    value = _value(ours, metric)
    passed = value >= limit if metric == FORMAT_RATE else value <= limit
    return Regression(metric=metric, against=theirs.label, ours=value, theirs=_value(theirs, metric), limit=limit, passed=passed)


def _value(report: EvalReport, metric: str) -> float:
    return report.metrics[metric].value
