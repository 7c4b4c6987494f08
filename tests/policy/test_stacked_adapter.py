"""Two adapters, one trained on the merged model of the other, as one adapter of the first base; peft is the reference."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_tasks.policy.load import load_tokenizer, save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.policy.stacked_adapter import prove_stack, stack_adapters, vllm_rank
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import MergeError, ModelError
from schemas.paths import resolve
from schemas.results.model import MergeSpec, ModelRef

CHATS = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60, 71)]
FIRST = ModelConfig(merged_dtype="float32", lora=LoraConfig(r=4, lora_alpha=12, use_rslora=True))
SECOND = ModelConfig(merged_dtype="float32", lora=LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "down_proj"]))


def trained(ref, config, folder, seed):
    """An adapter whose effect is large, and the model that it was merged into."""
    policy = trainable_policy(ref, config, device=torch.device("cpu"), seed=seed)
    torch.manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    save_trained(policy, load_tokenizer(ref), folder / "adapter")
    spec = MergeSpec(model=config, ref=ref.model_copy(update={"adapter": folder / "adapter"}), prompts=CHATS, max_new_tokens=16)
    merge(spec, folder, device=torch.device("cpu"))
    return ModelRef(path=str(folder / "model"))


@pytest.fixture
def chain(base_ref, tmp_path):
    """Adapter folders, and the folder of the model after the second one."""
    first = trained(base_ref, FIRST, tmp_path / "1", 3)
    second = trained(first, SECOND.model_copy(update={"path": first.path}), tmp_path / "2", 4)
    return [tmp_path / "1" / "adapter", tmp_path / "2" / "adapter"], second.path


def logits(model, prompts):
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in prompts])


def test_the_stack_over_the_first_base_has_the_logits_of_the_last_model(chain, base_ref, prompts, tmp_path):
    adapters, merged = chain
    assert stack_adapters(adapters, base_ref, tmp_path / "stack") == 10
    base = AutoModelForCausalLM.from_pretrained(resolve(base_ref.path), dtype=torch.float32)
    alone = logits(base, prompts)
    stacked = logits(PeftModel.from_pretrained(base, tmp_path / "stack").eval(), prompts)
    wanted = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), prompts)
    torch.testing.assert_close(stacked, wanted, rtol=1e-3, atol=1e-3)
    assert (alone - wanted).abs().max() > 0.5
    proof = prove_stack(tmp_path / "stack", base_ref, tmp_path / "2" / "model", CHATS, dtype="float32", merges=2)
    assert proof.mean_difference < 1e-4 < proof.base_difference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_is_another_policy_is_refused(chain, base_ref, tmp_path, dtype):
    adapters, _ = chain
    stack_adapters(adapters, base_ref, tmp_path / "stack")
    file = tmp_path / "stack" / "adapter_model.safetensors"
    save_file({name: -tensor if "lora_B" in name else tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(MergeError, match="differs from the merged model") as refused:
        prove_stack(tmp_path / "stack", base_ref, tmp_path / "2" / "model", CHATS, dtype=dtype, merges=2)
    assert refused.value.fix


def test_an_adapter_with_more_than_low_rank_matrices_is_refused(chain, base_ref, tmp_path):
    adapters, _ = chain
    file = adapters[0] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    with pytest.raises(ModelError, match="more than low-rank matrices"):
        stack_adapters(adapters, base_ref, tmp_path / "stack")
    assert not (tmp_path / "stack").exists()


def test_the_rank_for_vllm_is_one_that_it_takes():
    assert [vllm_rank(rank) for rank in (1, 4, 16, 48, 513)] == [1, 8, 16, 64, 513]
