"""Stages that train the rows of tokens that their model did not have."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageSpec
from tests.grpo.conftest import journal

CPU = torch.device("cpu")
MODEL = {"added_tokens": [{"token": "<search>", "special": True}], "merged_dtype": "float32"}


def test_a_resumed_stage_with_added_tokens_ends_in_the_same_bytes(stages):
    whole, directory = stages.train(max_steps=4, save_steps=2, beta=0.05, learning_rate=1e-2, model=MODEL)
    # The reference is the base with its initial rows.
    assert journal(directory)[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert journal(directory)[-1]["kl"] > 0
    shutil.rmtree(directory.checkpoints / "step-000004")
    directory.result.unlink()
    spec = StageSpec.load(directory.spec)
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
        again = stages.trainer(directory, suite).train()
    assert (again.resumed, again.sha256) == (1, whole.sha256)


def test_a_second_stage_continues_the_rows_and_measures_the_kl_from_its_start(train):
    first, directory = train("first", learning_rate=1e-2, model=MODEL)
    _, near = train("near", start=first.model, beta=0.1, reference="stage_start", model=MODEL)
    _, far = train("far", start=first.model, beta=0.1, reference="base", model=MODEL)
    assert journal(near)[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert journal(near)[-1]["kl"] > 0
    assert journal(far)[0]["kl"] > 1e-3
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    start, end = (load_file(each.final / "adapter_model.safetensors")[name] for each in (directory, near))
    assert not torch.equal(start, end)


def test_full_fine_tuning_trains_the_rows_and_saves_the_tokenizer(train):
    settings = {"model": MODEL | {"lora": None}, "max_steps": 1}
    first, directory = train("first", **settings)
    second, _ = train("second", start=first.model, **settings)
    tokenizer, config = load_tokenizer(second.model), StageSpec.load(directory.spec).model
    one, other = (load_policy(each.model, config, device=CPU).get_input_embeddings().weight for each in (first, second))
    assert len(one) == len(tokenizer) == tokenizer.convert_tokens_to_ids("<search>") + 1
    assert not torch.equal(one, other)


def test_a_truncated_or_penalised_stage_reports_no_mismatch(train):
    rollout = {"min_p": 0.05, "repetition_penalty": 1.2, "top_p": 0.9}
    _, directory = train(rollout=rollout, max_sampling_logp_difference=0.01, skip_dead_groups=False)
    name = "sampling/sampling_logp_difference/max"
    differences = [line[name] for line in journal(directory) if name in line]
    assert differences
    assert max(differences) < 1e-4
