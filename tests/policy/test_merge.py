"""What was learned is what is saved. The references are peft's base + adapter and transformers' loader, in float64."""

import json
import re
import shutil
import weakref

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.policy import merge as merging
from grpo_tasks.policy.load import save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.chat_session import ChatSession
from schemas.config.model import ModelConfig
from schemas.errors import MergeError
from schemas.paths import resolve
from schemas.results.model import MergeSpec, ModelRef, Sampling

CHATS = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60, 71)]


@pytest.fixture
def spec(policy, tokenizer, base_ref, tmp_path):
    save_trained(policy, tokenizer, tmp_path / "adapter")
    ref = base_ref.model_copy(update={"adapter": tmp_path / "adapter"})
    return MergeSpec(model=ModelConfig(), ref=ref, prompts=CHATS, max_new_tokens=24)


def merged(spec, tmp_path):
    return merge(spec, tmp_path, device=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_equals_base_and_adapter_and_loads_with_transformers_alone(spec, tmp_path, policy, dtype):
    spec = spec.model_copy(update={"model": ModelConfig(merged_dtype=dtype)})
    figures = merged(spec, tmp_path)
    assert figures.merge_difference < 1e-3
    assert figures.mean_logprob_difference <= figures.tolerance
    assert (figures.dtype, figures.refused) == (dtype, [])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer("What is 15 + 27?")["input_ids"]])
    tolerance = 1e-3 if dtype == "float32" else 0.3
    torch.testing.assert_close(model(ids).logits, policy.eval()(ids).logits, rtol=tolerance, atol=tolerance)
    assert tokenizer.chat_template
    assert (tmp_path / "model" / "generation_config.json").exists()
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}


@pytest.mark.slow
def test_a_merged_weight_is_rounded_once_and_to_the_same_bytes_again(spec, tmp_path, policy):
    assert merged(spec, tmp_path).sha256 == merged(spec, tmp_path / "again").sha256
    stored = load_file(tmp_path / "model" / "model.safetensors")
    adapted = {name: layer for name, layer in policy.get_base_model().named_modules() if isinstance(layer, Linear)}
    assert len(adapted) == 21
    twice = 0
    for name, layer in adapted.items():
        weight, delta = layer.base_layer.weight.float(), layer.get_delta_weight("default").float()
        assert torch.equal(stored[f"{name}.weight"], (weight + delta).bfloat16())
        twice += (stored[f"{name}.weight"] != weight.bfloat16() + delta.bfloat16()).sum()
    assert twice > 0  # rounding the parts first gives other weights


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "said"), [
    (lambda weight: weight * 3, r"norm (\S+) instead of (\S+)"), (torch.neg, "other values of the same norm"),
    (lambda weight: weight.flip(0), "other values of the same norm"),
], ids=["scaled", "negated", "rows in another order"])  # fmt: skip
def test_a_saved_model_that_differs_is_refused(spec, tmp_path, monkeypatch, damage, said):
    honest = merging._save

    def damaged(model, tokenizer, target, *, dtype):
        saved = honest(model, tokenizer, target, dtype=dtype)
        weights = load_file(target / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        save_file({**weights, name: damage(weights[name]).contiguous()}, target / "model.safetensors", metadata={"format": "pt"})
        return saved

    monkeypatch.setattr(merging, "_save", damaged)
    with pytest.raises(MergeError, match="differs from base \\+ adapter") as refused:
        merged(spec, tmp_path)
    # The weight that differs is named, with its figures, and no other.
    found = re.search(rf": model\.layers\.1\.mlp\.down_proj\.weight \({said}\)$", refused.value.message)
    assert found
    if found.groups():
        assert float(found[1]) == pytest.approx(3 * float(found[2]), rel=1e-3)


def test_a_merge_that_leaves_a_weight_out_names_it(spec, tmp_path, monkeypatch):
    honest = merging._merged

    def forgetful(policy):
        layer = policy.get_base_model().get_submodule("model.layers.2.self_attn.o_proj")
        torch.nn.init.zeros_(layer.lora_B["default"].weight)
        return honest(policy)

    monkeypatch.setattr(merging, "_merged", forgetful)
    with pytest.raises(MergeError, match=r"most in model\.layers\.2\.self_attn\.o_proj\.weight \(norm \S+ instead of \S+\)\n"):
        merged(spec, tmp_path)


FOREIGN = {
    "repetition_penalty": 1.5,
    "suppress_tokens": [40, 41, 42, 43],
    "begin_suppress_tokens": [44],
    "bad_words_ids": [[45, 46]],
    "forced_eos_token_id": 7,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 20,
    "num_beams": 2,
    "typical_p": 0.9,
    "temperature": 0.3,
    "top_p": 0.5,
    "stop_strings": ["a"],
    "exponential_decay_length_penalty": [2, 1.5],
}
"""What a base's generation_config.json may hold, and no engine of a training applies."""


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [FOREIGN, {"repetition_penalty": 1.5}, {"suppress_tokens": [40, 41, 42, 43]}], ids=len)
def test_a_merged_model_generates_as_it_was_trained_whatever_its_base_says(spec, tmp_path, foreign):
    base = tmp_path / "base"
    shutil.copytree(resolve(spec.ref.path), base)
    file = base / "generation_config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps({"do_sample": True, "eos_token_id": own["eos_token_id"], "max_new_tokens": 500} | foreign))
    sampling = Sampling(temperature=0.8, top_k=20, stop_token_ids=["="])
    spec = spec.model_copy(update={"ref": spec.ref.model_copy(update={"path": str(base)}), "sampling": sampling})
    figures = merged(spec, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    # The oracle: the likeliest token of the forward pass, one after the other.
    ids = tokenizer.apply_chat_template(CHATS[0], add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    expected, ends = ids, {own["eos_token_id"], tokenizer.convert_tokens_to_ids("=")}
    while expected.shape[1] < ids.shape[1] + 24 and not (expected.shape[1] > ids.shape[1] and expected[0, -1].item() in ends):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    # A user who sets nothing but the length.
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), expected)
    assert figures.answers[0].text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    said = "".join(ChatSession(tmp_path / "model").answer(CHATS[0], max_new_tokens=24, greedy=True))
    assert said == figures.answers[0].text
    found = model.generation_config
    assert (found.do_sample, found.temperature, found.top_p, found.top_k, found.max_new_tokens) == (True, 0.8, 1.0, 20, 500)
    assert set(found.eos_token_id) >= ends


@pytest.mark.slow
def test_a_saved_model_that_transformers_lets_generate_otherwise_is_refused(spec, tmp_path, monkeypatch):
    honest = merging.generation_of

    def forgetful(*arguments):
        config = honest(*arguments)
        config.repetition_penalty = 5.0
        return config

    monkeypatch.setattr(merging, "generation_of", forgetful)
    with pytest.raises(
        MergeError, match=r"does not answer with the saved model as the training did\n  where: .*generation_config.json"
    ):
        merged(spec, tmp_path)


SYSTEM = "Reply with <reasoning>...</reasoning><answer>...</answer>."
DEMO_CHATS = [[{"role": "system", "content": SYSTEM}, *chat] for chat in CHATS]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [SYSTEM, None])
def test_the_merged_model_asks_with_the_trained_system_prompt(spec, tmp_path, prompt):
    figures = merged(spec.model_copy(update={"prompts": DEMO_CHATS, "system_prompt": prompt}), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in (CHATS[0], DEMO_CHATS[0])]
    assert (rendered[0] == rendered[1]) is (prompt is not None)
    assert rendered[1].count(SYSTEM) == 1
    assert [answer.messages for answer in figures.answers] == DEMO_CHATS


@pytest.mark.slow
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


@pytest.mark.slow
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


def careful(tmp_path, updates, rate=1e-5, **settings):
    """The spec of a merge after a training in bfloat16 as Adam does it: each entry of B has moved by the rate at each update."""
    config = ModelConfig(dtype="bfloat16", **settings)
    policy = trainable_policy(ModelRef(path=config.path), config, device=torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator).sign() * rate * updates)
    save_trained(policy, AutoTokenizer.from_pretrained(resolve(config.path)), tmp_path / "adapter")
    ref = ModelRef(path=config.path, adapter=tmp_path / "adapter")
    return MergeSpec(model=config, ref=ref, prompts=CHATS, max_new_tokens=24)


@torch.no_grad()
def distances(spec, model):
    """Root of the mean KL divergence of the base, and of a merged model, from peft's base + adapter; all in float64."""
    base = AutoModelForCausalLM.from_pretrained(resolve(spec.ref.path), dtype=torch.float64)
    ids = torch.randint(5, 300, (4, 64), generator=torch.Generator().manual_seed(3))
    found = [base(ids).logits.log_softmax(-1)]
    policy = PeftModel.from_pretrained(base, spec.ref.adapter, autocast_adapter_dtype=False).double()(ids).logits.log_softmax(-1)
    found.append(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(ids).logits.log_softmax(-1))
    return [(policy.exp() * (policy - other)).sum(-1).mean().item() ** 0.5 for other in found]


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "dtype"), [(3, "float32"), (300, "float16"), (3000, "bfloat16")])
def test_what_a_careful_training_learned_is_in_the_merged_model(tmp_path, updates, dtype):
    spec = careful(tmp_path, updates)
    figures = merged(spec, tmp_path)
    base, model = distances(spec, tmp_path / "model")
    assert model < 0.05 * base
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert figures.dtype == dtype
    assert figures.kept >= 0.95 <= figures.kept_weights
    assert figures.merged_kl < 0.0025 * figures.base_kl
    # Which and why, in one sentence.
    shorter = ["bfloat16", "float16", "float32"]
    assert [one.dtype for one in figures.refused] == shorter[: shorter.index(dtype)]
    assert all(f"not {one.dtype}: it keeps " in figures.choice() for one in figures.refused)


def test_a_precision_that_loses_learning_is_refused_with_figures(tmp_path):
    spec = careful(tmp_path, 3, merged_dtype="bfloat16")
    with pytest.raises(MergeError) as refused:
        merged(spec, tmp_path)
    error = refused.value
    assert (error.place, error.fix) == ("model.merged_dtype", "model.merged_dtype: auto")
    assert re.search(r"bfloat16: it keeps \d+(\.\d)? % of the change of the weights; limit 95 %", error.message)
    assert len(re.findall(r"model\.layers\.\d\.\S+_proj\.weight \(\d+(\.\d)? %\)", error.message)) == 3
    assert re.search(r"others would keep: float16 \S+ %, float32 (100|99.9) %", error.message)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_policy_that_learned_nothing_is_saved_in_the_shortest_precision(tmp_path):
    figures = merged(careful(tmp_path, 0), tmp_path)
    assert (figures.dtype, figures.kept, figures.base_kl, figures.base_greedy_agreement) == ("bfloat16", 1.0, 0.0, 1.0)
    assert "training changed nothing" in figures.choice()


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "dtype"), [(1e-5, "float32"), (1e-2, "bfloat16")])
def test_a_small_full_training_is_kept_as_well(tmp_path, tokenizer, rate, dtype):
    config = ModelConfig(dtype="bfloat16", lora=None)
    policy = trainable_policy(ModelRef(path=config.path), config, device=torch.device("cpu"), seed=1)
    torch.manual_seed(0)
    for parameter in policy.parameters():
        parameter.data.add_(torch.randn_like(parameter).sign(), alpha=rate)
    save_trained(policy, tokenizer, tmp_path / "full")
    ref = ModelRef(path=str(tmp_path / "full"))
    figures = merged(MergeSpec(model=config, ref=ref, prompts=CHATS, max_new_tokens=24), tmp_path)
    assert figures.dtype == dtype
    assert figures.kept >= 0.95
    assert figures.base_kl > 0


@pytest.mark.slow
def test_float16_is_refused_where_activations_leave_its_range(tmp_path):
    # down(act(gate) * up) is the same when up is 2^14 times as large, and down as much smaller.
    large = AutoModelForCausalLM.from_pretrained(resolve("embedded:base"), dtype=torch.float32)
    for layer in large.model.layers:
        layer.mlp.up_proj.weight.data *= 2.0**14
        layer.mlp.down_proj.weight.data /= 2.0**14
    large.save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(resolve("embedded:base")).save_pretrained(tmp_path / "large")
    path = str(tmp_path / "large")
    spec = careful(tmp_path, 50, path=path, lora={"target_modules": ["q_proj", "v_proj"]})
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
    assert not half(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    figures = merged(spec, tmp_path)
    assert figures.dtype == "float32"
    assert "float16 ends at 65504" in figures.choice()
