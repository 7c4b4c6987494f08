import copy

import pytest
import torch
from torch import nn

from grpo_tasks.policy.folded_adapter import FoldedPolicy, LowRankLinear
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig


def base_weights(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters() if "lora_" not in name}


def test_the_copy_answers_like_the_policy_and_shares_what_has_no_adapter(policy):
    ids = torch.randint(0, 300, (3, 20))
    folded = FoldedPolicy(policy)
    before = folded.model(ids).logits
    torch.testing.assert_close(before, policy.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    embedding = policy.get_base_model().get_input_embeddings().weight
    assert folded.model.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
    with torch.no_grad():
        next(p for name, p in policy.named_parameters() if "lora_B" in name).add_(1.0)
    # Not synced yet.
    assert torch.equal(folded.model(ids).logits, before)


def test_twenty_syncs_leave_the_base_byte_identical(policy):
    before = base_weights(policy)
    folded = FoldedPolicy(policy)
    torch.manual_seed(0)
    for _ in range(20):
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        folded.sync()
    after = base_weights(policy)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    ids = torch.randint(0, 300, (2, 8))
    torch.testing.assert_close(folded.model(ids).logits, policy.eval()(ids).logits, rtol=1e-3, atol=1e-3)


def updated(base_ref, dtype, updates):
    """A policy whose adapter has moved as far as Adam moves it: by about the learning rate (1e-5) per update and entry."""
    model = trainable_policy(base_ref, ModelConfig(dtype=dtype), device=torch.device("cpu"), seed=1).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator).sign() * 1e-5 * updates)
    return model


def logps(model, ids):
    logits = model(ids).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize(("updates", "factor"), [(1, 100), (10, 100), (100, 30)])
@torch.no_grad()
def test_a_small_update_reaches_a_16_bit_sampler(base_ref, updates, factor):
    ids = torch.randint(5, 300, (4, 48), generator=torch.Generator().manual_seed(1))
    learner, base = (logps(updated(base_ref, "float32", moved), ids) for moved in (updates, 0))
    half = updated(base_ref, "bfloat16", updates)
    difference = {}
    for fold in (False, True):
        # In float32 the weights alone decide; in 16 bits the rounding of activations would hide them.
        sampler = copy.deepcopy(FoldedPolicy(half, fold=fold).model).float()
        difference[fold] = (logps(sampler, ids) - learner).abs().mean()
    assert difference[False] * factor < difference[True]
    # The question of the merge proof: at least 95 % of what the policy changed is in the copy.
    assert difference[False] < 0.05 * (base - learner).abs().mean()


@torch.no_grad()
def test_a_16_bit_base_is_shared_and_a_float32_copy_is_plain(base_ref, policy):
    half = updated(base_ref, "bfloat16", 10)
    twin = FoldedPolicy(half).model
    apart = [module for module in twin.modules() if isinstance(module, LowRankLinear)]
    shared = {parameter.data_ptr() for parameter in half.parameters()}
    assert apart
    assert all(module.weight.data_ptr() in shared for module in apart)
    for plain in (FoldedPolicy(half, fold=True).model, FoldedPolicy(policy).model):
        assert not any(isinstance(module, LowRankLinear) for module in plain.modules())
        assert {type(module) for name, module in plain.named_modules() if name.endswith("_proj")} == {nn.Linear}


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]], ids=str)
def test_a_fused_step_follows_an_adapter_that_stays_apart(base_ref, tokenizer, prompts, targets):
    config = ModelConfig(dtype="bfloat16", lora={"target_modules": targets})
    half = trainable_policy(base_ref, config, device=torch.device("cpu"), seed=1).eval()
    engines = [LocalEngine(half, tokenizer, fuse_kernels=fuse) for fuse in (True, False)]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
    first = [engine.generate(requests, Sampling.of(RolloutConfig(max_completion_length=8))) for engine in engines]
    assert engines[0]._fused is not None
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in half.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    for engine in engines:
        engine.sync()
    drawn = [engine.generate(requests, Sampling.of(RolloutConfig(max_completion_length=8))) for engine in engines]
    assert [c.token_ids for c in drawn[0]] != [c.token_ids for c in first[0]]
    # Of the first token, because 16-bit rounding lets later ones differ.
    fused, plain = (torch.tensor([completion.logprobs[0] for completion in found]) for found in drawn)
    same = torch.tensor([one.token_ids[0] == other.token_ids[0] for one, other in zip(*drawn, strict=True)])
    assert same.sum() >= len(requests) - 1
    torch.testing.assert_close(fused[same], plain[same], rtol=0, atol=0.2)
