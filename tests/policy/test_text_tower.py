"""A multimodal checkpoint is trained by its text tower and stays what it was published as. References: transformers, peft."""

import json
import shutil
from importlib.resources import files

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from grpo_tasks.policy.load import load_base, load_policy, load_tokenizer, load_trained, save_trained, trainable_policy
from grpo_tasks.policy.merge import MEAN_TOLERANCE, merge
from grpo_tasks.policy.text_tower import published_start
from schemas.config.model import ModelConfig
from schemas.errors import ModelError, Notice
from schemas.results.model import MergeSpec, ModelRef
from tests.zoo import build as zoo
from tests.zoo.build import TOKENIZER, config
from tests.zoo.kinds import EOS, PAD, ZOO

CPU = torch.device("cpu")
IDS = torch.arange(30, 50)[None]
MODELS = ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_moe", "qwen4_exp"))]
# Where transformers trains the published class itself.
WHOLE = ["gemma3", pytest.param("gemma4", marks=pytest.mark.slow)]
CHATS = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60)]
WAYS = pytest.mark.parametrize("settings", [{}, {"lora": None}, {"added_tokens": ["<ask>"]}], ids=["adapter", "full", "tokens"])


def published(name, folder, dtype=torch.bfloat16):
    """A checkpoint as these models are published: the text tower, a vision tower, and layers that predict further tokens."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config(*ZOO[name]), dtype=dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.randn(8, 16).to(dtype)}, folder / "model.safetensors", metadata={"format": "pt"})
    for file in TOKENIZER:
        shutil.copy(str(files("grpo_tasks.demo") / "base" / file), folder / file)
    (folder / "preprocessor_config.json").write_text('{"patch_size": 14}')
    return folder


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    return published(request.param, tmp_path_factory.mktemp(request.param))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def trained(checkpoint, **settings):
    """A policy in float32 whose adapter changes what it says."""
    settings = ModelConfig(path=str(checkpoint), merged_dtype="float32", **settings)
    policy = trainable_policy(ModelRef(path=settings.path), settings, device=CPU, seed=1)
    generator = torch.Generator().manual_seed(3)
    for _, parameter in sorted(policy.named_parameters()):
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return policy, settings


def test_the_vision_tower_is_not_loaded(checkpoint):
    model = load_base(ModelRef(path=str(checkpoint)), ModelConfig(path=str(checkpoint)), device=CPU)
    assert not [name for name, _ in model.named_parameters() if "visual" in name or "mtp" in name]
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(whole), rtol=0, atol=1e-5)
    assert published_start(str(checkpoint), None) == "model.language_model."


def test_an_adapter_has_the_names_of_the_published_class_and_comes_back(checkpoint, tmp_path, tokenizer):
    policy, settings = trained(checkpoint)
    save_trained(policy, tokenizer, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert names
    assert all(name.startswith("base_model.model.model.language_model.") for name in names)
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    base = logits(whole)
    theirs = PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
    assert (logits(policy) - base).abs().max() > 0.01
    torch.testing.assert_close(logits(theirs), logits(policy), rtol=0, atol=1e-5)
    again = load_policy(ModelRef(path=settings.path, adapter=tmp_path / "adapter"), settings, device=CPU)
    torch.testing.assert_close(logits(again), logits(policy), rtol=0, atol=1e-5)


def test_an_adapter_that_was_trained_on_the_published_class_is_loaded(checkpoint, tmp_path):
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    theirs = get_peft_model(whole, LoraConfig(target_modules=["q_proj", "v_proj", "out_proj"], r=4, init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    ours = load_policy(ModelRef(path=str(checkpoint), adapter=tmp_path), ModelConfig(path=str(checkpoint)), device=CPU)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)


@WAYS
def test_a_checkpoint_of_a_training_comes_back_whole(checkpoint, tmp_path, settings):
    policy, config = trained(checkpoint, **settings)
    save_trained(policy, load_tokenizer(ModelRef(path=config.path), config), tmp_path)
    again = trainable_policy(ModelRef(path=config.path), config, device=CPU, seed=2)
    load_trained(again, tmp_path)
    wanted = dict(policy.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_a_checkpoint_without_one_of_the_weights_is_refused(checkpoint, tmp_path, tokenizer):
    policy, _ = trained(checkpoint)
    save_trained(policy, tokenizer, tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = sorted(weights)[0]
    save_file({key: tensor for key, tensor in weights.items() if key != name}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="1 weights are missing"):
        load_trained(policy, tmp_path)


@WAYS
def test_a_merged_model_is_the_published_class_and_all_else_stays(checkpoint, tmp_path, settings):
    policy, settings = trained(checkpoint, **settings)
    tokenizer = load_tokenizer(ModelRef(path=settings.path), settings)
    ref = ModelRef(path=settings.path, adapter=tmp_path / "adapter") if settings.lora else ModelRef(path=str(tmp_path / "full"))
    save_trained(policy, tokenizer, ref.adapter or tmp_path / "full")
    figures = merge(MergeSpec(model=settings, ref=ref, prompts=CHATS, max_new_tokens=8), tmp_path, device=CPU)
    assert figures.kept > 0.95
    merged, said = tmp_path / "model", json.loads((checkpoint / "config.json").read_text())
    assert json.loads((merged / "config.json").read_text())["architectures"] == said["architectures"]
    assert (merged / "preprocessor_config.json").read_bytes() == (checkpoint / "preprocessor_config.json").read_bytes()
    whole, notes = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32, output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["mismatched_keys"]
    torch.testing.assert_close(logits(whole), logits(policy), rtol=0, atol=1e-4)
    before = load_file(checkpoint / "model.safetensors")
    index = json.loads((merged / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == before.keys()
    for name, file in index.items():
        if "language_model" in name or name == "lm_head.weight":
            continue
        with safe_open(merged / file, "pt") as opened:
            found = opened.get_tensor(name)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.view(torch.int16), before[name].view(torch.int16)), name


@pytest.mark.parametrize("name", WHOLE)
def test_a_vision_tower_that_was_loaded_keeps_its_precision(name, tmp_path, tokenizer):
    policy, settings = trained(published(name, tmp_path / "base"))
    save_trained(policy, tokenizer, tmp_path / "adapter")
    ref, merged = ModelRef(path=settings.path, adapter=tmp_path / "adapter"), tmp_path / "model"
    merge(MergeSpec(model=settings, ref=ref, prompts=CHATS, max_new_tokens=8), tmp_path, device=CPU)
    before, after = load_file(tmp_path / "base" / "model.safetensors"), {}
    for file in merged.glob("*.safetensors"):
        after |= load_file(file)
    vision = {key for key in before if "vision" in key}
    assert vision
    assert after.keys() == before.keys() - {"mtp.fc.weight"}
    assert {key for key in after if after[key].dtype == torch.float32} == {key for key in after if "language_model" in key}
    assert all(torch.equal(after[key].view(torch.int16), before[key].view(torch.int16)) for key in vision)
    assert (merged / "preprocessor_config.json").read_bytes() == (tmp_path / "base" / "preprocessor_config.json").read_bytes()
    whole, notes = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32, output_loading_info=True)
    assert not notes["missing_keys"]
    torch.testing.assert_close(logits(whole), logits(policy), rtol=0, atol=1e-4)


def test_a_vision_tower_in_another_precision_is_no_damage(tmp_path, tokenizer, monkeypatch):
    # A precision that differs too much is not taken. Before that, each weight is compared with its file.
    monkeypatch.setitem(MEAN_TOLERANCE, "bfloat16", 0.0)
    policy, settings = trained(published("gemma3", tmp_path / "base", torch.float32))
    save_trained(policy, tokenizer, tmp_path / "adapter")
    ref = ModelRef(path=settings.path, adapter=tmp_path / "adapter")
    settings = settings.model_copy(update={"merged_dtype": "auto"})
    figures = merge(MergeSpec(model=settings, ref=ref, prompts=CHATS, max_new_tokens=8), tmp_path, device=CPU)
    assert figures.dtype == "float16"
    assert [(one.dtype, "nats per token" in one.reason) for one in figures.refused] == [("bfloat16", True)]


def test_a_text_model_with_a_multimodal_config_is_merged_whole(tmp_path, tokenizer):
    zoo.save("qwen3_5", tmp_path / "base")
    policy, settings = trained(tmp_path / "base")
    save_trained(policy, tokenizer, tmp_path / "adapter")
    ref = ModelRef(path=settings.path, adapter=tmp_path / "adapter")
    assert merge(MergeSpec(model=settings, ref=ref, prompts=CHATS, max_new_tokens=8), tmp_path, device=CPU).kept > 0.95


@pytest.mark.slow
def test_a_merge_that_leaves_the_vision_tower_out_says_so(tmp_path, tokenizer):
    # The names of Llama 4's files are neither those of its text model nor those that transformers saves it with.
    policy, settings = trained(published("llama4", tmp_path / "base"))
    save_trained(policy, tokenizer, tmp_path / "adapter")
    ref = ModelRef(path=settings.path, adapter=tmp_path / "adapter")
    with pytest.warns(Notice, match="the merged model is the text model alone"):
        merge(MergeSpec(model=settings, ref=ref, prompts=CHATS, max_new_tokens=8), tmp_path, device=CPU)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["Llama4ForCausalLM"]
