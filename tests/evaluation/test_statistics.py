"""Intervals that hold what they promise, pass@k against brute force, and a paired test with no more false alarms than it says."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_tasks.evaluation.statistics import (
    ladder,
    mean_interval,
    paired_test,
    pass_at_k,
    prompt_values,
    rate_interval,
    wilson_interval,
)


def test_prompts_that_all_agree_do_not_claim_certainty():
    right, wrong = rate_interval(np.ones(256), confidence=0.95), rate_interval(np.zeros(256), confidence=0.95)
    exact = stats.binomtest(256, 256).proportion_ci(0.95, method="exact")
    assert right.value == right.high == 1.0
    assert right.low == pytest.approx(exact.low)
    assert (wrong.value, wrong.low) == (0.0, 0.0)
    assert wrong.high == pytest.approx(1.0 - right.low)
    half = rate_interval(np.full(50, 0.5), confidence=0.95)
    wilson = stats.binomtest(25, 50).proportion_ci(0.95, method="wilson")
    assert (half.low, half.high) == pytest.approx((wilson.low, wilson.high))
    # One failure never raises the lower bound.
    failing = np.r_[0.75, np.ones(255)]
    assert rate_interval(failing, confidence=0.95).low <= right.low


def test_bootstrap_agrees_with_the_normal_interval_where_both_are_right():
    values = np.random.default_rng(1).normal(30.0, 4.0, size=400)
    found = mean_interval(values, confidence=0.95)
    half = 1.96 * values.std(ddof=1) / np.sqrt(values.size)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.1)
    # The same table gives the same interval.
    assert mean_interval(values, confidence=0.95) == found


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(11)
    # Four correlated samples a prompt: the prompt's own chance varies, so samples of a prompt are alike.
    covered = 0
    for _ in range(200):
        chance = rng.beta(4.0, 1.0, size=80)
        found = rate_interval(rng.binomial(4, chance) / 4.0, confidence=0.9)
        covered += found.low <= 0.8 <= found.high
    assert covered / 200 >= 0.84


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_an_interval_lies_in_the_unit_interval_and_grows_with_confidence(counts):
    wide, narrow = (rate_interval(np.array(counts) / 4.0, confidence=level) for level in (0.99, 0.8))
    assert 0.0 <= wide.low <= narrow.low <= narrow.value <= narrow.high <= wide.high <= 1.0


@pytest.mark.parametrize(("right", "trials"), [(0, 8), (3, 8), (8, 8), (1, 1)])
def test_the_interval_of_a_rate_is_wilsons(right, trials):
    exact = stats.binomtest(right, trials).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right / trials, trials, 0.95) == pytest.approx((exact.low, exact.high), abs=1e-12)


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_draws_with_success(num_samples):
    right = np.arange(num_samples + 1)
    for k in range(1, num_samples + 1):
        draws = [itertools.combinations([True] * c + [False] * (num_samples - c), k) for c in right]
        expected = [np.mean([any(draw) for draw in each]) for each in draws]
        np.testing.assert_allclose(pass_at_k(num_samples, right, k), expected, atol=1e-12)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_exact_fractions_and_more_tries_never_hurt(case):
    n, c, k = case
    found = [pass_at_k(n, np.array([c]), tries)[0] for tries in range(1, k + 1)]
    assert found[-1] == pytest.approx(float(1 - Fraction(comb(n - c, k), comb(n, k))), abs=1e-12)
    assert all(few <= more + 1e-12 for few, more in itertools.pairwise([0.0, *found, 1.0]))


def test_large_numbers_neither_overflow_nor_leave_the_unit_interval():
    found = pass_at_k(20_000, np.array([0, 1, 10_000, 20_000]), 10_000)
    np.testing.assert_allclose(found, [0.0, 0.5, 1.0, 1.0], atol=1e-12)


def test_more_tries_than_samples_are_refused():
    with pytest.raises(AssertionError, match="pass@5"):
        pass_at_k(4, np.array([1]), 5)


@pytest.mark.parametrize(("num_samples", "rungs"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_reported_k_are_powers_of_two_and_the_last(num_samples, rungs):
    assert ladder(num_samples) == rungs


def judge(ours, theirs, alpha=0.05):
    return paired_test(np.asarray(ours, float), np.asarray(theirs, float), alpha=alpha, metric="accuracy", against="base")


def test_right_or_wrong_takes_the_exact_mcnemar_test():
    found = judge([1] * 9 + [0] * 2 + [1] * 30, [0] * 9 + [1] * 2 + [1] * 30)
    assert found.p_value == pytest.approx(stats.binomtest(9, 11, 0.5, alternative="greater").pvalue)
    assert (found.better, found.prompts) == (True, 41)
    assert found.difference == pytest.approx(7 / 41)


def test_a_model_is_not_better_than_itself():
    same = np.random.default_rng(0).integers(0, 2, size=100)
    found = judge(same, same)
    assert (found.p_value, found.difference, found.better) == (1.0, 0.0, False)


def test_the_test_is_one_sided():
    rng = np.random.default_rng(5)
    ours, theirs = rng.random(60), rng.random(60) + 0.5
    assert judge(ours, theirs).p_value > 0.99
    assert judge(theirs, ours).p_value < 0.001


def test_a_clear_gain_is_seen_up_to_its_p_value():
    rng = np.random.default_rng(2)
    ours, theirs = rng.binomial(4, 0.7, size=64) / 4, rng.binomial(4, 0.4, size=64) / 4
    assert judge(ours, theirs, alpha=0.01).better
    level = judge(ours, theirs).p_value
    assert [judge(ours, theirs, alpha=alpha).better for alpha in (level, 0.99 * level)] == [True, False]


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_counting_all_flips_equals_trying_all_flips(parts):
    rng = np.random.default_rng(parts)
    signs = np.array(np.meshgrid(*[[-1, 1]] * 10)).reshape(10, -1)
    for _ in range(20):
        difference = rng.integers(-parts, parts + 1, size=10) / parts
        flipped = (signs * np.abs(difference)[:, None]).mean(axis=0)
        assert judge(difference, np.zeros(10)).p_value == pytest.approx(np.mean(flipped >= difference.mean() - 1e-12))


@pytest.mark.slow
def test_random_flips_stand_in_where_counting_would_take_long():
    rng = np.random.default_rng(8)
    ours, theirs = (rng.binomial(64, 0.5, size=12_000) / 64 for _ in range(2))
    change = ours - theirs
    normal = stats.norm.sf(change.sum() / np.sqrt((change**2).sum()))
    assert judge(ours, theirs).p_value == pytest.approx(normal, abs=0.02)


def test_a_single_graded_difference_proves_nothing():
    ours, theirs = np.array([0.5, 0.25 / 7**4, 1.0]), np.array([0.5, 0.0, 1.0])
    assert (judge(ours, theirs).p_value, judge(theirs, ours).p_value) == (0.5, 1.0)


def test_ties_carry_no_weight():
    ours, theirs = np.array([0.75, 0.5, 0.75, 1.0]), np.array([0.5, 0.25, 0.25, 0.25])
    padded = judge(np.r_[ours, np.full(50, 0.5)], np.r_[theirs, np.full(50, 0.5)])
    assert padded.p_value == pytest.approx(judge(ours, theirs).p_value)


def test_a_p_value_is_never_zero():
    # Counted, and estimated from random flips.
    for gains in (np.full(200, 0.75), 0.5 + np.random.default_rng(4).random(200)):
        assert 0.0 < judge(gains, np.zeros(200)).p_value <= 1e-4


@pytest.mark.parametrize("num_samples", [1, 4])
def test_two_equal_models_are_called_different_no_more_often_than_alpha(num_samples):
    rng = np.random.default_rng(17)
    alpha, rounds, alarms = 0.1, 300, 0
    for _ in range(rounds):
        chance = rng.beta(2.0, 2.0, size=30)
        ours, theirs = (rng.binomial(num_samples, chance) / num_samples for _ in range(2))
        alarms += judge(ours, theirs, alpha=alpha).better
    # Three standard deviations of 300 draws at the promised level.
    assert alarms / rounds <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / rounds)


@pytest.mark.parametrize(
    ("metric", "figures"),
    [("accuracy", [0.0, 0.5]), ("format_rate", [0.5, 1.0]), ("lenient_accuracy", [0.0, 1.0]), ("pass_at_k", [0.0, 1.0])],
)
def test_figures_are_means_over_a_prompts_samples_without_the_greedy_one(metric, figures):
    scored = {
        "prompt_id": ["b", "b", "b", "a", "a", "a"],
        "sample": [0, 1, -1, -1, 0, 1],
        "correct": [True, False, False, True, False, False],
        "strict_format": [True, True, False, False, True, False],
        "lenient_correct": [True, True, False, False, False, False],
    }
    found = prompt_values(pl.DataFrame(scored), metric)
    assert (found["prompt_id"].to_list(), found["value"].to_list()) == (["a", "b"], figures)
