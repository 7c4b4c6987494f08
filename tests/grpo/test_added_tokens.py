"""Stages that train the rows of tokens that their model did not have."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.results.model import MergeSpec
from tests.grpo.conftest import SYSTEM, journal

CPU = torch.device("cpu")
MODEL = {"added_tokens": [{"token": "<search>", "special": True}], "merged_dtype": "float32"}


REWARD = """
def searches(prompts, completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.endswith("<search>")) for text in texts]
"""
LEARNING = {
    "rewards": {"functions": {"searches": {"function": "searching:searches"}}},
    "stage_rewards": ["searches"],
    "length": 24,
    "num_generations": 16,
    "per_device_train_batch_size": 64,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 20,
}


def asked(model, tokenizer, spec):
    """The greedy completion of a question of the data."""
    ids = prompt_ids(tokenizer, [SYSTEM, {"role": "user", "content": "What is 15 + 27?"}])
    sampling = Sampling.of(spec.rollout, temperature=0.0)
    return LocalEngine(model, tokenizer).generate([Request(ids, 0)], sampling)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_model_learns_to_emit_an_added_token_and_to_stop_there(train, base_ref, tmp_path, monkeypatch, name):
    (tmp_path / "searching.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    # As likely as a digit at first: it comes up now and then, which is all that learning needs. A special token is part of the
    # text where a stop string names it.
    token = {"token": "<search>", "special": name == "stop", "like": "7"}
    model = {"added_tokens": [token], "merged_dtype": "float32"}
    result, directory = train(model=model, rollout={name: ["<search>"]}, **LEARNING)
    spec = StageSpec.load(directory.spec)
    tokenizer = load_tokenizer(base_ref, spec.model)
    before = asked(load_policy(base_ref, spec.model, device=CPU, token_seed=spec.seed), tokenizer, spec)
    assert "<search>" not in before.text
    after = asked(load_policy(result.model, spec.model, device=CPU), tokenizer, spec)
    assert after.text.endswith("<search>")
    assert (after.finish_reason, after.token_ids[-1]) == ("stop", tokenizer.convert_tokens_to_ids("<search>"))
    rewards = [line["reward"] for line in journal(directory)]
    assert rewards[0] < 0.5 < 0.9 < sum(rewards[-5:]) / 5
    # The sampler and the trainer agree about the new token too.
    difference = "sampling/sampling_logp_difference/max"
    assert max(line[difference] for line in journal(directory) if difference in line) < 1e-3
    # Merged it is the same policy, and the folder alone has the token and emits it.
    chats = [[SYSTEM, {"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 31)]
    merge(MergeSpec(model=spec.model, ref=result.model, prompts=chats, max_new_tokens=8), tmp_path / "merged", device=CPU)
    folder = tmp_path / "merged" / "model"
    merged, reloaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert asked(merged, reloaded, spec).token_ids == after.token_ids


@pytest.mark.slow
def test_a_resumed_stage_with_added_tokens_ends_in_the_same_bytes(stages):
    whole, directory = stages.train(max_steps=4, save_steps=2, beta=0.05, learning_rate=1e-2, model=MODEL)
    # The reference is the base with its initial rows.
    assert journal(directory)[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert journal(directory)[-1]["kl"] > 0
    shutil.rmtree(directory.checkpoints / "step-000004")
    directory.result.unlink()
    again = stages.resume(directory)
    assert (again.resumed, again.sha256) == (1, whole.sha256)


@pytest.mark.slow
def test_a_second_stage_continues_rows_and_measures_kl_from_start(train):
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
