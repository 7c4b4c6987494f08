"""pass@k against brute force over all draws."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.evaluation.intervals import ladder, pass_at_k


def brute_force(num_samples: int, num_right: int, k: int) -> float:
    samples = [True] * num_right + [False] * (num_samples - num_right)
    draws = list(itertools.combinations(samples, k))
    return sum(any(draw) for draw in draws) / len(draws)


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_draws_with_success(num_samples):
    right = np.arange(num_samples + 1)
    for k in range(1, num_samples + 1):
        expected = [brute_force(num_samples, c, k) for c in right]
        np.testing.assert_allclose(pass_at_k(num_samples, right, k), expected, atol=1e-12)


def test_pass_at_1_is_the_share_of_right_samples():
    np.testing.assert_allclose(pass_at_k(4, np.array([0, 1, 3, 4]), 1), [0.0, 0.25, 0.75, 1.0])


def test_large_numbers_neither_overflow_nor_leave_the_unit_interval():
    found = pass_at_k(20_000, np.array([0, 1, 10_000, 20_000]), 10_000)
    np.testing.assert_allclose(found, [0.0, 0.5, 1.0, 1.0], atol=1e-12)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_more_tries_never_hurt(case):
    n, c, k = case
    one = pass_at_k(n, np.array([c]), k)[0]
    assert 0.0 <= one <= 1.0
    if k < n:
        assert one <= pass_at_k(n, np.array([c]), k + 1)[0] + 1e-12


def test_more_tries_than_samples_are_refused():
    with pytest.raises(AssertionError, match="pass@5"):
        pass_at_k(4, np.array([1]), 5)


@pytest.mark.parametrize(("num_samples", "rungs"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_reported_k_are_powers_of_two_and_the_last(num_samples, rungs):
    assert ladder(num_samples) == rungs
