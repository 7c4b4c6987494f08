"""Decoding in buckets: what a step runs does not change within a bucket, and buckets change no completion."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpo_tasks.planning.live_memory import LiveMemory
from grpo_tasks.rollout import fused_decoder
from grpo_tasks.rollout.decoding_cache import DecodingCache
from grpo_tasks.rollout.decoding_loop import Buckets
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.rollout import RolloutConfig
from tests.benchmarks.count_decode import GPU, Operations, Reads, decode_counts, each_step
from tests.benchmarks.tapes import Tapes

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
MODELS = {
    "qwen2": Qwen2Config(**SMALL),
    "mistral-sliding": MistralConfig(**SMALL, sliding_window=8),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=8),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
# Beyond that many tokens the angles of a whole row change, which is refused (policy/structure.py).
ONE_ANGLE = YARN | {"original_max_position_embeddings": 128}
LONG = ONE_ANGLE | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ROTATED = {
    **MODELS,
    "llama": LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-dynamic": LlamaConfig(**SMALL, rope_parameters=ONE_ANGLE | {"rope_type": "dynamic"}),
    "llama-longrope": LlamaConfig(**SMALL, rope_parameters=LONG),
    "qwen3": Qwen3Config(**SMALL, head_dim=24),
}
FUSED = {"qwen2", "mistral-sliding", "llama", "llama-yarn", "qwen3"}
ENDS = frozenset(range(7, 40, 4))
PROMPTS = [list(range(5, 17)), list(range(40, 49)), list(range(100, 121)), list(range(60, 64))]
REQUESTS = [Request(PROMPTS[index // 8], seed=index) for index in range(32)]


def engine_of(model, tokenizer, buckets, **options):
    torch.manual_seed(1)
    config = ROTATED[model]
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    engine = LocalEngine(plain.requires_grad_(False), tokenizer, **options)
    engine._end_ids, engine._buckets = ENDS, buckets
    return engine


def sampling(**settings):
    return Sampling.of(RolloutConfig(**{"max_completion_length": 60, **settings}))


def addresses(loop):
    """Of all tensors that a step reads or writes and that outlive it."""
    cache = loop.state.cache
    kept = [*cache._keys, *cache._values, *cache._own, cache._fold, cache._unfold]
    kept += [loop.tokens, loop.column, loop.uniform, loop.record, *([] if loop.seen is None else [loop.seen])]
    return [tensor.data_ptr() for tensor in kept]


@pytest.mark.parametrize("broken", [False, True])
def test_deterministic_algorithms_are_off_while_tokens_are_sampled_and_on_again_afterwards(broken, tokenizer):
    engine, found = engine_of("qwen2", tokenizer, GPU), []

    def before(_):
        found.append(torch.are_deterministic_algorithms_enabled())
        if broken:
            raise RuntimeError("broken")

    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with each_step(before, lambda _: None), pytest.raises(RuntimeError, match="broken") if broken else nullcontext():
            engine.generate(REQUESTS[:2], sampling())
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
    assert found
    assert not any(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [("qwen2", {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}), *((model, {}) for model in MODELS)],
    ids=str,
)
def test_steps_of_a_bucket_repeat_operations_shapes_and_addresses(model, settings, tokenizer):
    engine = engine_of(model, tokenizer, Buckets(check_every=4, ahead=1, fewest_rows=1, first_columns=16))
    steps = []
    with Operations() as operations, Reads() as reads:

        def before(loop):
            operations.found.clear()
            steps.append([(len(loop.tokens), loop.state.cache._columns.shape[0]), addresses(loop), reads.count])

        def after(loop):
            assert reads.count == steps[-1][2]  # nothing in a step waits for the device
            assert addresses(loop) == steps[-1][1]
            steps[-1].append(list(operations.found))

        with each_step(before, after):
            engine.generate(REQUESTS, sampling(**settings))
    buckets = [bucket for bucket, *_ in steps]
    assert len(set(buckets)) > 4
    same = 0
    for (bucket, places, _, found), (next_bucket, next_places, _, next_found) in pairwise(steps):
        if bucket == next_bucket:
            assert found == next_found
            assert places == next_places
            same += 1
    assert same > len(steps) / 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ROTATED)
def test_steps_in_which_the_host_waits_are_not_captured(model, tokenizer):
    engine, found = engine_of(model, tokenizer, GPU, fuse_kernels=False), set()
    with Reads() as reads:

        def before(_):
            reads.count = 0

        def after(loop):
            found.add((loop.state.static, reads.count == 0))

        with each_step(before, after):
            engine.generate(REQUESTS[:2], sampling(max_completion_length=4))
    captured = model not in ("llama-dynamic", "llama-longrope")
    assert found == {(captured, captured)}


def test_a_cache_grows_and_shrinks_layer_by_layer():
    def contexts():
        return [torch.zeros(2, 2, 4, 16, device="meta") for _ in range(10)]

    with LiveMemory() as memory:
        cache = DecodingCache(contexts(), contexts(), [4, 3], [0, 0, 1, 1])
        cache.make_room(64)
        memory.peak = memory.now
        cache.make_room(96)
        assert memory.peak < 1.1 * memory.now
        full = memory.now
        cache.keep_rows([0, 1, 2], 0)
        assert memory.peak < 1.1 * full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen2", {}),
        ("mistral-sliding", {"temperature": 0.7, "top_p": 0.9}),
        ("qwen2", {"repetition_penalty": 1.2}),
        ("gemma3", {"stop": ["7", "is"], "max_completion_length": 45}),
    ],
    ids=str,
)
def test_the_buckets_of_a_gpu_give_the_completions_of_a_cpu(model, settings, tokenizer):
    drawn = {}
    for buckets in (Buckets.of(torch.device("cpu")), replace(GPU, first_columns=16)):
        drawn[buckets] = engine_of(model, tokenizer, buckets).generate(REQUESTS, sampling(**settings))
    wanted, found = drawn.values()
    assert len({len(completion.token_ids) for completion in wanted}) > 3
    assert [(c.token_ids, c.text, c.finish_reason) for c in found] == [(c.token_ids, c.text, c.finish_reason) for c in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.policy_logprobs == pytest.approx(other.policy_logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("large", [1, 2**18], ids=["weights first", "rows first"])
@pytest.mark.parametrize("model", ROTATED)
def test_a_fused_step_draws_what_the_models_own_step_draws(model, large, temperature, tokenizer, monkeypatch):
    monkeypatch.setattr(fused_decoder, "LARGE", large)
    drawn = []
    for options in ({"fuse_kernels": False}, {}):
        engine = engine_of(model, tokenizer, GPU, **options)
        drawn.append(engine.generate(REQUESTS, replace(sampling(), temperature=temperature)))
        assert (engine._fused is not None) == (bool(not options) and model in FUSED)
        assert engine._fused is None or engine._fused._transposed == (large == 1)
    for wanted, found in zip(*drawn, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_shapes_on_a_card_change_only_where_it_pays():
    assert [GPU.rows(alive) for alive in (1, 63, 64, 65, 256, 257)] == [64, 64, 64, 256, 256, 1024]
    assert [GPU.columns(needed, 1000) for needed in (1, 512, 513, 769)] == [512, 512, 768, 1000]
    assert GPU.columns(1, 100) == 100
    every = Buckets.of(torch.device("cpu"))
    assert [every.rows(alive) for alive in (1, 3, 65)] == [1, 3, 65]


@pytest.mark.long
@pytest.mark.ci
def test_a_step_needs_few_kernels_and_syncs_a_stage_one_capture():
    counts = decode_counts()
    assert counts["kernels_per_decode_step"] <= 500
    assert counts["kernels_per_decode_step_adapter"] <= 650
    assert counts["host_syncs_per_decode_step"] <= 0.15
    assert (counts["captures_of_the_first_rollout"], counts["captures_of_a_later_rollout"]) == (1, 0)
    assert counts["passes_per_token"] <= 3
    assert 2**29 < counts["kept_bytes"] < 1100 * 2**20


@pytest.mark.slow
def test_a_cpu_multiplies_all_matrices_of_a_batch_at_once(policy, tokenizer, prompts):
    engine = LocalEngine(policy, tokenizer)
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts) for _ in range(4)]
    sampling = Sampling.of(RolloutConfig(max_completion_length=8))
    engine.generate(requests, sampling)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.generate(requests, sampling)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::bmm"] >= 8
    # torch picks every matrix by itself where the result has gaps: thousands of calls.
    assert calls.get("aten::select", 0) < len(requests) * calls["aten::bmm"]


def test_the_device_has_steps_to_run_while_the_host_reads(tokenizer):
    engine, steps, launched = engine_of("qwen2", tokenizer, GPU), [0], []
    engine._end_ids = frozenset()

    class AtReads(Reads):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "tolist" and steps[0]:
                launched.append(steps[0])
            return super().__torch_function__(func, types, args, kwargs)

    def count(_):
        steps[0] += 1

    with each_step(count, lambda _: None), AtReads():
        engine.generate(REQUESTS[:4], sampling(max_completion_length=28))
    # The tokens of 8, 16, 24 and 28 steps are read; nothing is launched beyond the limit.
    assert launched == [10, 18, 26, 28]


@pytest.mark.parametrize("captured", [False, True])
def test_a_batchs_keys_and_values_go_with_it(captured, policy, tokenizer, monkeypatch):
    caches = []
    made = DecodingCache.__init__

    def record(cache, *arguments, **keywords):
        made(cache, *arguments, **keywords)
        caches.append(weakref.ref(cache))

    monkeypatch.setattr(DecodingCache, "__init__", record)
    tapes = Tapes() if captured else None
    gc.disable()
    try:
        LocalEngine(policy, tokenizer, capture=tapes).generate(REQUESTS, sampling(max_completion_length=8))
        assert caches
        assert [cache() for cache in caches] == [None] * len(caches)
    finally:
        gc.enable()
    assert not captured or tapes.count


def test_a_request_may_have_a_limit_of_its_own(policy, tokenizer, prompts):
    engine = LocalEngine(policy, tokenizer)
    limits = [3, None, 9, 1]
    sampling = Sampling.of(RolloutConfig(max_completion_length=20))
    free = engine.generate([Request(ids, 5) for ids in prompts], sampling)
    drawn = engine.generate([Request(ids, 5, limit) for ids, limit in zip(prompts, limits, strict=True)], sampling)
    for short, full, limit in zip(drawn, free, limits, strict=True):
        assert short.token_ids == full.token_ids[:limit]
        assert short.finish_reason == ("length" if limit and limit < len(full.token_ids) else full.finish_reason)
