"""Which layers get an adapter: what `target_modules` cannot mean is refused, and base + adapter is one function everywhere."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from grpo_tasks.policy.adapter_targets import add_adapter, uncovered, unfit_layers
from grpo_tasks.policy.folded_adapter import FoldedPolicy
from grpo_tasks.policy.load import load_tokenizer, order_modules
from grpo_tasks.policy.structure import check_positions, check_structure, empty_model
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import LoraConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError
from schemas.results.model import ModelRef, StructureSpec

SIZES = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
SHARED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
MAMBA = {"vocab_size": 80, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0}
CONFIGS = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=1),
    "opt": OPTConfig(**(SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}), dropout=0.0),
    "gptj": GPTJConfig(vocab_size=80, n_embd=32, n_layer=1, n_head=4, n_positions=128, rotary_dim=4),
    "mamba": MambaConfig(**MAMBA),
    "jamba": JambaConfig(**SIZES, num_experts=1, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "hybrid": FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "fused": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=16, rope_parameters=None
    ),
    "shared": DeepseekV3Config(**(SIZES | SHARED), **LATENT, num_experts_per_tok=2, moe_intermediate_size=16),
}


def model_of(name, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "targets", "says", "fix"),
    [
        ("tied", ["does_not_exist"], "does_not_exist: no layer", "gate_proj, k_proj"),
        ("tied", ["q_proj", "v_prj", "up_poj"], "v_prj, up_poj: no layer", "did you mean v_proj, up_proj?"),
        ("gpt2", ["c_attn", "q_proj"], "q_proj: no layer", "c_attn"),
        ("tied", ["q_proj", "lm_head"], "lm_head cannot have an adapter: the output layer and the embeddings", "remove lm_head"),
        ("tied", ["embed_tokens", "q_proj"], "embed_tokens cannot have an adapter", "model.lora: null"),
        ("tied", ["q_proj", "self_attn"], "self_attn is no linear layer but Qwen2Attention", "linear layers in it"),
        ("mamba", ["in_proj", "dt_proj"], "dt_proj cannot have an adapter: Mamba reads its weight", "remove dt_proj"),
        ("hybrid", ["out_proj"], "out_proj cannot have an adapter", "remove out_proj"),
        ("experts", ["q_proj", "gate_proj"], "without also targeting up_proj because they are fused", "q_proj"),
    ],
)
def test_a_name_that_cannot_be_meant_is_named_wherever_it_stands(name, targets, says, fix):
    # Without weights: before any training.
    with pytest.raises(ConfigError) as caught:
        add_adapter(model_of(name, "meta"), LoraConfig(r=2, target_modules=targets))
    assert says in caught.value.message
    assert fix in caught.value.fix
    assert caught.value.place == "model.lora.target_modules"


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, "all-linear") for name in ("untied", "gpt2", "mamba", "jamba", "hybrid", "experts", "fused", "shared")),
        ("untied", ["q_proj", "lm_head"]),
        ("untied", ["q_proj", "embed_tokens"]),
        ("experts", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("jamba", ["q_proj", "in_proj", "gate_proj"]),
    ],
)
def test_trained_sampled_and_merged_policy_are_one_function(name, targets):
    policy = add_adapter(model_of(name), LoraConfig(r=2, target_modules=targets)).eval()
    assert policy.peft_config["default"].fan_in_fan_out == (name == "gpt2")
    with torch.no_grad():
        for key, weight in policy.named_parameters():
            if "lora_" in key:
                weight.normal_(0, 0.1)
        ids = torch.arange(3, 15)[None]
        trained = policy(input_ids=ids, use_cache=False).logits
        with policy.disable_adapter():
            assert (policy(input_ids=ids, use_cache=False).logits - trained).abs().max() > 0.05
        sampled = FoldedPolicy(policy).model(input_ids=ids, use_cache=False).logits
        merged = policy.merge_and_unload()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(sampled, trained, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(merged, trained, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "targets", "on", "without"),
    [
        ("mamba", "all-linear", "mixer.in_proj", "mixer.dt_proj, mixer.out_proj, mixer.x_proj have none"),
        ("fused", "all-linear", "self_attn.q_proj", "experts.down_proj, experts.gate_up_proj have none"),
        ("shared", "all-linear", "experts.down_proj, experts.gate_up_proj", "shared_experts.up_proj have none"),
        ("shared", ["o_proj", "gate_proj", "up_proj", "down_proj"], "self_attn.o_proj", "shared_experts.down_proj"),
    ],
)
def test_what_gets_no_adapter_is_said(name, targets, on, without):
    settings = LoraConfig(r=2, target_modules=targets)
    said = uncovered(add_adapter(model_of(name, "meta"), settings), settings)
    with_adapter, _, rest = said.partition("; ")
    assert on in with_adapter
    assert without in rest
    assert "lora_" not in said
    assert "base_layer" not in said


@pytest.mark.parametrize(("name", "targets"), [("tied", "all-linear"), ("experts", "all-linear"), ("tied", ["q_proj"])])
def test_nothing_is_said_where_every_layer_that_is_meant_has_one(name, targets):
    settings = LoraConfig(r=2, target_modules=targets)
    assert uncovered(add_adapter(model_of(name, "meta"), settings), settings) == ""
    assert unfit_layers(model_of(name)) == {}


def test_a_layer_unused_by_text_or_with_more_outputs_gets_no_adapter():
    model = model_of("untied")
    model.model.tower = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="tower cannot have an adapter: the model does not call it for text"):
        add_adapter(model, LoraConfig(r=2, target_modules=["q_proj", "tower"]))
    router = model.model.layers[0].self_attn.o_proj
    router.forward = lambda states: torch.nn.functional.linear(states, router.weight) * 2
    assert unfit_layers(model) == {
        "model.tower": "the model does not call it for text",
        "model.layers.0.self_attn.o_proj": "it computes more than W x + b",
    }
    adapted = [name for name, _ in add_adapter(model, LoraConfig(r=2)).named_parameters() if "lora_A" in name]
    assert not [name for name in adapted if "tower" in name or "layers.0.self_attn.o_proj" in name]
    assert [name for name in adapted if "layers.1.self_attn.o_proj" in name]


def test_layers_that_share_a_weight_are_refused():
    model = model_of("untied")
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    second.weight = first.weight
    with pytest.raises(
        ConfigError, match=r"layers.0.self_attn.q_proj and model.layers.1.self_attn.q_proj share one weight"
    ) as caught:
        add_adapter(model, LoraConfig(r=2))
    assert "k_proj" in caught.value.fix
    assert "q_proj" not in caught.value.fix


def test_an_adapters_file_is_the_same_in_every_process(tmp_path):
    for name in ("mamba", "experts"):
        add_adapter(model_of(name), LoraConfig(r=2)).save_pretrained(tmp_path / name)
        order_modules(tmp_path / name / "adapter_config.json")
        saved = json.loads((tmp_path / name / "adapter_config.json").read_text())
        lists = [saved[key] for key in ("target_modules", "target_parameters", "exclude_modules") if saved[key]]
        assert lists == [sorted(names) for names in lists]
        assert len(lists) == 2


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj"])
def test_lengths_beyond_a_table_of_positions_are_refused_with_the_limit(name, tmp_path):
    CONFIGS[name].save_pretrained(tmp_path)
    spec = StructureSpec(path=str(tmp_path), lora=None, longest=128)
    assert check_structure(spec) == []
    with pytest.raises(ConfigError, match="up to 129 tokens together, and the model has a table of 128 positions") as caught:
        check_structure(spec.model_copy(update={"longest": 129}))
    assert caught.value.place == "validation.max_prompt_length, rollout.max_completion_length"
    assert "128 tokens together" in caught.value.fix
    # As the model itself would have failed, after the base was evaluated on shorter ones.
    with pytest.raises((IndexError, RuntimeError)):
        model_of(name)(input_ids=torch.full((1, 140), 3))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_lengths_at_which_rotary_angles_change_are_refused_with_the_limit(rope):
    parameters = {
        "rope_type": rope, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=parameters)).eval()
    assert check_positions(model, 64) == ""
    with pytest.raises(ConfigError, match="rotary angles change with the length of a row beyond 64 tokens") as caught:
        check_positions(model, 65)
    assert "64 tokens together" in caught.value.fix
    engine = LocalEngine(model, load_tokenizer(ModelRef(path="embedded:base")))
    with pytest.raises(ConfigError, match="beyond 64 tokens"):
        engine.generate([Request([5, 6, 7], 0)], Sampling.of(RolloutConfig(max_completion_length=62)))


@pytest.mark.parametrize("name", ["untied", "shared"])
def test_lengths_beyond_rotary_positions_are_said(name, tmp_path):
    assert "made for 128 (max_position_embeddings)" in check_positions(model_of(name, "meta"), 129)
    model_of(name)(input_ids=torch.full((1, 140), 3))


def test_a_model_without_limits_or_that_cannot_be_built_is_not_judged(tmp_path):
    assert check_positions(model_of("mamba", "meta"), 10_000) == ""
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    assert empty_model(str(tmp_path), None) is None
    assert check_structure(StructureSpec(path=str(tmp_path), lora=LoraConfig(), longest=9)) == []
