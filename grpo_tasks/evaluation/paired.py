"""Is a model better than another on the same prompts? One-sided, exact where that is cheap.

    scored samples of both -> one figure a prompt -> difference prompt by prompt -> sign flips -> PairedTest

The sign-flip permutation test: were neither better, each prompt's difference could as well be the other way round. All 2^n
flips are counted, not sampled: figures are multiples of 1/num_samples, so their sum is a convolution of binomials. With one
sample a prompt this is the exact McNemar test. Only where the count would take long (tens of thousands of prompts) 9,999 random
flips stand in. Both hold their level without assuming a distribution. What it does not do: decide what a better model is worth;
that is the promotion's business.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.evaluation.passk import pass_at_k
from schemas.errors import DataError
from schemas.metrics import COLUMNS, PASS_AT_K, PromotionMetric
from schemas.results import EvalReport, PairedTest

FloatArray = NDArray[np.float64]

RESAMPLES = 9_999
_SEED = 20_211_031
_BATCH = 500
_MAX_PARTS = 256
_MAX_SUM = 50_000


def compare(ours: EvalReport, theirs: EvalReport, *, metric: PromotionMetric, alpha: float) -> PairedTest:
    """Test whether `ours` is better than `theirs` on the sampled (not greedy) completions of the same prompts.

    Raises:
        DataError: the two were evaluated on different prompts.
    """
    left, right = prompt_figures(pl.read_parquet(ours.samples), metric), prompt_figures(pl.read_parquet(theirs.samples), metric)
    if left["prompt_id"].to_list() != right["prompt_id"].to_list():
        common = len(set(left["prompt_id"]) & set(right["prompt_id"]))
        raise DataError(
            f"{ours.label} and {theirs.label} were evaluated on different prompts: {left.height} and {right.height}, "
            f"{common} in common",
            place=str(theirs.samples),
            fix="evaluate both with the same data and evaluation.max_prompts",
        )
    return paired_test(left["figure"].to_numpy(), right["figure"].to_numpy(), alpha=alpha, metric=metric, against=theirs.label)


def prompt_figures(scored: pl.DataFrame, metric: PromotionMetric) -> pl.DataFrame:
    """Columns prompt_id and figure (between 0 and 1), sorted by prompt_id, from a scored samples table."""
    sampled = scored.filter(pl.col("sample") >= 0).group_by("prompt_id")
    column = pl.col(COLUMNS[metric])
    if metric == PASS_AT_K:
        counts = sampled.agg(column.sum().alias("right"), pl.len().alias("n")).sort("prompt_id")
        figure = [pass_at_k(n, np.array([right]), n)[0] for right, n in counts.select("right", "n").iter_rows()]
        return counts.select("prompt_id", pl.Series("figure", figure, dtype=pl.Float64))
    return sampled.agg(column.mean().cast(pl.Float64).alias("figure")).sort("prompt_id")


def paired_test(ours: FloatArray, theirs: FloatArray, *, alpha: float, metric: str, against: str) -> PairedTest:
    """One-sided paired test on per-prompt figures.

    Args:
        ours: one figure a prompt.
        theirs: the other model's, same prompts, same order.
        alpha: significance level; `better` is `p_value <= alpha`.
        metric: what the figures are, for the record.
        against: who the other one is, for the record.
    """
    assert ours.shape == theirs.shape, "one figure a prompt, the same prompts"
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
    parts = _parts(difference)
    if parts is not None:
        steps = np.rint(difference * parts).astype(np.int64)
        if np.abs(steps).sum() <= _MAX_SUM:
            return _all_flips(steps)
    return _random_flips(difference)


def _parts(difference: FloatArray) -> int | None:
    """The smallest n of which every difference is a multiple of 1/n; None when there is none up to 256."""
    for parts in range(1, _MAX_PARTS + 1):
        scaled = difference * parts
        if np.allclose(scaled, np.rint(scaled), rtol=0.0, atol=1e-9):
            return parts
    return None


def _all_flips(steps: NDArray[np.int64]) -> float:
    """Share of all sign assignments whose sum reaches ours; steps are whole numbers.

    The sum is fixed by the total of the steps that come out positive, and that total is a binomial for each size of step, spread
    out by the size, all added up.
    """
    # Importing it takes most of a second, which a command that tests nothing need not wait for.
    from scipy import stats

    chance = np.ones(1)
    for size, count in zip(*np.unique(np.abs(steps[steps != 0]), return_counts=True), strict=True):
        spread = np.zeros(size * count + 1)
        spread[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        chance = np.convolve(chance, spread)
    return float(min(1.0, chance[steps[steps > 0].sum() :].sum()))


def _random_flips(difference: FloatArray) -> float:
    """The same from 9,999 random sign assignments; never zero, since ours is one of them."""
    telling = difference[difference != 0.0]
    if telling.size == 1:
        # scipy wants two; one prompt has two sign assignments, and only one of them reaches a positive difference.
        return 0.5 if telling[0] > 0 else 1.0
    from scipy import stats

    found = stats.permutation_test(
        (telling,),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        n_resamples=RESAMPLES,
        batch=_BATCH,
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    )
    return float(found.pvalue)
