"""A model with recurrent layers on a real vLLM server, merged and as an adapter: it says there what it says here.

vLLM imports torchvision with Qwen3.5, for images. Its build on PyPI needs CUDA, so the server gets the names alone (`imported/`),
and of the published multimodal class it serves the language model.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config, Qwen3_5TextConfig

from grpo_tasks.policy.load import save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.vllm_engine import VllmEngine, VllmSampler
from grpo_tasks.rollout.vllm_server import ServerModel, serving
from schemas.config.model import ModelConfig
from schemas.paths import resolve
from schemas.results.model import MergeSpec, ModelRef
from tests.rollout.servers import CONFIG, MARKS, moved, sampling
from tests.rollout.test_wrapped_model import differences
from tests.zoo.build import TOKENIZER, config
from tests.zoo.kinds import ZOO

pytestmark = MARKS
CPU = torch.device("cpu")
# The smallest sizes of heads that vLLM's kernels for CPUs take.
SIZES = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
IMPORTED = Path(__file__).parent / "imported"


LANGUAGE_ONLY = CONFIG.model_copy(update={"extra_args": ["--language-model-only"]})


def saved(folder, kind, dtype):
    """A small model of Qwen3.5 as a base: `text` is its text model alone, `published` the class that has images as well."""
    torch.manual_seed(0)
    if kind == "text":
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES, tie_word_embeddings=False), dtype=dtype)
    else:
        sizes = SIZES | {"tie_word_embeddings": False}
        vision = config(*ZOO["qwen3_5"]).vision_config.to_dict() | {"out_hidden_size": SIZES["hidden_size"]}
        whole = Qwen3_5Config(text_config=sizes, vision_config=vision, tie_word_embeddings=False)
        model = AutoModelForImageTextToText.from_config(whole, dtype=dtype)
    with torch.no_grad():
        # Random weights hardly prefer any token.
        model.get_output_embeddings().weight.mul_(20.0)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(f"{resolve('embedded:base')}/{name}", folder / name)
    return folder


@pytest.fixture(scope="module", params=["text", "published"])
def merged(request, tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp(request.param)
    settings = ModelConfig(path=str(saved(folder / "base", request.param, torch.bfloat16)), merged_dtype="bfloat16")
    policy = moved(trainable_policy(ModelRef(path=settings.path), settings, device=CPU, seed=1), 0.05)
    save_trained(policy, tokenizer, folder / "adapter")
    ref = ModelRef(path=settings.path, adapter=folder / "adapter")
    chats = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60)]
    merge(MergeSpec(model=settings, ref=ref, prompts=chats, max_new_tokens=8), folder, device=CPU)
    return request.param, folder / "model"


def test_vllm_samples_from_a_merged_hybrid_what_transformers_does(merged, tokenizer, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(IMPORTED))
    kind, folder = merged
    settings, loaded = (CONFIG, AutoModelForCausalLM) if kind == "text" else (LANGUAGE_ONLY, AutoModelForImageTextToText)
    requests = [Request(prompt, completion_seed(1, number)) for number, prompt in enumerate(prompts)]
    with serving(settings, ServerModel(folder, "bfloat16", None, cuda=False), tmp_path) as [server]:
        sampler = VllmSampler(tokenizer, 1, settings, [server], scratch=tmp_path / "scratch")
        sampler.sync()
        drawn = sampler.generate(requests, sampling(temperature=1.0))
        sampler.close()

    def here(model):
        found = []
        for prompt, completion in zip(prompts, drawn, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logps = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found += logps.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return torch.tensor(found)

    there = torch.tensor([logp for completion in drawn for logp in completion.logprobs])
    apart, from_base = (
        (here(loaded.from_pretrained(each, dtype=torch.float32).eval()) - there).abs().mean()
        for each in (folder, folder.parent / "base")
    )
    assert apart < 0.05 < from_base / 4


@pytest.mark.parametrize("kind", ["text", "published"])
def test_vllm_samples_from_the_adapter_of_a_hybrid(kind, tokenizer, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(IMPORTED))
    # vLLM's CPU build computes Gated DeltaNet in bfloat16 only.
    settings = ModelConfig(path=str(saved(tmp_path / "base", kind, torch.bfloat16)), dtype="bfloat16")
    policy = trainable_policy(ModelRef(path=settings.path), settings, device=CPU, seed=1)
    served = CONFIG if kind == "text" else LANGUAGE_ONLY
    with serving(served, ServerModel(tmp_path / "base", "bfloat16", 16, cuda=False), tmp_path) as [server]:
        engine = VllmEngine(policy, tokenizer, served, [server], weights=tmp_path / "served", dtype="bfloat16", merged=False)
        engine.sync()
        moved(policy, 0.05)
        engine.sync()
        apart, from_base = differences(engine, policy, prompts)
        engine.close()
    assert apart.abs().mean() < 0.05 < from_base.abs().mean() / 4
