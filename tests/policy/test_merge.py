import weakref

import pytest
import torch
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.policy import merge as merging
from grpo_tasks.policy.load import save_trained
from grpo_tasks.policy.merge import merge
from schemas.config.model import ModelConfig
from schemas.errors import MergeError
from schemas.results.model import MergeSpec

CHATS = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60, 71)]


@pytest.fixture
def spec(policy, tokenizer, base_ref, tmp_path):
    save_trained(policy, tokenizer, tmp_path / "adapter")
    ref = base_ref.model_copy(update={"adapter": tmp_path / "adapter"})
    return MergeSpec(model=ModelConfig(), ref=ref, prompts=CHATS, max_new_tokens=24)


def merged(spec, tmp_path):
    return merge(spec, tmp_path, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_equals_base_and_adapter_and_loads_with_transformers_alone(spec, tmp_path, policy, dtype):
    spec = spec.model_copy(update={"model": ModelConfig(merged_dtype=dtype)})
    figures = merged(spec, tmp_path)
    assert figures.merge_difference < 1e-3
    assert figures.mean_logprob_difference <= figures.tolerance
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer("What is 15 + 27?")["input_ids"]])
    tolerance = 1e-3 if dtype == "float32" else 0.3
    torch.testing.assert_close(model(ids).logits, policy.eval()(ids).logits, rtol=tolerance, atol=tolerance)
    assert tokenizer.chat_template
    assert (tmp_path / "model" / "generation_config.json").exists()
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}


def test_a_merged_weight_is_rounded_once_from_float32(spec, tmp_path, policy):
    merged(spec, tmp_path)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    adapted = {name: layer for name, layer in policy.get_base_model().named_modules() if isinstance(layer, Linear)}
    assert len(adapted) == 21
    twice = 0
    for name, layer in adapted.items():
        weight, delta = layer.base_layer.weight.float(), layer.get_delta_weight("default").float()
        assert torch.equal(stored[f"{name}.weight"], (weight + delta).bfloat16())
        twice += (stored[f"{name}.weight"] != weight.bfloat16() + delta.bfloat16()).sum()
    assert twice > 0  # rounding the parts first gives other weights


def test_a_saved_model_that_differs_is_refused(spec, tmp_path, monkeypatch):
    honest = merging._save

    def damaged(model, tokenizer, target, *, dtype):
        honest(model, tokenizer, target, dtype=dtype)
        weights = load_file(target / "model.safetensors")
        name = next(name for name in weights if "down_proj" in name)
        save_file({**weights, name: weights[name] * 3}, target / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(merging, "_save", damaged)
    with pytest.raises(MergeError, match="differs from base \\+ adapter"):
        merged(spec, tmp_path)


def test_the_same_merge_twice_gives_the_same_bytes(spec, tmp_path):
    first = merged(spec, tmp_path / "a")
    assert merged(spec, tmp_path / "b").sha256 == first.sha256


SYSTEM = "Reply with <reasoning>...</reasoning><answer>...</answer>."
DEMO_CHATS = [[{"role": "system", "content": SYSTEM}, *chat] for chat in CHATS]


@pytest.mark.parametrize("prompt", [SYSTEM, None])
def test_the_merged_model_asks_with_the_system_prompt_of_the_training_unless_the_setting_is_off(spec, tmp_path, prompt):
    figures = merged(spec.model_copy(update={"prompts": DEMO_CHATS, "system_prompt": prompt}), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in (CHATS[0], DEMO_CHATS[0])]
    assert (rendered[0] == rendered[1]) is (prompt is not None)
    assert rendered[1].count(SYSTEM) == 1
    assert [answer.messages for answer in figures.answers] == DEMO_CHATS


def test_a_template_that_treats_the_first_message_otherwise_is_refused(spec, tmp_path, monkeypatch):
    load = merging.load_tokenizer

    def counting_messages(*args):
        tokenizer = load(*args)
        # It writes the number of messages that the caller gave.
        tokenizer.chat_template = "{{- messages | length }}" + tokenizer.chat_template
        return tokenizer

    monkeypatch.setattr(merging, "load_tokenizer", counting_messages)
    with pytest.raises(MergeError, match="conversation without a system message"):
        merged(spec.model_copy(update={"prompts": DEMO_CHATS, "system_prompt": SYSTEM}), tmp_path)


def test_merging_never_holds_two_models(spec, tmp_path, monkeypatch):
    honest, loaded = merging.load_policy, []

    def counting(*args, **options):
        assert not [model for model in loaded if model() is not None]
        model = honest(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(merging, "load_policy", counting)
    merged(spec, tmp_path)
    assert len(loaded) == 2
