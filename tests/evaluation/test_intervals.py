"""Intervals that hold what they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_tasks.evaluation.intervals import mean_interval, rate_interval, wilson_interval


def test_an_interval_of_256_right_prompts_does_not_claim_certainty():
    found = rate_interval(np.ones(256), confidence=0.95)
    exact = stats.binomtest(256, 256).proportion_ci(0.95, method="exact")
    assert found.value == found.high == 1.0
    assert found.low == pytest.approx(exact.low)
    assert 0.98 < found.low < 0.99


def test_an_interval_of_256_wrong_prompts_mirrors_it():
    right, wrong = rate_interval(np.ones(256), confidence=0.95), rate_interval(np.zeros(256), confidence=0.95)
    assert (wrong.value, wrong.low) == (0.0, 0.0)
    assert wrong.high == pytest.approx(1.0 - right.low)


def test_prompts_that_all_hold_half_still_get_a_width():
    found = rate_interval(np.full(50, 0.5), confidence=0.95)
    wilson = stats.binomtest(25, 50).proportion_ci(0.95, method="wilson")
    assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high))


def test_one_failure_never_raises_the_lower_bound():
    failing = np.ones(256)
    failing[0] = 0.75
    assert rate_interval(failing, confidence=0.95).low <= rate_interval(np.ones(256), confidence=0.95).low


def test_same_table_gives_same_interval():
    values = np.random.default_rng(3).random(40)
    assert rate_interval(values, confidence=0.9) == rate_interval(values, confidence=0.9)


def test_bootstrap_agrees_with_the_normal_interval_where_both_are_right():
    values = np.random.default_rng(1).normal(30.0, 4.0, size=400)
    found = mean_interval(values, confidence=0.95)
    half = 1.96 * values.std(ddof=1) / np.sqrt(values.size)
    assert found.low == pytest.approx(found.value - half, abs=0.1)
    assert found.high == pytest.approx(found.value + half, abs=0.1)


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
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=60))
def test_the_value_lies_inside_and_all_inside_the_unit_interval(values):
    found = rate_interval(np.array(values), confidence=0.95)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


@settings(max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=40))
def test_higher_confidence_is_never_narrower(counts):
    values = np.array(counts) / 4.0
    wide, narrow = rate_interval(values, confidence=0.99), rate_interval(values, confidence=0.8)
    assert wide.low <= narrow.low
    assert wide.high >= narrow.high


@pytest.mark.parametrize(("right", "trials"), [(0, 8), (3, 8), (8, 8), (1, 1)])
def test_the_interval_of_a_rate_is_wilsons(right, trials):
    exact = stats.binomtest(right, trials).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right / trials, trials, 0.95) == pytest.approx((exact.low, exact.high), abs=1e-12)
