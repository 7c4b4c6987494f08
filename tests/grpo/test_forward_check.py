"""Trainer and sampler are held against the model's own forward pass before the first update and the first completion."""

import copy
import warnings

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, GraniteConfig, NemotronConfig, Qwen2Config, StableLmConfig, VaultGemmaConfig

from grpo_tasks.grpo.policies import Policies
from grpo_tasks.policy import folded_adapter, sharded
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.forward_check import SEEN, CheckRows, ForwardScores, fault_of, shaken_adapter, true_scores
from grpo_tasks.policy.load import new_policy
from grpo_tasks.policy.logprobs import OwnHead
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ModelError, Notice
from tests.attention.test_packed_attention import SMALL, model_of
from tests.grpo.test_layout_check import policies_of

SCALED = GraniteConfig(**SMALL, logits_scaling=8.0)
CAPPED = VaultGemmaConfig(**SMALL, head_dim=16, final_logit_softcapping=2.0, layer_types=["full_attention"] * 2)
DEAF = {"nemotron": NemotronConfig(**SMALL), "stablelm": StableLmConfig(**SMALL)}
"""Their layers drop the keyword argument that names the prompt."""
GREEDY = Sampling.of(RolloutConfig(max_completion_length=12), temperature=0.0)
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46]]


def sharp(config):
    """A random model that prefers some tokens, as a trained one does."""
    model = model_of(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    return model


def adapted(config):
    return new_policy(sharp(config), ModelConfig()).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::schemas.errors.Notice")
@pytest.mark.parametrize("config", [SCALED, CAPPED], ids=["logit scale", "soft cap"])
def test_a_head_that_leaves_something_out_is_found_before_the_first_update(config, stages, monkeypatch):
    def bare(self, hidden):
        return self.rest["lm_head_"](hidden)

    batch = token_batch(PROMPTS, [[8, 9], [10, 11, 12]], [0, 1], device=torch.device("cpu"))
    policies = policies_of(stages, sharp(config), Accelerator(cpu=True))
    wanted = true_scores(policies.model, CheckRows(PROMPTS, [[8, 9], [10, 11, 12]], [0, 1]), temperature=policies.temperature)
    found = policies.scores(batch).logps[batch.completion_mask].detach()
    torch.testing.assert_close(found, torch.cat(wanted.logps), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(OwnHead, "forward", bare)
    name = type(sharp(config)).__name__
    with pytest.raises(ModelError, match=f"log-probabilities of {name}: off by .* nats"):
        Policies(adapted(config), policies.spec, policies.ranks).scores(batch)


@pytest.mark.filterwarnings("ignore::schemas.errors.Notice")
def test_noise_of_the_base_in_training_is_found_before_the_first_update(stages):
    policies = policies_of(stages, sharp(SCALED), Accelerator(cpu=True))
    batch = token_batch(PROMPTS, [[8, 9], [10, 11, 12]], [0, 1], device=torch.device("cpu"))
    policies.model.get_input_embeddings().register_forward_hook(
        lambda module, _, out: out * torch.randn_like(out) if module.training else out
    )
    # As BigBird's dropout, which is built in the first pass, and the sampled routes of PhiMoE.
    with pytest.raises(ModelError, match=r"log-probabilities of GraniteForCausalLM: off by .* nats"):
        policies.scores(batch)


@pytest.mark.parametrize("name", DEAF)
def test_a_model_blind_to_its_prompt_is_sampled_the_slow_way(name, tokenizer):
    model = sharp(DEAF[name]).requires_grad_(False)
    untouched = copy.deepcopy(model)
    requests = [Request(prompt, 0) for prompt in PROMPTS for _ in range(2)]
    with pytest.warns(Notice, match="sampled from in the slow way.* does not pass the prompt on"):
        drawn = LocalEngine(model, tokenizer).generate(requests, GREEDY)
    for request, completion in zip(requests, drawn, strict=True):
        ids = torch.tensor([request.prompt_ids])
        wanted = untouched.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
        assert completion.token_ids == wanted[0, len(request.prompt_ids) :].tolist()


def test_a_copy_without_the_adapter_is_refused_even_at_zero(tokenizer, monkeypatch):
    for module in (folded_adapter, sharded):
        monkeypatch.setattr(module, "folded_weight", lambda layer: layer.base_layer.weight.float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        with pytest.raises(ModelError, match="cannot sample from GraniteForCausalLM: off by"):
            LocalEngine(adapted(SCALED), tokenizer).generate([Request(PROMPTS[0], 0)], GREEDY)


def test_the_adapter_check_restores_weights_and_random_state(tokenizer):
    policy = adapted(SCALED).train()
    before = {name: (weight.clone(), weight.requires_grad) for name, weight in policy.named_parameters()}
    state = torch.get_rng_state()
    LocalEngine(policy, tokenizer).generate([Request(PROMPTS[0], 0)], GREEDY)
    assert policy.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, before[name][0]), name
        assert weight.requires_grad == before[name][1], name


def test_the_adapter_of_the_check_moves_the_policy_far():
    policy, rows = adapted(SCALED), CheckRows.of(sharp(SCALED))
    base = true_scores(policy, rows)
    with shaken_adapter(policy, rows, "float32") as shaken:
        assert shaken
        assert true_scores(policy, rows).difference(base) > 0.03
    assert true_scores(policy, rows).difference(base) == 0.0


def test_a_16_bit_adapter_check_sees_a_flat_policy():
    policy = adapted(SCALED)
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(0.1)
    policy.to(torch.bfloat16)
    rows = CheckRows.of(policy.get_base_model())
    base = true_scores(policy, rows)
    with shaken_adapter(policy, rows, "bfloat16") as shift:
        moved = true_scores(policy, rows)
    # A copy without the adapter is as far off as the adapter moves the policy: less than what rounding may do elsewhere.
    assert moved.difference(base) == shift < 0.05
    assert fault_of(shift, "bfloat16") is None
    assert fault_of(shift, "bfloat16", shift) is not None
    assert true_scores(policy, rows).difference(base) == 0.0


@pytest.mark.slow
def test_the_adapter_of_the_check_does_not_turn_rounding_into_noise():
    """A deep policy with random weights: on an H100 every way of scoring one was refused."""
    config = Qwen2Config(**SMALL | {"num_hidden_layers": 28, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 4000})
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    policy = new_policy(base.requires_grad_(False), ModelConfig(dtype="bfloat16")).eval()
    rows = CheckRows.of(policy)
    with shaken_adapter(policy, rows, "bfloat16") as shift, torch.no_grad():
        truth = true_scores(policy, rows)
        logits = [
            policy(input_ids=torch.tensor([rows.prompts[prompt] + completion])).logits[0, -len(completion) - 1 : -1]
            for prompt, completion in zip(rows.prompt_of, rows.completions, strict=True)
        ]
    # The same sums in another order: sdpa instead of eager attention.
    assert 0.0 < ForwardScores.of_logits(logits, rows.completions).difference(truth) < shift / (4 * SEEN)
