"""The rewards of a stage together: weighted sums, error policies, weights that move."""

import json

import numpy as np
import pytest

from grpo_tasks.rewards.suite import AdaptiveWeight, RewardSuite, Scores
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import AdaptiveWeightConfig, RewardsConfig
from schemas.errors import RewardError

HONEST = "<reasoning>15 + 27 = 42</reasoning><answer>42</answer>"
WRONG = "<reasoning>15 + 27 = 41</reasoning><answer>41</answer>"

FUNCTIONS = """
    def some(prompts, completions, **columns):
        return [None if "skip" in chat[0]["content"] else 2.0 for chat in completions]

    def raises(prompts, completions, **columns):
        raise ValueError("no")

    def reports(prompts, completions, log_metric, **columns):
        log_metric("length", sum(len(chat[0]["content"]) for chat in completions))
        return [1.0] * len(completions)

    def rises(prompts, completions, trainer_state, **columns):
        return [float(trainer_state.global_step)] * len(completions)
"""


def test_totals_are_the_weighted_sums(rewards_config, make_batch):
    config = rewards_config(format={"weight": 0.5})
    with RewardSuite(config, ["format", "correctness"]) as suite:
        scores = suite.score(make_batch(HONEST, WRONG, "42"))
    assert scores.names == ["format", "correctness"]
    np.testing.assert_array_equal(scores.raw, [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(scores.weights, [0.5, 2.0])
    np.testing.assert_array_equal(scores.totals, [2.5, 0.5, 0.0])
    assert scores.notes == []


def test_settings_reach_the_built_in_functions(rewards_config, make_batch):
    config = rewards_config(
        short={"function": "length", "params": {"max_length": 5, "min_length": 1}, "weight": 1.0},
        long={"function": "length", "params": {"min_length": 1000, "max_length": 2000}, "weight": 1.0},
    )
    completion = CompletionConfig.model_validate({"tags": {"reasoning": "think", "answer": "final"}, "equality": "choice"})
    with RewardSuite(config, ["format", "correctness", "short", "long"], completion=completion) as suite:
        raw = suite.score(make_batch("<think>w</think><final>(B)</final>", HONEST, "abcde", answer="B")).raw
    np.testing.assert_array_equal(raw[:, :2], [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(raw[2, 2:], [1.0, 0.005])


def test_functions_may_not_apply_and_see_the_update(own_module, rewards_config, make_batch):
    own_module(FUNCTIONS)
    names = ("some", "rises", "reports")
    functions = {name: {"function": f"my_rewards:{name}", "weight": 3.0} for name in names}
    with RewardSuite(rewards_config(**functions), [*names, "correctness"]) as suite:
        scores = suite.score(make_batch(HONEST, "skip", step=12))
        parts = [suite.score(make_batch("aa")), suite.score(make_batch("bbbb"))]
    np.testing.assert_array_equal(scores.raw, [[2.0, 12.0, 1.0, 1.0], [np.nan, 12.0, 1.0, 0.0]])
    np.testing.assert_array_equal(scores.totals, [6.0 + 36.0 + 3.0 + 2.0, 36.0 + 3.0])
    np.testing.assert_array_equal(scores.success(), [1.0, 1.0, 1.0, 0.5])
    assert parts[0].metrics == {"logged/reports/length": 2.0}
    assert Scores.join(parts).metrics == {"logged/reports/length": 3.0}


def test_a_failing_function_stops_the_run_by_default_and_is_named(own_module, rewards_config, make_batch):
    own_module(FUNCTIONS)
    config = rewards_config(raises={"function": "my_rewards:raises"})
    with RewardSuite(config, ["raises"]) as suite, pytest.raises(RewardError) as caught:
        suite.score(make_batch("a completion", "another"))
    text = str(caught.value)
    assert "reward raises raised ValueError: no" in text
    assert "train.jsonl:1" in text
    assert "'a completion'" in text
    assert "my_rewards.py:6" in text


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "raw"), [("zero", 0.0), ("skip", np.nan)])
def test_a_failure_that_does_not_stop_the_run_is_reported_every_time(own_module, rewards_config, make_batch, policy, raw):
    own_module(FUNCTIONS)
    config = rewards_config(raises={"function": "my_rewards:raises", "on_error": policy})
    with RewardSuite(config, ["correctness", "raises"]) as suite:
        for _ in range(2):
            scores = suite.score(make_batch(HONEST, WRONG))
            np.testing.assert_array_equal(scores.raw[:, 1], [raw, raw])
            np.testing.assert_array_equal(scores.totals, [2.0, 0.0])
            assert [note.function for note in scores.notes] == ["raises"]
            assert "ValueError" in str(scores.notes[0])
            assert f"on_error: {policy}" in str(scores.notes[0])
            assert np.isnan(scores.success()[1])


def test_success_is_counted_from_the_functions_own_full_score(rewards_config, make_batch):
    config = rewards_config(length={"full_score": 0.4, "params": {"min_length": 10, "max_length": 20}})
    with RewardSuite(config, ["length", "repetition"]) as suite:
        success = suite.score(make_batch("12345", "123", "a b c d a b c d")).success()
    np.testing.assert_allclose(success, [2 / 3, 2 / 3])


def test_a_weight_grows_when_success_is_rare_and_shrinks_otherwise(make_batch):
    config = RewardsConfig.model_validate({"functions": {"format": {"adaptive": {"every_steps": 2}}}})
    with RewardSuite(config, ["format", "correctness"]) as suite:
        rare, common = suite.score(make_batch("42", "43", "44", "45")), suite.score(make_batch(HONEST, HONEST))
        weights = []
        for scores in (rare, rare, common, common, rare, common):
            suite.adapt(scores)
            weights.append(suite.weights.tolist())
        # The moved weight is the one that counts.
        assert suite.score(make_batch(HONEST)).totals.tolist() == [pytest.approx(1.08 + 2.0)]
    assert [weight[0] for weight in weights] == pytest.approx([1.0, 1.2, 1.2, 1.08, 1.08, 1.08])
    assert {weight[1] for weight in weights} == {2.0}


def test_weights_stay_within_their_bounds_and_move_by_knowledge_only():
    weight = AdaptiveWeight(AdaptiveWeightConfig(every_steps=1))
    weight.observe(None)
    assert weight.scale == 1.0
    for share, bound in ((0.0, 4.0), (1.0, 0.25)):
        for _ in range(50):
            weight.observe(share)
        assert weight.scale == bound


def test_a_restored_suite_continues_as_if_never_stopped(make_batch):
    config = RewardsConfig.model_validate({"functions": {"format": {"adaptive": {"every_steps": 3}}}})
    first, second = RewardSuite(config, ["format"]), RewardSuite(config, ["format"])
    with first:
        scores = first.score(make_batch("42", HONEST, "x", "y"))
    for _ in range(4):
        first.adapt(scores)
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(5):
        first.adapt(scores)
        second.adapt(scores)
        assert first.weights.tolist() == second.weights.tolist()
    assert first.weights[0] == pytest.approx(1.2**3)
