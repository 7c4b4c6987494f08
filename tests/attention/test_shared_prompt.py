"""Attention through one copy of the prompt against the ordinary kind, for several architectures with random weights."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.rollout import RolloutConfig

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
FULL = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "llama-bias": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
}
SLIDING = {
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=8),
    "mistral-sliding": MistralConfig(**SMALL, sliding_window=8),
    # The window of these is in their mask alone.
    "qwen2moe": Qwen2MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, use_sliding_window=True, sliding_window=8),
    "phimoe": PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=8),
}
OTHER = {name: (config, "sdpa") for name, config in SLIDING.items()} | {
    "lfm2": (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, eos_token_id=1), "sdpa"),
    # Soft caps, which torch's kernels leave out; so the trainer loads it with eager attention.
    "gemma2": (Gemma2Config(**SMALL, head_dim=32, sliding_window=8, attn_logit_softcapping=2.0), "eager"),
}
"""Each with the attention that the trainer loads it with."""


PROMPTS = [list(range(5, 17)), list(range(40, 49)), list(range(100, 121))]


def model_of(config):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def sampled(model, tokenizer, **switches):
    engine = LocalEngine(model, tokenizer, **switches)
    sampling = Sampling.of(RolloutConfig(max_completion_length=24))
    # Token 7 ends a completion, so that rows and whole groups leave at different times.
    engine._end_ids = frozenset({7, 11, 13, 17, 19, 23, 29, 31})
    requests = [Request(PROMPTS[index // 4], seed=index) for index in range(12)]
    return engine, engine.generate(requests, sampling)


@pytest.mark.parametrize("name", FULL)
def test_every_way_of_decoding_draws_the_same_completions(name, tokenizer):
    wanted = sampled(model_of(FULL[name]), tokenizer, share_prompts=False)[1]
    assert len({len(completion.token_ids) for completion in wanted}) > 1
    for switches in ({"fuse_kernels": False}, {"fuse_kernels": True}):
        model = model_of(FULL[name]).requires_grad_(False)
        engine, found = sampled(model, tokenizer, **switches)
        assert [completion.token_ids for completion in found] == [completion.token_ids for completion in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        fused = switches["fuse_kernels"] and name != "llama-bias"
        assert (engine._fused is not None) == fused


def assert_as_single_rows(model, drawn):
    for index, completion in enumerate(drawn):
        prompt = PROMPTS[index // 4]
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", OTHER)
def test_a_copy_of_the_prompt_for_each_row_serves_every_architecture(name, share, tokenizer):
    config, attention = OTHER[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    # Sampling changes a model's attention.
    untouched = copy.deepcopy(model)
    falls_back = share and name == "gemma2"
    with pytest.warns(UserWarning, match="its own copy of its prompt") if falls_back else nullcontext():
        drawn = sampled(model.requires_grad_(False), tokenizer, share_prompts=share)[1]
    assert len({len(completion.token_ids) for completion in drawn}) > 1
    assert_as_single_rows(untouched, drawn)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", SLIDING)
def test_decoding_through_a_sliding_window_equals_single_rows_without_padding(name, fuse, tokenizer, recwarn):
    model = model_of(SLIDING[name]).requires_grad_(False)
    engine, drawn = sampled(model, tokenizer, fuse_kernels=fuse)
    assert not [warning for warning in recwarn if "its own copy" in str(warning.message)]
    assert (engine._fused is not None) == (fuse and name == "mistral-sliding")
    assert_as_single_rows(model, drawn)


def test_a_model_in_training_is_never_rewritten(policy, tokenizer):
    full = policy.unload().requires_grad_(True)
    before = {name: parameter.data_ptr() for name, parameter in full.named_parameters()}
    engine, _ = sampled(full, tokenizer)
    assert engine._fused is None
    assert {name: parameter.data_ptr() for name, parameter in full.named_parameters()} == before


def test_new_weights_reach_the_fused_step(policy, tokenizer):
    engine, first = sampled(policy, tokenizer)
    assert engine._fused is not None
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.5)
    engine.sync()
    requests = [Request(list(range(5, 17)), seed=index) for index in range(4)]
    sampling = Sampling.of(RolloutConfig(max_completion_length=24))
    found = engine.generate(requests, sampling)
    slow = LocalEngine(policy, tokenizer, share_prompts=False, fold_adapter=False)
    slow._end_ids = engine._end_ids
    wanted = slow.generate(requests, sampling)
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in wanted]
    assert [completion.token_ids for completion in found] != [completion.token_ids for completion in first[:4]]
