"""What can stop a promotion, and never causes one, so that the significance level of the promotion's test still holds.

Guards are further held-out prompts on which a new model must not get worse. A `Regression` is a fixed limit of format, truncation
or length, or what the merge lost by a paired test.
"""

from collections.abc import Callable, Mapping

import polars as pl

from grpo_tasks.evaluation.statistics import common_means, compare, paired_test
from schemas.config.data import DataConfig
from schemas.config.evaluation import CONTAINS, EVALUATOR, LACKS, SCRIPT_SHARE, EvaluationConfig, PromotionConfig, PromotionGuard
from schemas.config.rewards import RewardConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig, Scoring
from schemas.errors import ConfigError, DataError, ModelError
from schemas.metrics import COMPLETION_LENGTH, FORMAT_RATE, REWARD_MEAN, TRUNCATED_RATE, column_of, member
from schemas.results.evaluation import EvalReport, GuardCheck, Regression, Worse

_EXAMPLES = 3
_SHOWN_CHARS = 600
_ROUNDING = 1e-9


def guard_data(config: RunConfig, guard: PromotionGuard) -> DataConfig:
    """The settings by which the prompts of a guard are read: those of the data, all rows held out, without tasks."""
    answers = config.data.answer_column if guard.needs_truth else None
    update: dict[str, object] = {"train": [], "eval": guard.data, "tasks": {}, "task_column": None, "answer_column": answers}
    return config.data.model_copy(update=update)


def guard_scoring(config: RunConfig, guard: PromotionGuard) -> Scoring | None:
    """The function of a guard that has one."""
    if guard.evaluator is None:
        return None
    functions = {guard.name: RewardConfig(function=guard.evaluator, weight=0.0)}
    return Scoring(rewards=config.rewards.model_copy(update={"functions": functions}), weighted=[], reported=[guard.name])


def check_guard_pattern(guard: PromotionGuard) -> None:
    """Raise `ConfigError` unless the pattern of the guard, if it has one, is a linear-time regular expression."""
    if guard.pattern is None:
        return
    try:
        pl.DataFrame({"text": [""]}).select(pl.col("text").str.contains(guard.pattern))
    except pl.exceptions.ComputeError as error:
        raise ConfigError(
            f"invalid pattern: {str(error).strip().splitlines()[-1]}",
            place=f"promotion.guards {guard.name}.pattern: {guard.pattern}",
            fix="Rust regex syntax: no look-around, no back-references; or list phrases",
        ) from error


def sample_values(samples: pl.DataFrame, guard: PromotionGuard) -> pl.DataFrame:
    """Columns prompt_id, completion and value (float, null where there is none), one row per sampled completion."""
    return samples.filter(pl.col("sample") >= 0).select(
        "prompt_id", "completion", _sample_value(guard).cast(pl.Float64).alias("value")
    )


def _sample_value(guard: PromotionGuard) -> pl.Expr:
    text = pl.col("completion")
    if guard.metric in (CONTAINS, LACKS):
        found = text.str.contains(guard.pattern) if guard.pattern is not None else pl.lit(value=False)
        if guard.phrases:
            # As Unicode's full lower case on both sides, so that a phrase in any script is found.
            lowered = [phrase.lower() for phrase in guard.phrases]
            found = found | text.str.to_lowercase().str.contains_any(lowered)
        return found if guard.metric == CONTAINS else ~found
    if guard.metric == SCRIPT_SHARE:
        # A text without letters counts 0: silence must not pass for the right language.
        letters = text.str.count_matches(r"\p{L}")
        share = text.str.count_matches(rf"\p{{{guard.script}}}") / letters
        return pl.when(letters > 0).then(share.clip(0.0, 1.0)).otherwise(0.0)
    return pl.col(member(REWARD_MEAN, guard.name) if guard.metric == EVALUATOR else column_of(guard.metric))


def compare_guard(
    guard: PromotionGuard, ours: EvalReport, theirs: EvalReport, *, against: str, questions: Mapping[str, str], alpha: float
) -> GuardCheck:
    """Decide whether our model got worse on the prompts of the guard than `theirs`, the champion or the base.

    `questions` by prompt_id are for the examples; `alpha` is the significance level of the test of a guard that is `certain`.
    Raises `DataError` where no prompt has a value for both models.
    """
    left, right = (sample_values(pl.read_parquet(report.samples), guard) for report in (ours, theirs))
    left_means, right_means = (values.group_by("prompt_id").agg(pl.col("value").mean()) for values in (left, right))
    both = left_means.join(right_means, on="prompt_id", suffix="_theirs").drop_nulls().sort("prompt_id")
    if both.is_empty():
        raise DataError(
            f"no prompt of the guard {guard.name} has a value of {guard.metric} for both models",
            place=f"promotion.guards {guard.name}",
            fix="another metric, or rows that it applies to",
        )
    values = both["value"].to_numpy(), both["value_theirs"].to_numpy()
    mean, before = float(values[0].mean()), float(values[1].mean())
    unit, of = (abs(before), " of the length") if guard.metric == COMPLETION_LENGTH else (1.0, "")
    sides = [("drop", -1.0, guard.max_drop, values[::-1]), ("rise", 1.0, guard.max_rise, values)]
    limits, p_values, failed = [], [], []
    for what, sign, limit, (more, less) in sides:
        if limit is None:
            continue
        limits.append(f"a {what} of {limit:g}{of}")
        # Of a change in this direction.
        p_value = paired_test(more, less, alpha=alpha, metric=guard.metric, against=against).p_value
        beyond = sign * (mean - before) > limit * unit + _ROUNDING
        p_values.append(p_value)
        if beyond and (p_value <= alpha or not guard.certain):
            failed.append(sign)
    return GuardCheck(
        name=guard.name,
        metric=guard.metric,
        against=against,
        prompts=both.height,
        ours=mean,
        theirs=before,
        change=mean - before,
        limit=" and ".join(limits),
        p_value=min(p_values),
        passed=not failed,
        worse=_worst(both, left, right, questions, failed[0]) if failed else [],
    )


def _worst(both: pl.DataFrame, left: pl.DataFrame, right: pl.DataFrame, questions: Mapping[str, str], sign: float) -> list[Worse]:
    """The prompts that changed most in the direction `sign`: their completion furthest in the other one, ours furthest in it."""
    change = pl.col("value") - pl.col("value_theirs")
    ordered = both.with_columns(change.alias("change")).filter(sign * pl.col("change") > 0)
    ordered = ordered.sort(sign * pl.col("change"), "prompt_id", descending=[True, False]).head(_EXAMPLES)
    found = []
    for prompt_id, moved in ordered.select("prompt_id", "change").iter_rows():
        before, after = (
            samples.filter(prompt_id=prompt_id).drop_nulls().sort(toward * pl.col("value"), maintain_order=True)["completion"][-1]
            for samples, toward in ((right, -sign), (left, sign))
        )
        question = questions.get(prompt_id, prompt_id)
        found.append(
            Worse(question=question[:_SHOWN_CHARS], before=before[:_SHOWN_CHARS], after=after[:_SHOWN_CHARS], change=moved)
        )
    return found


def find_regressions(ours: EvalReport, theirs: EvalReport, promotion: PromotionConfig) -> list[Regression]:
    """All checks with their values over the common prompts, passed or not; `theirs` is the champion, or the base model if there
    is no champion."""
    rise, growth = promotion.max_truncation_growth, promotion.max_length_growth
    checks = [_check(TRUNCATED_RATE, ours, theirs, limit=lambda before: before + rise)]
    # Free text has no format.
    if FORMAT_RATE in ours.metrics and FORMAT_RATE in theirs.metrics:
        checks.insert(0, _check(FORMAT_RATE, ours, theirs, limit=lambda before: before - promotion.max_format_drop))
    if theirs.label == "champion":
        checks.append(_check(COMPLETION_LENGTH, ours, theirs, limit=lambda before: before * (1 + growth)))
    return checks


def require_endings(base: EvalReport, evaluation: EvaluationConfig, rollout: RolloutConfig) -> None:
    """ModelError before any training where a limit cut off too many of the base model's completions: nothing ends them."""
    share = base.metrics[TRUNCATED_RATE].value
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

    A paired test asks whether base + adapter is better, at the level of one side of the evaluation's interval (0.025 at a
    confidence of 0.95). So it stops at most this share of correct merges, and in fact fewer.
    """
    test = compare(policy, merged, metric=metric, alpha=(1.0 - merged.confidence) / 2)
    ours, theirs = common_means(merged, policy, metric)
    return Regression(
        metric=metric,
        against=policy.label,
        ours=ours,
        theirs=theirs,
        limit=theirs,
        passed=not test.better,
        p_value=test.p_value,
    )


def _check(metric: str, ours: EvalReport, theirs: EvalReport, *, limit: Callable[[float], float]) -> Regression:
    value, before = common_means(ours, theirs, metric)
    bound = limit(before)
    passed = value >= bound if metric == FORMAT_RATE else value <= bound
    return Regression(metric=metric, against=theirs.label, ours=value, theirs=before, limit=bound, passed=passed)
