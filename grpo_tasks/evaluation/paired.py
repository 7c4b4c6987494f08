"""A one-sided test whether a model is better than another on the same prompts; exact where that is cheap.

    scored samples of both -> one value per prompt -> difference per prompt -> sign flips -> PairedTest

The paired permutation test (Fisher 1935; Dror et al. 2018, aclanthology.org/P18-1128): the p-value is the share of all 2^n sign
assignments whose sum is at least the observed one. Rates are multiples of 1 / num_samples, so it is counted exactly, as a
convolution of binomials; with one sample per prompt it is the exact McNemar test (1947, doi:10.1007/BF02295996). For most rewards
and for tens of thousands of prompts 9,999 random assignments replace the count. Both keep their level for any distribution.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.evaluation.intervals import pass_at_k
from schemas.config.evaluation import PromotionConfig
from schemas.errors import ConfigError, DataError
from schemas.metrics import ACCURACY, PASS_AT_K, REWARD, column_of
from schemas.results.evaluation import EvalReport, PairedTest

FloatArray = NDArray[np.float64]

RESAMPLES = 9_999
_SEED = 20_211_031
_BATCH = 500
_MAX_DENOMINATOR = 256
_MAX_SUM = 50_000
"""Largest sum of absolute differences, in units of 1 / denominator, that is counted exactly."""


def deciding_metric(promotion: PromotionConfig, report: EvalReport) -> str:
    """The metric that decides about promotion: the configured one, else accuracy, else the reward.

    Raises:
        ConfigError: the evaluation did not measure it, for example accuracy on rows without ground truth.
    """
    if promotion.metric is None:
        found = next((name for name in (ACCURACY, REWARD) if name in report.metrics), None)
    else:
        found = promotion.metric if promotion.metric in report.metrics else None
    if found is not None:
        return found
    what = f"{promotion.metric} cannot" if promotion.metric else "no metric can"
    why = "no held-out row has a ground truth" if ACCURACY not in report.metrics else "no held-out completion has a value of it"
    fix = f"promotion.metric: {REWARD}" if REWARD in report.metrics else "evaluation.rewards: [...] and promotion.metric: reward"
    raise ConfigError(f"{what} decide about promotion: {why}", place="promotion.metric", fix=fix)


def compare(ours: EvalReport, theirs: EvalReport, *, metric: str, alpha: float) -> PairedTest:
    """Test whether `ours` is better than `theirs` on the sampled completions of the same prompts, greedy ones excluded.

    Prompts without a value of either, such as rows without ground truth for accuracy, do not take part.

    Raises:
        DataError: the two were evaluated on different prompts, or without this metric.
    """
    tables = _level_faults([pl.read_parquet(report.samples) for report in (ours, theirs)], column_of(metric))
    left, right = (prompt_values(table, metric) for table in tables)
    if left["prompt_id"].to_list() != right["prompt_id"].to_list():
        common = len(set(left["prompt_id"]) & set(right["prompt_id"]))
        raise DataError(
            f"{ours.label} and {theirs.label} were evaluated on different prompts: {left.height} and {right.height}, "
            f"{common} in common",
            place=str(theirs.samples),
            fix="evaluate both models with the same data and the same evaluation.max_prompts",
        )
    both = left.join(right, on="prompt_id", suffix="_theirs", maintain_order="left").drop_nulls()
    if both.is_empty():
        raise DataError(
            f"no held-out prompt has a value of {metric} for both {ours.label} and {theirs.label}",
            place="promotion.metric",
            fix="another metric, or held-out rows that it applies to",
        )
    values = both["value"].to_numpy(), both["value_theirs"].to_numpy()
    return paired_test(*values, alpha=alpha, metric=metric, against=theirs.label)


def _level_faults(tables: Sequence[pl.DataFrame], column: str) -> list[pl.DataFrame]:
    """The tables with one score for all conversations that a fault ended: the lowest of both models, and none above 0.

    In each table they have the lowest score of its own model. A model that turned its worst answers into faults would otherwise
    be compared by a better one.
    """
    if not any("failed" in table.columns and table.schema.get(column) == pl.Float64 for table in tables):
        return list(tables)
    known = [table.filter(~pl.col("failed")) if "failed" in table.columns else table for table in tables]
    lowest = min([0.0, *(value for table in known if isinstance(value := table[column].min(), float))])
    charged = pl.when(pl.col("failed") & pl.col(column).is_not_null()).then(lowest).otherwise(pl.col(column)).alias(column)
    return [table.with_columns(charged) if "failed" in table.columns else table for table in tables]


def prompt_values(scored: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Columns prompt_id and value, sorted by prompt_id, from a table of scored samples; null where a prompt has no value."""
    column = pl.col(column_of(metric))
    sampled = scored.filter(pl.col("sample") >= 0).group_by("prompt_id")
    if metric == PASS_AT_K:
        # null + null is 0 in a sum, so the prompts without verdicts are marked by their count
        counts = sampled.agg(column.sum().alias("right"), column.count().alias("n")).sort("prompt_id")
        values = [
            float(pass_at_k(n, np.array([right]), n)[0]) if n else None for right, n in counts.select("right", "n").iter_rows()
        ]
        return counts.select("prompt_id", pl.Series("value", values, dtype=pl.Float64))
    return sampled.agg(column.mean().cast(pl.Float64).alias("value")).sort("prompt_id")


def paired_test(ours: FloatArray, theirs: FloatArray, *, alpha: float, metric: str, against: str) -> PairedTest:
    """One-sided paired test on one value per prompt, the same prompts in the same order; `better` is `p_value <= alpha`.

    `metric` and `against`, the label of the other model, are for the record.
    """
    assert ours.shape == theirs.shape, "one value per prompt, the same prompts"
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    p_value = _p_value(difference)
    return PairedTest(
        against=against,
        metric=metric,
        prompts=difference.size,
        difference=float(difference.mean()) if difference.size else 0.0,
        p_value=p_value,
        better=p_value <= alpha,
    )


def _p_value(difference: FloatArray) -> float:
    denominator = _common_denominator(difference)
    if denominator is not None:
        steps = np.rint(difference * denominator).astype(np.int64)
        if np.abs(steps).sum() <= _MAX_SUM:
            return _all_flips(steps)
    return _random_flips(difference)


def _common_denominator(difference: FloatArray) -> int | None:
    """The smallest n such that every difference is a multiple of 1/n; None if there is none up to 256."""
    for denominator in range(1, _MAX_DENOMINATOR + 1):
        scaled = difference * denominator
        if np.allclose(scaled, np.rint(scaled), rtol=0.0, atol=1e-9):
            return denominator
    return None


def _all_flips(steps: NDArray[np.int64]) -> float:
    """Share of all sign assignments whose sum is at least the observed one; `steps` in units of 1 / denominator.

    The total T of the steps with a positive sign determines the sum, which is 2 T minus a constant. For steps of one size, T /
    size is binomial with probability 1/2; the distribution over all sizes is the convolution of these.
    """
    # Imported here because it takes most of a second, which commands that test nothing should not spend.
    from scipy import stats

    chance = np.ones(1)
    for size, count in zip(*np.unique(np.abs(steps[steps != 0]), return_counts=True), strict=True):
        spread = np.zeros(size * count + 1)  # index: total of the positive steps of this size
        spread[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        chance = np.convolve(chance, spread)
    return float(min(1.0, chance[steps[steps > 0].sum() :].sum()))


def _random_flips(difference: FloatArray) -> float:
    """The same share, estimated from 9,999 random sign assignments; never 0, because the observed one is included."""
    nonzero = difference[difference != 0.0]
    if nonzero.size == 1:
        # scipy requires two values. One value has two sign assignments; both reach a negative sum, one reaches a positive one.
        return 0.5 if nonzero[0] > 0 else 1.0
    from scipy import stats

    found = stats.permutation_test(
        (nonzero,),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        n_resamples=RESAMPLES,
        batch=_BATCH,
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    )
    return float(found.pvalue)
