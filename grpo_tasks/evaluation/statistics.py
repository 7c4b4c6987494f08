"""Intervals of means over prompts, pass@k, and a one-sided test whether a model is better than another on the same prompts.

Samples of one prompt are not independent, so whole prompts are resampled (the cluster bootstrap; Davison and Hinkley 1997,
section 3.8). When all prompts agree the percentile interval has no width, so rates are widened to the exact interval of Clopper
and Pearson (1934, doi:10.1093/biomet/26.4.404), or to Wilson's (1927, doi:10.1080/01621459.1927.10502953) between 0 and 1.

The paired permutation test (Fisher 1935; Dror et al. 2018, aclanthology.org/P18-1128): the p-value is the share of all 2^n sign
assignments whose sum is at least the observed one. Rates are multiples of 1 / num_samples, so it is counted exactly, as a
convolution of binomials; with one sample per prompt it is the exact McNemar test (1947, doi:10.1007/BF02295996). For most rewards
and for tens of thousands of prompts 9,999 random assignments replace the count. Both keep their level for any distribution.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from schemas.config.evaluation import PromotionConfig
from schemas.errors import ConfigError, DataError
from schemas.metrics import ACCURACY, PASS_AT_K, REWARD, column_of
from schemas.results.evaluation import EvalReport, Interval, PairedTest

FloatArray = NDArray[np.float64]

_BOOTSTRAPS, _FLIPS = 5_000, 9_999
_SEED = 20_211_031
_BATCH = 500
_MAX_DENOMINATOR = 256
_MAX_SUM = 50_000
"""Largest sum of absolute differences, in units of 1 / denominator, that is counted exactly."""


def mean_interval(values: FloatArray, *, confidence: float) -> Interval:
    """Mean over prompts (one value each) of any quantity, with its percentile bootstrap interval (Efron 1979)."""
    assert values.ndim == 1, "one value per prompt"
    assert values.size, "an interval needs at least one prompt"
    mean = float(values.mean())
    if np.ptp(values) == 0.0:
        return Interval(value=mean, low=mean, high=mean)
    # Imported here, as below, because it takes most of a second, which commands that compute nothing should not spend.
    from scipy import stats

    # The seed is fixed: the same table always gives the same interval.
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=_BOOTSTRAPS,
        batch=_BATCH,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    # With very skewed data, rounding can put a percentile on the wrong side of the mean.
    return Interval(value=mean, low=min(float(found.low), mean), high=max(float(found.high), mean))


def rate_interval(values: FloatArray, *, confidence: float) -> Interval:
    """Mean over prompts (one value each) of a share between 0 and 1, with an interval that always has a width."""
    assert values.size == 0 or (values.min() >= 0.0 and values.max() <= 1.0), "shares lie between 0 and 1"
    plain = mean_interval(values, confidence=confidence)
    if np.ptp(values) == 0.0 and 0.0 < plain.value < 1.0:
        low, high = wilson_interval(plain.value, values.size, confidence)
        return Interval(value=plain.value, low=low, high=high)
    # Clopper-Pearson for n prompts that all fail: [0, 1 - (alpha / 2)^(1/n)], and mirrored for n that all succeed. The interval
    # always reaches at least from the latter's lower bound to the former's upper bound, whatever the resamples say.
    bound = float(((1.0 - confidence) / 2.0) ** (1.0 / values.size))
    return Interval(value=plain.value, low=min(plain.low, bound), high=max(plain.high, 1.0 - bound))


def wilson_interval(rate: float, num_trials: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a rate in independent trials: at 0 of 8 it is 0 to 0.32, at 8 of 8 it is 0.68 to 1."""
    from scipy import stats

    z2 = float(stats.norm.ppf(0.5 + confidence / 2.0)) ** 2
    centre = (rate + z2 / (2 * num_trials)) / (1 + z2 / num_trials)
    half = np.sqrt(z2 * rate * (1 - rate) / num_trials + z2**2 / (4 * num_trials**2)) / (1 + z2 / num_trials)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def pass_at_k(num_samples: int, num_right: NDArray[np.int64], k: int) -> FloatArray:
    """pass@k of each prompt from n samples, c of them right, with 1 <= k <= n; in the shape of `num_right`.

    Unbiased (Chen et al. 2021, arXiv:2107.03374, eq. 1): drawing k of the n samples without replacement misses all c right ones
    with probability C(n - c, k) / C(n, k).
    """
    assert 1 <= k <= num_samples, f"pass@{k} cannot be estimated from {num_samples} samples"
    wrong = num_samples - np.asarray(num_right, dtype=np.int64)
    # C(wrong, k) / C(n, k) = product over j < k of (wrong - j) / (n - j): factors in [0, 1], no factorials to overflow.
    drawn = np.arange(k)
    factors = np.clip(wrong[..., None] - drawn, 0, None) / (num_samples - drawn)
    return 1.0 - factors.prod(axis=-1)


def ladder(num_samples: int) -> list[int]:
    """The reported values of k: powers of two up to num_samples, and num_samples itself."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return powers if powers[-1] == num_samples else [*powers, num_samples]


def deciding_metric(promotion: PromotionConfig, report: EvalReport) -> str:
    """The configured metric, else accuracy, else the reward; ConfigError where the evaluation did not measure it."""
    wanted = (ACCURACY, REWARD) if promotion.metric is None else (promotion.metric,)
    found = next((name for name in wanted if name in report.metrics), None)
    if found is not None:
        return found
    what = f"{promotion.metric} cannot" if promotion.metric else "no metric can"
    why = "no held-out row has a ground truth" if ACCURACY not in report.metrics else "no held-out completion has a value of it"
    fix = f"promotion.metric: {REWARD}" if REWARD in report.metrics else "evaluation.rewards: [...] and promotion.metric: reward"
    raise ConfigError(f"{what} decide about promotion: {why}", place="promotion.metric", fix=fix)


def compare(ours: EvalReport, theirs: EvalReport, *, metric: str, alpha: float) -> PairedTest:
    """Test whether `ours` is better than `theirs` on the sampled completions of the same prompts, greedy ones excluded.

    Prompts without a value of either, such as rows without ground truth for accuracy, do not take part. A DataError where the
    prompts differ, or none has a value.
    """
    tables = _level_faults(common_samples(ours, theirs), column_of(metric))
    left, right = (prompt_values(table, metric) for table in tables)
    both = left.join(right, on="prompt_id", suffix="_theirs", maintain_order="left").drop_nulls()
    if both.is_empty():
        raise DataError(
            f"no held-out prompt has a value of {metric} for both {ours.label} and {theirs.label}",
            place="promotion.metric",
            fix="another metric, or held-out rows that it applies to",
        )
    values = both["value"].to_numpy(), both["value_theirs"].to_numpy()
    return paired_test(*values, alpha=alpha, metric=metric, against=theirs.label)


def promotion_test(ours: EvalReport, theirs: EvalReport, *, metric: str, alpha: float) -> PairedTest:
    """`compare` at the level that holds wherever sampling stopped: of the numbers of prompts at which it can, each has its share
    of alpha (Bonferroni), because where it stops depends on the values."""
    used = [report.prompts_used for report in (ours, theirs) if report.prompts_used is not None]
    looks = max((one.looks for one in used), default=1)
    return compare(ours, theirs, metric=metric, alpha=alpha / looks).model_copy(update={"looks": looks})


def common_samples(ours: EvalReport, theirs: EvalReport) -> list[pl.DataFrame]:
    """The tables of both, of the same prompts: where sampling stopped early, of those that both have. A DataError where these are
    not all prompts of one of them."""
    tables = [pl.read_parquet(report.samples) for report in (ours, theirs)]
    left, right = (set(table["prompt_id"]) for table in tables)
    both = left & right
    if left == right:
        return tables
    if both not in (left, right) or (ours.prompts_used is None and theirs.prompts_used is None):
        raise DataError(
            f"{ours.label} and {theirs.label} were evaluated on different prompts: {len(left)} and {len(right)}, "
            f"{len(both)} in common",
            place=str(theirs.samples),
            fix="evaluate both models with the same data and the same evaluation.max_prompts",
        )
    return [table.filter(pl.col("prompt_id").is_in(sorted(both))) for table in tables]


def common_means(ours: EvalReport, theirs: EvalReport, metric: str) -> tuple[float, float]:
    """The means of both over the same prompts."""
    if ours.prompts == theirs.prompts:
        return ours.metrics[metric].value, theirs.metrics[metric].value
    left, right = (prompt_values(table, metric)["value"].drop_nulls().to_numpy() for table in common_samples(ours, theirs))
    return float(left.mean()), float(right.mean())


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
    """One-sided paired test on one value per prompt, the same prompts in the same order; `better` is `p_value <= alpha`."""
    assert ours.shape == theirs.shape, "one value per prompt, the same prompts"
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    denominator = _common_denominator(difference)
    steps = np.rint(difference * (denominator or 0)).astype(np.int64)
    counted = denominator is not None and np.abs(steps).sum() <= _MAX_SUM
    p_value = _all_flips(steps) if counted else _random_flips(difference)
    return PairedTest(
        against=against,
        metric=metric,
        prompts=difference.size,
        difference=float(difference.mean()) if difference.size else 0.0,
        p_value=p_value,
        better=p_value <= alpha,
    )


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
        n_resamples=_FLIPS,
        batch=_BATCH,
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    )
    return float(found.pvalue)
