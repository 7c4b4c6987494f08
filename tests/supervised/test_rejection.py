"""A stage of kind rejection: which completions it trains on, and what that teaches."""

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from grpo_tasks.grpo.microbatches import chosen_completions
from grpo_tasks.policy.load import save_trained
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.stage import StageConfig
from schemas.metrics import describe
from tests.grpo.conftest import journal
from tests.in_process import suite_of


def scored(totals, *, size, tokens=None, truncated=(), failed=()):
    """A rollout with these rewards of one function of weight 1 and full score 1."""
    completions = [
        SimpleNamespace(
            token_ids=[index] if tokens is None else tokens[index], truncated=index in truncated, failed=index in failed
        )
        for index in range(len(totals))
    ]
    raw = np.array(totals, dtype=float)[:, None]
    scores = SimpleNamespace(totals=raw[:, 0], raw=raw, weights=np.ones(1), full=np.ones(1))
    return SimpleNamespace(rollout=SimpleNamespace(completions=completions, group_size=size), scores=scores)


def stage(**settings):
    return StageConfig(name="r", kind="rejection", rewards=["format"], **settings)


NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [1, 4]),
        ({"keep_completions": 2}, [1, 2, 4, 5]),
        ({"keep_reward": 0.9}, [1]),
        ({"keep_completions": None, "keep_reward": 0.5}, [1, 2]),
        ({"keep_completions": None, "keep_reward": 0.0}, [0, 1, 2, 4, 5]),
    ],
)
def test_the_best_are_kept_with_ties_by_sampling_order(settings, wanted):
    assert chosen_completions(scored([0.0, 1.0, 0.5, NAN, 0.2, 0.2], size=3), stage(**settings)) == wanted


def test_equal_completions_count_once_and_empty_ones_never():
    rollout = scored([1.0, 1.0, 1.0, 0.5], size=4, tokens=[[], [7, 8], [7, 8], [9]])
    assert chosen_completions(rollout, stage(keep_completions=None, keep_reward=0.1)) == [1, 3]
    assert chosen_completions(rollout, stage(keep_completions=2)) == [1, 3]


def test_completions_that_were_cut_off_are_left_out_when_asked():
    rollout = scored([1.0, 0.5], size=2, truncated={0})
    assert chosen_completions(rollout, stage()) == [0]
    assert chosen_completions(rollout, stage(mask_truncated_completions=True)) == [1]


def test_a_conversation_that_failed_is_never_kept_whatever_its_score():
    rollout = scored([0.0, 0.0, -1.0, 0.0], size=2, failed={0, 2, 3})
    assert chosen_completions(rollout, stage(keep_completions=None, keep_reward=0.0)) == [1]
    assert chosen_completions(rollout, stage(keep_completions=2)) == [1]


@pytest.mark.slow
def test_training_on_the_best_completions_raises_the_reward(sums):
    result, directory = sums.train(
        kind="rejection", max_steps=15, learning_rate=3e-3, num_generations=8, per_device_train_batch_size=64
    )
    lines = journal(directory)
    assert np.mean([line["reward"] for line in lines[-3:]]) > np.mean([line["reward"] for line in lines[:3]]) + 0.2
    assert all(line["kept_reward"] >= line["reward"] for line in lines)
    assert all(line["kept_completions"] == pytest.approx(1 / 8) for line in lines)
    assert [name for line in lines for name in line if describe(name) is None] == []
    assert result.steps == 15


def test_the_loss_is_the_cross_entropy_of_the_kept_completions(sums):
    _, directory = sums.train(kind="rejection", max_steps=1)
    table = pl.read_parquet(directory.completions(1))
    best = table.sort("reward", descending=True, maintain_order=True).unique("prompt_id", keep="first")
    assert journal(directory)[0]["trained_tokens"] == best["completion_tokens"].sum()


def test_several_updates_train_on_one_rollout(sums):
    _, directory = sums.train(kind="rejection", max_steps=4, num_iterations=2)
    lines = journal(directory)
    assert [line["reward"] for line in lines[::2]] == [line["reward"] for line in lines[1::2]]
    assert lines[0]["reward"] != lines[2]["reward"]
    assert lines[1]["loss"] < lines[0]["loss"]


def test_an_update_without_any_kept_completion_moves_nothing(sums):
    directory = sums.write(
        kind="rejection", length=3, max_steps=2, keep_reward=1.0, stage_rewards=["correctness"], learning_rate=1e-2
    )
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = sums.trainer(directory, suite)
        save_trained(trainer.learner.model, trainer.tokenizer, sums.root / "start")
        trainer.train()
    assert all(line["kept_completions"] == 0 for line in journal(directory))
    assert all("trained_tokens" not in line for line in journal(directory))
    start, end = (load_file(folder / "adapter_model.safetensors") for folder in (sums.root / "start", directory.final))
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
