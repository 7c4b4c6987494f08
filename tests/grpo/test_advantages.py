import inspect
import math
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from trl.trainer import grpo_trainer

from grpo_tasks.grpo.advantages import STD_FLOOR, Rewards, advantages, nanstd
from schemas.config.stage import StageConfig

rewards_of_groups = arrays(np.float64, (3, 4), elements=st.floats(-5, 5, width=32))
BASELINES = ["group_mean", "leave_one_out"]
SCALES = ["group", "batch", "none"]


def stage(size=4, **settings):
    return StageConfig(name="s", rewards=["format"], num_generations=size, per_device_train_batch_size=3 * size, **settings)


def one(values):
    return Rewards(torch.as_tensor(values)[:, None], torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@given(grouped=rewards_of_groups)
def test_advantages_equal_the_textbook_formula(scale, baseline, grouped):
    found = advantages(one(grouped.ravel()), stage(scale_rewards=scale, baseline=baseline))
    flat = grouped.ravel()
    batch_mean = sum(flat) / 12
    batch_std = math.sqrt(sum((r - batch_mean) ** 2 for r in flat) / 11)
    for index, group in enumerate(grouped):
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        divisor = {"group": std + STD_FLOOR, "batch": batch_std + STD_FLOOR, "none": 1.0}[scale]
        for k, reward in enumerate(group):
            compared = mean if baseline == "group_mean" else (sum(group) - reward) / 3
            wanted = 0.0 if found.dead[index] else (reward - compared) / divisor
            assert found.values[4 * index + k].item() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@given(value=st.floats(-1e3, 1e3), scale=st.sampled_from(SCALES), baseline=st.sampled_from(BASELINES))
def test_tied_groups_are_exactly_zero_whatever_the_value(value, scale, baseline):
    rewards = torch.tensor([value] * 5 + [0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float32)
    found = advantages(one(rewards), stage(5, scale_rewards=scale, baseline=baseline))
    assert found.dead.tolist() == [True, False]
    assert (found.values[:5] == 0).all()
    assert found.group_std[0] == 0


def test_a_nearly_tied_group_is_not_blown_up_by_its_tiny_std():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert (advantages(one(rewards), stage()).values == 0).all()


def theirs(scores, weights, settings):
    """TRL's own lines from scores to advantages, extracted from the middle of a method (v1.16)."""
    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    start = source.rindex("\n", 0, source.index("num_generations = self.num_generations if mode")) + 1
    end = source.rindex("\n", 0, source.index("# Slice to keep only the local part of the data")) + 1
    trainer = SimpleNamespace(
        reward_weights=weights,
        reward_funcs=[None] * len(weights),
        multi_objective_aggregation=settings.multi_objective_aggregation,
        scale_rewards=settings.scale_rewards,
        num_generations=settings.num_generations,
    )
    names = vars(grpo_trainer) | {"self": trainer, "mode": "train", "device": scores.device, "rewards_per_func": scores}
    exec(textwrap.dedent(source[start:end]), names)
    return names["advantages"]


@pytest.mark.parametrize("unscored", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_of_several_functions_equal_trl(aggregation, scale, unscored):
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(12, 3, generator=generator)
    scores[2, 1] = torch.nan
    if unscored:
        scores[5] = torch.nan
    weights = torch.tensor([2.0, 0.5, -0.3])
    settings = stage(multi_objective_aggregation=aggregation, scale_rewards=scale)
    found = advantages(Rewards(scores, weights), settings)
    torch.testing.assert_close(found.values[:, 0], theirs(scores, weights, settings), rtol=1e-6, atol=1e-6)
    if unscored:
        assert found.values[5] == 0


def test_a_group_that_nothing_applies_to_is_dead():
    scores = torch.tensor([[torch.nan]] * 4 + [[0.0], [1.0], [0.0], [0.0]])
    found = advantages(Rewards(scores, torch.ones(1)), stage())
    assert found.dead.tolist() == [True, False]
    assert not found.values.isnan().any()


def test_normalising_each_function_lets_none_drown_the_others():
    """Correctness in thousands and format in ones: summed, format moves nothing; normalised, both count alike."""
    scores = torch.tensor([[1000.0, 0.0], [0.0, 1.0], [1000.0, 1.0], [0.0, 0.0]])
    summed = advantages(Rewards(scores, torch.ones(2)), stage())
    split = advantages(Rewards(scores, torch.ones(2)), stage(multi_objective_aggregation="normalize_then_sum"))
    assert abs(summed.values[0] - summed.values[2]) < 0.01
    assert split.values[2] > split.values[0] + 0.5
    assert split.values[0].item() == pytest.approx(split.values[1].item(), abs=1e-3)


def test_scores_that_cancel_in_the_sum_are_alive_only_when_normalised_apart():
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    rewards = Rewards(scores, torch.tensor([1.0, 1.0]))
    assert advantages(rewards, stage()).dead.tolist() == [True]
    assert advantages(rewards, stage(multi_objective_aggregation="normalize_then_sum")).dead.tolist() == [False]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_the_same_score_at_every_token_is_that_score(scale, baseline, aggregation):
    scores = torch.rand(8, 2, generator=torch.Generator().manual_seed(2))
    settings = stage(scale_rewards=scale, baseline=baseline, multi_objective_aggregation=aggregation)
    weights = torch.tensor([1.0, 0.5])
    plain = advantages(Rewards(scores, weights), settings)
    tokens = scores[:, None].repeat(1, 5, 1)
    tokens[3, 2:] = torch.nan
    found = advantages(Rewards(scores, weights, tokens), settings)
    assert found.values.shape == (8, 5)
    wanted = plain.values.repeat(1, 5)
    wanted[3, 2:] = 0.0
    torch.testing.assert_close(found.values, wanted)


def test_a_score_per_token_ranks_the_tokens_of_one_completion():
    alike = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]] * 2)
    # Equal means, and still no tie: the tokens differ.
    assert advantages(Rewards(alike.mean(1), torch.ones(1), alike), stage()).dead.tolist() == [False]
    tokens = torch.zeros(4, 3, 1)
    tokens[0, 1] = 3.0
    found = advantages(Rewards(tokens.mean(1), torch.ones(1), tokens), stage(scale_rewards="none"))
    assert found.values[0].tolist() == pytest.approx([-0.25, 2.75, -0.25])
    assert found.values[1:].flatten().tolist() == pytest.approx([-0.25] * 9)


def test_the_deviation_of_groups_of_two_one_and_none():
    nan = math.nan
    found = nanstd(torch.tensor([[1.0, 3.0, nan], [2.0, 2.0, nan], [5.0, nan, nan], [nan, nan, nan]]))
    assert found.tolist() == pytest.approx([math.sqrt(2), 0.0, 0.0, 0.0])
