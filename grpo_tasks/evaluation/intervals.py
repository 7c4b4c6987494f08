"""Confidence intervals of the mean over prompts, by bootstrap.

    mean of each prompt -> resample prompts -> percentiles -> at least as wide as an exact binomial interval

Samples of one prompt are not independent, so whole prompts are resampled (the cluster bootstrap; Davison and Hinkley 1997,
section 3.8). When all prompts agree the percentile interval has no width, so rates are widened to the exact interval of Clopper
and Pearson (1934, doi:10.1093/biomet/26.4.404), or to Wilson's (1927, doi:10.1080/01621459.1927.10502953) between 0 and 1.
"""

import numpy as np
from numpy.typing import NDArray

from schemas.results.evaluation import Interval

RESAMPLES = 5_000
_SEED = 20_211_031
_BATCH = 500

FloatArray = NDArray[np.float64]


def mean_interval(values: NDArray[np.float64], *, confidence: float) -> Interval:
    """Mean over prompts (one value each) of any quantity, with its percentile bootstrap interval (Efron 1979)."""
    assert values.ndim == 1, "one value per prompt"
    assert values.size, "an interval needs at least one prompt"
    mean = float(values.mean())
    if np.ptp(values) == 0.0:
        return Interval(value=mean, low=mean, high=mean)
    # Imported here because it takes most of a second, which commands that compute no interval should not spend.
    from scipy import stats

    # The seed is fixed: the same table always gives the same interval.
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    # With very skewed data, rounding can put a percentile on the wrong side of the mean.
    return Interval(value=mean, low=min(float(found.low), mean), high=max(float(found.high), mean))


def rate_interval(values: NDArray[np.float64], *, confidence: float) -> Interval:
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
