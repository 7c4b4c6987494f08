"""Trainer and sampler are held against the model's own forward pass, which also decides whether a stage packs its rows."""

import copy
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
    NemotronConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    StableLmConfig,
    VaultGemmaConfig,
)

from grpo_tasks.attention.packed_attention import PackedAttention
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy import folded_adapter, recurrent_layers, sharded
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.forward_check import CheckRows, ForwardScores, Leeway, shaken_adapter, true_scores
from grpo_tasks.policy.load import new_policy
from grpo_tasks.policy.logprobs import OwnHead
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ModelError, Notice
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.attention.test_packed_attention import SMALL, model_of
from tests.grpo.conftest import events, journal
from tests.grpo.test_pretend_card import LETTERS, WATCHED

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


def test_a_16_bit_adapter_check_sees_a_flat_policy():
    policy = adapted(SCALED)
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(0.1)
    policy.to(torch.bfloat16)
    rows = CheckRows.of(policy.get_base_model())
    base = true_scores(policy, rows)
    with shaken_adapter(policy, rows, "bfloat16") as leeway:
        moved = true_scores(policy, rows)
    # A copy without the adapter is as far off as the adapter moves the policy: less than what rounding may do elsewhere.
    assert moved.difference(base) == leeway.shift < 0.05
    assert Leeway.of("bfloat16", shift=0.0, rounding=0.0).fault(leeway.shift) is None
    assert leeway.fault(leeway.shift) is not None
    assert true_scores(policy, rows).difference(base) == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("sharpness", [1.0, 40.0])
@pytest.mark.parametrize("layers", [2, pytest.param(28, marks=pytest.mark.slow)])
def test_rounding_is_no_fault_and_a_missing_adapter_is_one(layers, sharpness, temperature):
    """A deep policy with random weights was refused on an H100, and SmolLM2 in bfloat16 by chance on a CPU."""
    config = Qwen2Config(
        **SMALL | {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 4000}
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        base.get_output_embeddings().weight.mul_(sharpness)
    policy = new_policy(base.requires_grad_(False), ModelConfig(dtype="bfloat16")).eval()
    rows = CheckRows.of(policy)

    def in_another_order():
        # sdpa instead of eager attention.
        logits = [
            policy(input_ids=torch.tensor([rows.prompts[prompt] + completion])).logits[0, -len(completion) - 1 : -1]
            for prompt, completion in zip(rows.prompt_of, rows.completions, strict=True)
        ]
        return ForwardScores.of_logits([each / temperature for each in logits], rows.completions)

    with shaken_adapter(policy, rows, "bfloat16", temperature=temperature) as leeway, torch.no_grad():
        truth = true_scores(policy, rows, temperature=temperature)
        with policy.disable_adapter():
            missing, without = in_another_order(), true_scores(policy, rows, temperature=temperature)
        rounding = in_another_order().difference(truth)
    assert leeway.fault(rounding) is None
    assert leeway.fault(missing.difference(without)) is None
    assert leeway.fault(missing.difference(truth)) is not None


CPU = torch.device("cpu")
SIZES = SMALL | {"vocab_size": 328, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
MODELS = {
    # A short convolution reads the tokens before it, whatever the attention says.
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    # Scores are capped, which torch's kernels do not do.
    "gemma2": Gemma2Config(**SIZES, head_dim=32, sliding_window=16, attn_logit_softcapping=2.0),
}
ENCODED_AGAIN = "each prompt is encoded once for every completion"
ONE = token_batch([[5, 6, 7]], [[8, 9, 10, 11]], [0], device=CPU)
"""A microbatch of one completion, whose packed row is an ordinary sequence."""


@pytest.fixture
def settings(tmp_path):
    """The settings of a stage that trains a random model of that architecture."""

    def save(name):
        folder = tmp_path / name
        model_of(MODELS[name]).save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolve("embedded:base")).save_pretrained(folder)
        return {
            "model": {"path": str(folder)},
            "start": ModelRef(path=str(folder)),
            "stage_rewards": [*LETTERS],
            "rewards": {"functions": LETTERS},
            "length": 10,
            "max_steps": 2,
            "beta": 0.04,
            "num_iterations": 2,
        }

    return save


@pytest.mark.slow
def test_a_stage_that_cannot_share_prompts_says_so_and_trains_without(stages, settings):
    given = settings("gemma2")
    with pytest.warns(UserWarning, match=ENCODED_AGAIN), pytest.warns(UserWarning, match="its own copy of its prompt"):
        _, found = stages.train("found", **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, wanted = stages.train("wanted", **given, resources={"share_prompts": False})
    lines = journal(found)
    assert [{key: line.get(key) for key in WATCHED} for line in lines] == [
        {key: line.get(key) for key in WATCHED} for line in journal(wanted)
    ]
    assert any(line["grad_norm"] > 0 for line in lines)
    # The sampler computes what the trainer computes, soft caps included.
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in lines[:1])


def policies_of(stages, model, accelerator, **config):
    spec = StageSpec.load(stages.write(model=config).spec)
    return Policies(new_policy(model, spec.model), spec, Ranks(accelerator))


@pytest.mark.slow
def test_a_stage_of_a_hybrid_shares_prompts_and_says_by_which_kernels(stages, settings):
    given = settings("lfm2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = stages.train("found", **given)
        _, wanted = stages.train("wanted", **given, resources={"share_prompts": False})
    for line, plain in zip(journal(found), journal(wanted), strict=True):
        assert {key: line.get(key) for key in WATCHED} == pytest.approx(
            {key: plain.get(key) for key in WATCHED}, rel=1e-3, abs=1e-6
        )
    assert any(line["grad_norm"] > 0 for line in journal(found))
    assert ["causal_conv1d_fn" in event["detail"] for event in events(found) if event["event"] == "recurrent_kernels"] == [True]


def test_one_completion_is_enough_to_find_a_leak_to_the_next(stages, monkeypatch):
    # A layer that is not known to have a state.
    monkeypatch.setattr(recurrent_layers, "_is_mixer", lambda _: False)
    policies = policies_of(stages, model_of(MODELS["lfm2"]), Accelerator(cpu=True), lora=None)
    with pytest.warns(UserWarning, match=f"{ENCODED_AGAIN}.*off by"):
        policies.scores(ONE)
    assert (policies.layout, policies.pads) == ("plain", True)


def test_layers_with_a_state_pad_although_prompts_are_shared(stages):
    policies = policies_of(stages, model_of(MODELS["lfm2"]), Accelerator(cpu=True), lora=None)
    assert (policies.layout, policies.pads) == ("packed", True)


def test_the_check_reaches_beyond_the_window_of_the_attention(stages, monkeypatch):
    # Its window is in its mask, which a packed row does without. The attention reads it from the config; here it is lost.
    attend = PackedAttention.attend
    monkeypatch.setattr(PackedAttention, "attend", lambda self, *tensors_and_window: attend(self, *tensors_and_window[:-1], None))
    config = Qwen2MoeConfig(
        **SMALL, sliding_window=8, use_sliding_window=True, max_window_layers=2, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    model = model_of(config)
    assert max(map(len, CheckRows.of(model).completions)) > 8
    policies = policies_of(stages, model, Accelerator(cpu=True), lora=None)
    with pytest.warns(UserWarning, match=f"{ENCODED_AGAIN}.*off by"):
        policies.scores(ONE)


@pytest.fixture
def half_precision():
    """An accelerator that computes in bfloat16 over float32 weights, as full fine-tuning does on a GPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("error")
def test_all_weights_are_trained_in_the_packed_layout_under_autocast(stages, half_precision):
    policies = policies_of(stages, model_of(Qwen2Config(**SMALL)), half_precision, lora=None, dtype="bfloat16")
    scores = policies.scores(ONE)
    assert (policies.layout, policies.pads) == ("packed", False)
    scores.logps.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in policies.model.parameters())
