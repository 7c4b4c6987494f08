"""Unbiased pass@k (Chen et al. 2021, arXiv:2107.03374, eq. 1): the probability that at least one of k samples is right.

Of the n samples of a prompt c are right. Drawing k of the n without replacement misses all c with probability
C(n - c, k) / C(n, k). Judging samples and averaging over prompts happens in report.py.
"""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def pass_at_k(num_samples: int, num_right: NDArray[np.int64], k: int) -> FloatArray:
    """pass@k of each prompt.

    Args:
        num_samples: n, samples per prompt.
        num_right: c, the number of right samples of each prompt, 0 <= c <= n.
        k: number of attempts, 1 <= k <= n.

    Returns:
        One probability per prompt, in the shape of `num_right`.
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
