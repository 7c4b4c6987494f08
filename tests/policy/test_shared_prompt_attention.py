"""Attention through one copy of the prompt against the ordinary kind, for several architectures with random weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.shared_prompt_attention import PromptGroups, TrainedPrompt, UnsupportedError
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
}


def model_of(config):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(0, 300, (length,), generator=generator).tolist()

    prompts, lengths = [ids(length) for length in (13, 9, 21)], (5, 9, 1, 7, 12, 3)
    return token_batch(prompts, [ids(length) for length in lengths], [0, 2, 0, 1, 2, 2], device=torch.device("cpu"))


def scores(model, batch, layout):
    model.zero_grad()
    found = completion_logprobs(model, batch, temperature=0.9, layout=layout)
    found.logps.square().sum().backward()
    return found.logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("layout", ["merged", "repeated"])
@pytest.mark.parametrize("name", FULL)
def test_shared_layouts_equal_the_plain_one_in_value_and_gradient(name, layout, batch):
    model = model_of(FULL[name])
    wanted, wanted_gradient = scores(model, batch, "plain")
    found, gradient = scores(model, batch, layout)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-5 * wanted_gradient.abs().max().item())


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_windows_are_refused_by_name_and_done_right_by_the_repeated_cache(name, batch):
    model = model_of(SLIDING[name])
    with pytest.raises(UnsupportedError, match="sliding_window"):
        scores(model, batch, "merged")
    assert model.config._attn_implementation == "sdpa"
    wanted, _ = scores(model, batch, "plain")
    found, _ = scores(model, batch, "repeated")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def sampled(model, tokenizer, **switches):
    engine = LocalEngine(model, tokenizer, **switches)
    sampling = Sampling.of(RolloutConfig(max_completion_length=24))
    prompts = [list(range(5, 17)), list(range(40, 49)), list(range(100, 121))]
    # Token 7 ends a completion, so that rows and whole groups leave at different times.
    engine._end_ids = frozenset({7, 11, 13, 17, 19, 23, 29, 31})
    requests = [Request(prompts[index // 4], seed=index) for index in range(12)]
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


@pytest.mark.parametrize("name", SLIDING)
def test_decoding_falls_back_with_a_warning_where_attention_is_of_another_kind(name, tokenizer):
    wanted = sampled(model_of(SLIDING[name]), tokenizer, share_prompts=False)[1]
    with pytest.warns(UserWarning, match="its own copy of its prompt"):
        found = sampled(model_of(SLIDING[name]).requires_grad_(False), tokenizer)[1]
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in wanted]


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


@pytest.mark.parametrize("masked", [False, True])
def test_merged_attention_equals_one_softmax_over_prompt_and_own_tokens(masked):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    prompt_of, (rows, heads, shared, length, size, depth) = torch.tensor([2, 0, 1, 2, 0, 2]), (6, 4, 2, 5, 9, 32)
    query, key, value = (
        normal(rows, heads, length, depth),
        normal(rows, shared, length, depth),
        normal(rows, shared, length, depth),
    )
    prompt_key, prompt_value = normal(3, shared, size, depth), normal(3, shared, size, depth)
    mask = torch.ones(3, size, dtype=torch.bool)
    if masked:
        mask[0, 4:], mask[2, 7:] = False, False
    merged = TrainedPrompt([prompt_key], [prompt_value], mask, PromptGroups(prompt_of, 3)).attend(
        0, query, key, value, depth**-0.5
    )
    keys = torch.cat([prompt_key[prompt_of], key], dim=2).repeat_interleave(2, 1)
    values = torch.cat([prompt_value[prompt_of], value], dim=2).repeat_interleave(2, 1)
    seen = mask[prompt_of][:, None, None].expand(rows, 1, length, size)
    causal = torch.ones(length, length).tril().bool().expand(rows, 1, length, length)
    whole = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=torch.cat([seen, causal], dim=-1))
    torch.testing.assert_close(merged, whole)
    upstream, inputs = torch.randn_like(whole), [query, key, value, prompt_key, prompt_value]
    for found, wanted in zip(
        torch.autograd.grad((merged * upstream).sum(), inputs), torch.autograd.grad((whole * upstream).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found, wanted)
