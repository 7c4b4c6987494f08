"""A merged model with recurrent layers on a real vLLM server: it says there what transformers says here.

vLLM imports torchvision with Qwen3.5, for images. Its build on PyPI needs CUDA, so the server gets the names alone (`imported/`),
and serves the text model.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from grpo_tasks.policy.load import save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.vllm_engine import VllmSampler
from grpo_tasks.rollout.vllm_server import ServerModel, serving
from schemas.config.model import ModelConfig
from schemas.paths import resolve
from schemas.results.model import MergeSpec, ModelRef
from tests.rollout.servers import CONFIG, MARKS, moved, sampling
from tests.zoo.build import TOKENIZER

pytestmark = MARKS
CPU = torch.device("cpu")
# The smallest sizes of heads that vLLM's kernels for CPUs take.
SIZES = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
IMPORTED = Path(__file__).parent / "imported"


@pytest.fixture(scope="module")
def merged(tmp_path_factory, tokenizer):
    folder, base = tmp_path_factory.mktemp("hybrid"), resolve("embedded:base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES, tie_word_embeddings=False), dtype=torch.bfloat16)
    with torch.no_grad():
        # Random weights hardly prefer any token.
        model.get_output_embeddings().weight.mul_(20.0)
    model.save_pretrained(folder / "base")
    for name in TOKENIZER:
        shutil.copy(f"{base}/{name}", folder / "base" / name)
    settings = ModelConfig(path=str(folder / "base"), merged_dtype="bfloat16")
    policy = moved(trainable_policy(ModelRef(path=settings.path), settings, device=CPU, seed=1), 0.05)
    save_trained(policy, tokenizer, folder / "adapter")
    ref = ModelRef(path=settings.path, adapter=folder / "adapter")
    chats = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60)]
    merge(MergeSpec(model=settings, ref=ref, prompts=chats, max_new_tokens=8), folder, device=CPU)
    return folder / "model"


def test_vllm_samples_from_a_merged_hybrid_what_transformers_does(merged, tokenizer, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(IMPORTED))
    requests = [Request(prompt, completion_seed(1, number)) for number, prompt in enumerate(prompts)]
    with serving(CONFIG, ServerModel(merged, "bfloat16", None, cuda=False), tmp_path) as [server]:
        sampler = VllmSampler(tokenizer, 1, CONFIG, [server], scratch=tmp_path / "scratch")
        sampler.sync()
        drawn = sampler.generate(requests, sampling(temperature=1.0))
        sampler.close()

    def here(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = []
        for prompt, completion in zip(prompts, drawn, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logps = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found += logps.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return torch.tensor(found)

    there = torch.tensor([logp for completion in drawn for logp in completion.logprobs])
    apart, from_base = (here(merged) - there).abs().mean(), (here(merged.parent / "base") - there).abs().mean()
    assert apart < 0.05 < from_base / 4
