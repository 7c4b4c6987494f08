"""A stage that learns to emit a token that its model did not have, and to stop there."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.merge import merge
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.rollout import RolloutConfig
from schemas.results.model import MergeSpec
from tests.grpo.conftest import SYSTEM, journal

CPU = torch.device("cpu")
MODEL = {"added_tokens": [{"token": "<search>", "special": True}], "merged_dtype": "float32"}
REWARD = """
def searches(prompts, completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 - 0.01 * len(text) if text.endswith("<search>") else 0.0 for text in texts]
"""
SETTINGS = {
    "model": MODEL,
    "rewards": {"functions": {"searches": {"function": "searching:searches"}}},
    "stage_rewards": ["searches"],
    # At a high temperature the new token comes up now and then, which is all that learning needs.
    "rollout": {"stop": ["<search>"], "temperature": 4.0},
    "length": 16,
    "num_generations": 16,
    "per_device_train_batch_size": 64,
    "learning_rate": 1e-2,
}


@pytest.fixture(autouse=True)
def reward(tmp_path, monkeypatch):
    (tmp_path / "searching.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)


def asked(model, tokenizer):
    """The greedy completion of a question of the data."""
    ids = prompt_ids(tokenizer, [SYSTEM, {"role": "user", "content": "What is 15 + 27?"}])
    sampling = Sampling.of(RolloutConfig(stop=["<search>"], max_completion_length=24), temperature=0.0)
    return LocalEngine(model, tokenizer).generate([Request(ids, 0)], sampling)[0]


def test_a_model_learns_to_emit_an_added_token_and_stops_there(train, base_ref, tmp_path):
    result, directory = train(max_steps=30, **SETTINGS)
    spec = StageSpec.load(directory.spec)
    tokenizer = load_tokenizer(base_ref, spec.model)
    before = asked(load_policy(base_ref, spec.model, device=CPU, token_seed=spec.seed), tokenizer)
    assert "<search>" not in before.text
    policy = load_policy(result.model, spec.model, device=CPU)
    after = asked(policy, tokenizer)
    assert after.text.endswith("<search>")
    assert (after.finish_reason, after.token_ids[-1]) == ("stop", tokenizer.convert_tokens_to_ids("<search>"))
    rewards = [line["reward"] for line in journal(directory)]
    assert sum(rewards[-5:]) > 5 * 0.6 > sum(rewards[:5])
    # The sampler and the trainer agree about the new token too.
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-3 for line in journal(directory))
    # Merged it is the same policy, and the folder alone has the token and emits it.
    chats = [[SYSTEM, {"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 31)]
    merge(MergeSpec(model=spec.model, ref=result.model, prompts=chats, max_new_tokens=8), tmp_path / "merged", device=CPU)
    folder = tmp_path / "merged" / "model"
    merged, reloaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert asked(merged, reloaded).token_ids == after.token_ids


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
    _, directory = train(rollout=rollout, max_sampling_logp_difference=0.01)
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in journal(directory))
