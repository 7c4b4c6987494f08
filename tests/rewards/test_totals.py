"""The reward of a completion has one definition, and the batch that functions receive has one builder."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_tasks.grpo.advantages import Rewards, advantages
from grpo_tasks.grpo.measure import completions_table, held_out_metrics, rollout_metrics
from grpo_tasks.grpo.rounds import Rollout, ScoredRollout, score_groups
from grpo_tasks.lab.probes import GroupSample
from grpo_tasks.lab.run import forecast, run_lab, stage_totals
from grpo_tasks.rewards.contract import batch_of
from grpo_tasks.rewards.suite import RewardSuite, Scores, charge_faults, solved, stage_weights, total_scores
from grpo_tasks.rollout.engine import Completion
from schemas.config.rewards import RewardsConfig
from schemas.config.stage import StageConfig
from schemas.metrics import EVAL_TASK_REWARD, TASK_REWARD, describe, member
from schemas.prompts import PromptRow

scores_of_functions = arrays(np.float64, (8, 3), elements=st.sampled_from([np.nan, -1.0, 0.0, 0.5, 2.0]))
REWARDS = RewardsConfig.model_validate(
    {
        "functions": {
            name: {"function": f"my_rewards:{name}", "weight": weight}
            for name, weight in zip("abc", (1.0, 0.5, -2.0), strict=True)
        }
    }
)
ROW = PromptRow("0" * 16, "train.jsonl", 1, ({"role": "user", "content": "What is 15 + 27?"},), "42", 1, {})
STAGE = StageConfig(name="s", rewards=list("abc"), num_generations=4, per_device_train_batch_size=8)


def scored(raw):
    weights = stage_weights(STAGE, REWARDS)
    scores = Scores(list("abc"), raw, weights, np.ones(3), total_scores(raw, weights), [])
    completions = [Completion([1, 2], [0.0, 0.0], "text", "stop")] * 8
    return ScoredRollout(Rollout([ROW, ROW], [[1], [2]], completions, 4, 0.0), scores, 0.0)


@given(scores_of_functions)
def test_totals_are_trls(raw):
    per_function, weights = torch.from_numpy(raw), torch.from_numpy(stage_weights(STAGE, REWARDS))
    # trl 1.16, GRPOTrainer._generate_and_score_completions
    wanted = (per_function * weights.unsqueeze(0)).nansum(dim=1)
    wanted[torch.isnan(per_function).all(dim=1)] = torch.nan
    np.testing.assert_array_equal(total_scores(raw, weights.numpy()), wanted.numpy())


@given(scores_of_functions)
def test_the_reward_means_the_same_everywhere(raw):
    rollout = scored(raw)
    gained = advantages(Rewards(torch.from_numpy(raw), torch.from_numpy(rollout.scores.weights)), STAGE)
    trained = rollout_metrics(rollout, gained)
    held_out = held_out_metrics(rollout, stage_weights(STAGE, REWARDS))
    columns = {name: [None if np.isnan(score) else score for score in raw[:, index]] for index, name in enumerate("abc")}
    totals = stage_totals(STAGE, REWARDS, columns)
    np.testing.assert_array_equal(totals, rollout.scores.totals)
    assert held_out.get("eval_reward") == trained.get("reward")
    samples = [GroupSample(name, ["text"] * 4, [[1]] * 4) for name in "pq"]
    seen = forecast("s", samples, totals)
    assert seen.mean_reward == trained.get("reward", 0.0)
    assert seen.share_with_signal == 1.0 - trained["frac_reward_zero_std"]


def test_what_functions_log_is_a_figure_of_the_update_or_a_column():
    rollout, logged = scored(np.ones((8, 3))), {"logged_a_verdict": ["good"] * 7 + [None]}
    rollout = replace(rollout, scores=replace(rollout.scores, metrics={"logged/a/brackets": 2.5}, extra=logged))
    gained = advantages(Rewards(torch.from_numpy(rollout.scores.raw), torch.from_numpy(rollout.scores.weights)), STAGE)
    assert rollout_metrics(rollout, gained)["logged/a/brackets"] == 2.5
    table = completions_table(rollout, torch.zeros(8, 1), stage="s", step=1, policy_version=0)
    assert table["logged_a_verdict"].to_pylist() == ["good"] * 7 + [None]


def test_a_function_for_half_of_the_completions_counts_half_when_held_out():
    raw = np.array([[1.0, np.nan, np.nan], [1.0, 1.0, np.nan]] * 4)
    # The weighted sum of the functions' means would be 1.5.
    assert held_out_metrics(scored(raw), stage_weights(STAGE, REWARDS))["eval_reward"] == 1.25


RESERVED_COLUMNS = {"trainer_state": 1, "log_metric": 2, "prompts": 3, "answer": 4, "ngram": 5, "level": 6}


def test_a_reserved_column_is_left_out_in_training_and_in_the_lab(own_module, rewards_config):
    own_module("""
        def state(prompts, completions, answer, trainer_state, level, **columns):
            assert answer == ["42"] * len(completions), answer
            return [float(trainer_state.global_step)] * len(completions)
    """)
    row = replace(ROW, extra=RESERVED_COLUMNS)
    config = rewards_config(state={"function": "my_rewards:state"})
    rollout = Rollout([row], [[1]], [Completion([1], [0.0], "a b c d a b c d", "stop")] * 2, 2, 0.0)
    with RewardSuite(config, ["state", "repetition"]) as suite:
        trained = score_groups(suite, rollout, step=7).scores.raw
        tried = suite.score(batch_of([row, row], ["a b c d a b c d"] * 2, [[1], [1]], step=7)).raw
    np.testing.assert_array_equal(trained, tried)
    assert trained[0, 0] == 7.0
    # The column ngram is no parameter of repetition.
    assert trained[0, 1] < 0.0


def test_the_lab_names_the_columns_that_no_function_sees(run_config, make_row):
    rows = [make_row(1), make_row(2, trainer_state="x", level=3)]
    findings = run_lab(run_config({"s": ["format"]}, lab={"num_rows": 2}), rows)
    [check] = [check for check in findings.checks if check.check == "columns"]
    assert (check.outcome, check.place) == ("warned", "train.jsonl:2")
    assert "trainer_state" in check.detail
    assert {check.outcome for check in findings.checks if check.check != "columns"} == {"passed"}


def test_each_task_has_its_reward_in_training_and_on_held_out_prompts():
    raw = np.array([[1.0, np.nan, np.nan]] * 4 + [[0.0, np.nan, -1.0]] * 4)
    one = scored(raw)
    tasks = replace(one, rollout=replace(one.rollout, rows=[replace(ROW, task="math"), replace(ROW, task="style")]))
    gained = advantages(Rewards(torch.from_numpy(raw), torch.from_numpy(one.scores.weights)), STAGE)
    trained, held_out = rollout_metrics(tasks, gained), held_out_metrics(tasks, stage_weights(STAGE, REWARDS))
    for name, value in {"math": 1.0, "style": 2.0}.items():
        assert trained[member(TASK_REWARD, name)] == held_out[member(EVAL_TASK_REWARD, name)] == value
        assert describe(member(TASK_REWARD, name)).plot == describe(member(EVAL_TASK_REWARD, name)).plot == "tasks"
    assert not [name for name in rollout_metrics(one, gained) if "task" in name]


def test_a_completion_is_solved_at_the_share_of_the_full_reward():
    weights, full = np.array([1.0, 2.0]), np.array([1.0, 1.0])
    scores = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.8], [np.nan, 1.0], [1.0, np.nan], [np.nan, np.nan]])
    # In the fifth and sixth row one function does not apply, and the full reward is smaller.
    expected = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, np.nan]
    assert np.array_equal(solved(scores, weights, full, 0.8), expected, equal_nan=True)
    assert solved(scores[3:4], weights, full, 1.0).tolist() == [0.0]
    # Scores that are all negative, such as a loss: the full score counts as it stands.
    losses, weight, best = np.array([[-3.0], [-3.3], [np.nan]]), np.array([1.0]), np.array([-3.2])
    assert np.array_equal(solved(losses, weight, best, 0.8), [1.0, 0.0, np.nan], equal_nan=True)


def test_functions_that_only_punish_do_not_raise_the_full_reward():
    # repetition has the full score 0, and the last function a negative weight.
    weights, full = np.array([2.0, 0.5, -1.0]), np.array([1.0, 0.0, 1.0])
    scores = np.array([[1.0, 0.0, 0.0], [1.0, -0.2, 0.1], [1.0, -1.0, 0.0], [1.0, 0.0, 1.0]])
    assert solved(scores, weights, full, 0.8).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert solved(scores[:, 1:2], weights[1:2], full[1:2], 0.8).tolist() == [1.0, 0.0, 0.0, 1.0]


WEIGHTS = np.array([1.0, 0.5, -2.0])


@given(scores_of_functions, arrays(np.bool_, 8))
def test_no_conversation_gains_by_a_fault(raw, failed):
    """Its scores are those of no function: whatever the honest ones of its group earn, it earns no more, and never above 0."""
    given_scores = np.where(failed[:, None], np.nan, raw)
    groups = np.repeat([0, 1], 4)
    found = charge_faults(given_scores, WEIGHTS, failed, groups)
    np.testing.assert_array_equal(found[~failed], raw[~failed])
    totals = total_scores(found, WEIGHTS)
    for group in (0, 1):
        members = groups == group
        honest, charged = totals[members & ~failed], totals[members & failed]
        if len(honest) and not np.isnan(honest).all():
            assert (charged[:, None] <= np.nan_to_num(honest, nan=0.0)[None, :]).all()
        else:
            # Nobody to compare with: 0, or no score where no function applies to the honest ones.
            assert (np.isnan(charged) == bool(len(honest))).all()
        assert (np.nan_to_num(charged) <= 0).all()


def test_a_group_without_a_sound_conversation_is_compared_with_its_task():
    scores = np.array([[np.nan], [np.nan], [-0.5], [2.0], [np.nan], [np.nan]])
    failed, groups, tasks = np.array([1, 1, 0, 0, 1, 1]) == 1, np.array([0, 0, 1, 1, 2, 2]), np.array(list("aaaabb"))
    found = charge_faults(scores, np.ones(1), failed, groups, tasks)
    assert found[:, 0].tolist() == [-0.5, -0.5, -0.5, 2.0, 0.0, 0.0]
