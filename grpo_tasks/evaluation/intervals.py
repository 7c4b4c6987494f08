"""Confidence intervals by bootstrap over prompts, honest where the bootstrap is not.

    per-prompt means -> resample prompts -> percentiles -> never narrower than the prompts allow

Samples of one prompt resemble each other, so prompts are resampled, never single samples. Where all prompts agree (256 of
256 right) every resample is the same and the bare percentile interval would claim certainty; rates are therefore held
to the exact binomial bound of so many agreeing prompts. What it does not do: compare two models (see paired.py).
"""

import numpy as np
from numpy.typing import NDArray

from schemas.results import Interval

RESAMPLES = 5_000
_SEED = 20_211_031
_BATCH = 500


def mean_interval(values: NDArray[np.float64], *, confidence: float) -> Interval:
    """Mean over prompts of any figure (a length, say) with its percentile bootstrap interval.

    Args:
        values: one figure a prompt, at least one.
        confidence: level, between 0 and 1.
    """
    assert values.ndim == 1, "one figure a prompt"
    assert values.size, "an interval needs at least one prompt"
    mean = float(values.mean())
    if np.ptp(values) == 0.0:
        return Interval(value=mean, low=mean, high=mean)
    # Importing it takes most of a second, which a command that computes no interval need not wait for.
    from scipy import stats

    # The seed is fixed: the same table gives the same interval, today and in a year.
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    # Rounding may put a percentile a hair inside the mean of lopsided data.
    return Interval(value=mean, low=min(float(found.low), mean), high=max(float(found.high), mean))


def rate_interval(values: NDArray[np.float64], *, confidence: float) -> Interval:
    """Mean over prompts of a share between 0 and 1, with an interval that never claims certainty.

    Args:
        values: share of each prompt's samples, between 0 and 1.
        confidence: level, between 0 and 1.
    """
    assert values.size == 0 or (values.min() >= 0.0 and values.max() <= 1.0), "shares lie between 0 and 1"
    plain = mean_interval(values, confidence=confidence)
    if np.ptp(values) == 0.0 and 0.0 < plain.value < 1.0:
        low, high = _wilson(plain.value, values.size, confidence)
        return Interval(value=plain.value, low=low, high=high)
    # Clopper-Pearson for n agreeing prompts; for them no bound may lie further out, whatever the resamples say.
    bound = float(((1.0 - confidence) / 2.0) ** (1.0 / values.size))
    return Interval(value=plain.value, low=min(plain.low, bound), high=max(plain.high, 1.0 - bound))


def _wilson(rate: float, num_prompts: int, confidence: float) -> tuple[float, float]:
    """Score interval, for prompts that all hold the same share strictly between 0 and 1."""
    from scipy import stats

    z2 = float(stats.norm.ppf(0.5 + confidence / 2.0)) ** 2
    centre = (rate + z2 / (2 * num_prompts)) / (1 + z2 / num_prompts)
    half = np.sqrt(z2 * rate * (1 - rate) / num_prompts + z2**2 / (4 * num_prompts**2)) / (1 + z2 / num_prompts)
    return float(centre - half), float(centre + half)
