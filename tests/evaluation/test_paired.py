"""The paired test: exact values, and no more false alarms than it says."""

import numpy as np
import polars as pl
import pytest
from scipy import stats

from grpo_tasks.evaluation.paired import paired_test, prompt_values


def judge(ours, theirs, alpha=0.05):
    return paired_test(np.asarray(ours, float), np.asarray(theirs, float), alpha=alpha, metric="accuracy", against="base")


def test_right_or_wrong_takes_the_exact_mcnemar_test():
    ours = [1] * 9 + [0] * 2 + [1] * 30
    theirs = [0] * 9 + [1] * 2 + [1] * 30
    found = judge(ours, theirs)
    assert found.p_value == pytest.approx(stats.binomtest(9, 11, 0.5, alternative="greater").pvalue)
    assert found.better
    assert found.difference == pytest.approx(7 / 41)
    assert found.prompts == 41


def test_a_model_is_not_better_than_itself():
    same = np.random.default_rng(0).integers(0, 2, size=100)
    found = judge(same, same)
    assert (found.p_value, found.difference, found.better) == (1.0, 0.0, False)


def test_the_test_is_one_sided():
    rng = np.random.default_rng(5)
    ours, theirs = rng.random(60), rng.random(60) + 0.5
    assert judge(ours, theirs).p_value > 0.99
    assert judge(theirs, ours).p_value < 0.001


def test_few_graded_differences_are_counted_over_all_sign_flips():
    difference = np.array([0.25, 0.5, 0.75, -0.25, 0.5])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 5)).reshape(5, -1)
    flipped = (signs * np.abs(difference)[:, None]).mean(axis=0)
    assert judge(difference, np.zeros(5)).p_value == pytest.approx(np.mean(flipped >= difference.mean() - 1e-12))


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
    ours, theirs = np.array([0.5, 0.25, 1.0]), np.array([0.5, 0.0, 1.0])
    assert paired_test(ours, theirs, alpha=0.05, metric="accuracy", against="base").p_value == 0.5
    assert paired_test(theirs, ours, alpha=0.05, metric="accuracy", against="base").p_value == 1.0


def test_ties_carry_no_weight():
    ours, theirs = np.array([0.75, 0.5, 0.75, 1.0]), np.array([0.5, 0.25, 0.25, 0.25])
    padded = judge(np.r_[ours, np.full(50, 0.5)], np.r_[theirs, np.full(50, 0.5)])
    assert padded.p_value == pytest.approx(judge(ours, theirs).p_value)


def test_a_p_value_is_never_zero():
    assert 0.0 < judge(np.full(200, 0.75), np.zeros(200)).p_value <= 1e-4


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


def test_a_clear_gain_is_seen():
    rng = np.random.default_rng(2)
    ours, theirs = rng.binomial(4, 0.7, size=64) / 4, rng.binomial(4, 0.4, size=64) / 4
    assert judge(ours, theirs, alpha=0.01).better


SCORED = pl.DataFrame(
    {
        "prompt_id": ["b", "b", "b", "a", "a", "a"],
        "sample": [0, 1, -1, -1, 0, 1],
        "correct": [True, False, False, True, False, False],
        "strict_format": [True, True, False, False, True, False],
        "lenient_correct": [True, True, False, False, False, False],
    }
)


@pytest.mark.parametrize(
    ("metric", "figures"),
    [("accuracy", [0.0, 0.5]), ("format_rate", [0.5, 1.0]), ("lenient_accuracy", [0.0, 1.0]), ("pass_at_k", [0.0, 1.0])],
)
def test_figures_are_means_over_a_prompts_samples_without_the_greedy_one(metric, figures):
    found = prompt_values(SCORED, metric)
    assert found["prompt_id"].to_list() == ["a", "b"]
    assert found["value"].to_list() == figures
